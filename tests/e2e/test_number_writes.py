"""Numbers that are written to parts of tensors are filled in, as in eager code
(csrc_stubs/torchscript/number_writes.cpp). To parts of new zeros they are one op of a group
(filled_parts.cpp)."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.opsweep import plain
from kit.support import fresh, groups, script
from kit.support import kinds as graph_kinds

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error"), pytest.mark.graphs]

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


MASK = """
def f(x: Tensor, h: int, w: int, s: int):
    mask = x.new_zeros((h, w))
    mask[0:-s, 0:-s] = 1
    mask[0:-s, -s:] = 2
    mask[-s:, :w - 1] = {k}
    mask[1:h, w - 1:] = 4
    mask[:, 1:1] = 5
    mask[-100:2] = {last}
    return mask.view(-1).unsqueeze(0) - mask.t().reshape(-1).unsqueeze(1){dot}
"""


def masks(k="3", last="-100.0", dot=" * 0.5 + x.sum()"):
    return MASK.format(k=k, last=last, dot=dot)


SIZES = [(6, 8, 3), (6, 8, 1), (5, 4, 2), (1, 4, 1), (6, 1, 3), (2, 2, 5), (0, 3, 1), (7, 7, 7)]


@pytest.mark.parametrize("trained", [False, True])
def test_parts_of_new_zeros_are_filled_at_once(device, trained):
    eager, fused = plain(masks()), script(masks())
    x = torch.randn(3, device=device).requires_grad_(trained)
    with tsfuser.fuser(), torch.set_grad_enabled(trained):
        for sizes in SIZES:
            for _ in range(CALLS):
                torch.testing.assert_close(fused(x, *sizes), eager(x, *sizes), rtol=1e-6, atol=1e-5)
        assert not kinds(torch.jit.last_executed_optimized_graph())
        before = tsfuser.stats()["launches"]
        fused(x, *SIZES[0])
        launches = tsfuser.stats()["launches"] - before
    # in training it is a group of its own; else another one sums x
    assert launches == 2
    assert trained or any("tsfuser::filled" in graph_kinds(group) for group in groups(fused))


TWO = """
def f(x: Tensor):
    m = x.new_zeros([3, 4])
    m[:1] = 1
    m[1:] = 2
    k = x.new_zeros([3, 5])
    k[{dims}] = 3
    k[1:] = 7
    k[:, 2:] = {last}
    return (m * x[0]).sum() + (k * x[1]).sum()
"""


@pytest.mark.parametrize("trained", [False, True])
def test_several_tensors_in_one_function(device, trained):
    """Every call is right, the first one, too, which runs no group."""
    for dims, last in ((":1", 5), (":1, 1:", 5), (":1, 1:", 6)):
        source = TWO.format(dims=dims, last=last)
        eager, fused = plain(source), script(source)
        for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
            found = []
            for function in (eager, fused):
                x = (torch.ones(3, device=device) * scale).requires_grad_(trained)
                with tsfuser.fuser():
                    y = function(x)
                found.append([y.detach(), *(torch.autograd.grad(y, x) if trained else ())])
            for theirs, ours in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("k, last", [("3", "7"), ("300", "-1"), ("2.75", "70000.0"), ("-0.0", "1e-8")])
@pytest.mark.filterwarnings("ignore:a fusion group")
def test_parts_of_any_dtype(device, dtype, k, last):
    """Numbers become of the dtype as TorchScript writes them, of integers, and eager of others."""
    source = masks(k, last, "").replace(" - mask.t", " * 2 + mask.t")
    x = torch.ones(3, device=device).to(dtype)
    expected = plain(source) if dtype.is_floating_point else script(source)
    with torch.jit.fuser("none"):
        theirs = [expected(x, *SIZES[0]) for _ in range(CALLS)][-1]
    fused = script(source)
    with tsfuser.fuser():
        for _ in range(CALLS):
            found = fused(x, *SIZES[0])
    assert found.dtype == theirs.dtype
    torch.testing.assert_close(found, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "change",
    [
        ("return mask.view(-1).unsqueeze(0)", "return mask, mask.view(-1).unsqueeze(0)"),
        ("mask[0:-s, -s:] = 2", "mask[0:-s, -s:] = mask[:1, :1]"),  # reads another part
        ("mask[0:-s, -s:] = 2", "t = mask.sum()\n    mask[0:-s, -s:] = 2\n    mask = mask + t"),
        ("mask[0:-s, -s:] = 2", "v = mask[1:]\n    mask[0:-s, -s:] = 2\n    mask[:1] = v.sum()"),
        ("mask[0:-s, -s:] = 2", "if s > 2:\n        mask[0:-s, -s:] = 2"),
        ("mask[0:-s, -s:] = 2", "mask[0:-s][1:, -s:] = 2"),
        ("mask[0:-s, -s:] = 2", "mask[0:-s:2, -s:] = 2"),
        ("mask[0:-s, -s:] = 2", "mask[0, -s:] = 2"),
        ("mask[0:-s, -s:] = 2", "mask[:2].fill_(9.0).mul_(2.0)"),
        ("x.new_zeros((h, w))", "x.new_ones((h, w))"),
        ("mask[0:-s, 0:-s] = 1", "k = mask\n    mask[0:-s, 0:-s] = 1\n    k[1:] = 8\n    mask = mask + k"),
        ("x.new_zeros((h, w))", "torch.zeros([h, w], dtype=x.dtype, device=x.device)"),
        ("mask.view(-1)", "mask.view(-1).add_(1.0)"),
    ],
    ids=lambda change: change[1].replace("\n    ", "; "),
)
def test_other_readers_see_what_they_see_in_eager(device, change):
    source = masks().replace(*change)
    assert source != masks()
    eager, fused = plain(source), script(source)
    x = torch.randn(3, device=device)
    with tsfuser.fuser():
        for sizes in SIZES[:3]:
            for _ in range(CALLS):
                found = fused(x, *sizes)
            torch.testing.assert_close(found, eager(x, *sizes), rtol=1e-6, atol=1e-5)
