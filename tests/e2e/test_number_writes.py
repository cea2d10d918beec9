"""Numbers that are written to parts of tensors are filled in, as in eager code
(csrc_stubs/torchscript/number_writes.cpp)."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.support import fresh

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

CALLS = 4


def parts(x: Tensor, k: int, f: float) -> Tensor:
    y = torch.sigmoid(x * 2) * 3
    y[:2, 1:] = k
    y[-1] = f
    y[0, 0] = True
    y[1:, ::2] = 7
    return torch.tanh(y) + x


def of_ints(x: Tensor, k: int, f: float) -> Tensor:
    y = (x * 2 + 1).clone()
    y[:2, 1:] = k
    y[-1] = f
    y[0, 0] = True
    return y + x * 3


def of_another_dtype(x: Tensor, k: int, f: float) -> Tensor:
    y = torch.sigmoid(x * 2) * 3
    z = y.new_zeros([3], dtype=torch.float32)
    z[:2] = torch.tensor(f, dtype=torch.float64, device=x.device)
    z[2:] = torch.tensor(k, dtype=torch.float32, device=x.device)
    return y + z.sum()


def through_if(x: Tensor, k: int, f: float) -> Tensor:
    y = torch.sigmoid(x * 2) * 3
    if k > 1:
        for i in range(3):
            y[i] = i
    return y * 2 + x


def ran(function, x, k, f, trained):
    x = x.clone().requires_grad_(trained)
    out = function(x, k, f)
    if not trained:
        return [out]
    out.sum().backward()
    return [out.detach(), x.grad]


def scripted(function, cases):
    """Results of all calls, and the graph of the last one."""
    made = fresh(function)
    found = [ran(made, *case) for case in cases for _ in range(CALLS)]
    return found, torch.jit.last_executed_optimized_graph()


def kinds(graph):
    return [node.kind() for kind in ("aten::copy_", "aten::fill_") for node in graph.findAllNodes(kind)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [parts, through_if])
def test_parts_are_filled(device, function, trained):
    torch.manual_seed(0)
    cases = [
        (torch.randn(3, 5, device=device), 2, -0.5, trained),
        (torch.randn(4, 4, device=device), 3, 9.0, trained),
    ]
    with tsfuser.fuser():
        found, graph = scripted(function, cases)
    assert set(kinds(graph)) == {"aten::fill_"}
    expected = [ran(function, *case) for case in cases for _ in range(CALLS)]
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.bool]
)
def test_numbers_become_of_the_dtype_as_torchscript_writes_them(device, dtype):
    """Also those that `fill_` would refuse: 300 in uint8."""
    x = torch.tensor([[0, 1, 2], [1, 0, 1], [1, 1, 0]], device=device).to(dtype)
    cases = [(x, k, f, False) for k, f in ((3, 2.75), (300, 70000.0), (-1, -1.5))]
    for case in cases:
        expected, plain = scripted(of_ints, [case])
        with tsfuser.fuser():
            found, graph = scripted(of_ints, [case])
        assert set(kinds(plain)) == {"aten::copy_"} and set(kinds(graph)) == {"aten::fill_"}
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_tensors_of_another_dtype_are_copied(device):
    cases = [(torch.randn(3, 5, device=device), 2, 0.1, False)]
    with tsfuser.fuser():
        found, graph = scripted(of_another_dtype, cases)
    assert kinds(graph) == ["aten::copy_"] * 2
    torch.testing.assert_close(found[-1], ran(of_another_dtype, *cases[0]))
