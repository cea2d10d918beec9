"""Root-mean-square norms of joint graphs: results and what is saved are eager's."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed
from kit.support import fresh, groups, relevant_strides, script, train

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]

FLOATS = [torch.bfloat16, torch.float32, torch.float64]
CALLS = 4


def scaled(x: Tensor, w: Tensor):
    return torch.rms_norm(x, [8], w) * 2.0


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_result_has_the_dtype_of_the_operand(device, dtype, weight):
    x = torch.linspace(-2, 3, 32, device=device).view(4, 8).to(dtype).requires_grad_()
    w = torch.linspace(0.5, 2, 8, device=device).to(weight).requires_grad_()
    scripted = fresh(scaled)
    with tsfuser.fuser():
        y, found = train(scripted, [x, w])
    expected, wanted = train(scaled, [x, w])
    least = torch.bfloat16 if torch.bfloat16 in (dtype, weight) else torch.float32
    bounds = {"rtol": 4 * torch.finfo(least).eps, "atol": 16 * torch.finfo(least).eps}
    torch.testing.assert_close((y, *found), (expected, *wanted), **bounds)
    assert is_packed(scripted, x, w)


def test_the_result_is_row_major_or_channels_last(device):
    scripted = fresh(scaled)
    with tsfuser.fuser():
        for x in (
            torch.randn(3, 4, 6, 8, device=device),
            torch.randn(3, 4, 8, 6, device=device).permute(0, 1, 3, 2),
            torch.randn(3, 8, 4, 6, device=device).permute(0, 2, 3, 1),
            torch.randn(3, 4, 6, 8, device=device).contiguous(memory_format=torch.channels_last),
            torch.randn(1, 4, 1, 8, device=device).contiguous(memory_format=torch.channels_last),
        ):
            x, w = x.requires_grad_(), torch.rand(8, device=device).requires_grad_()
            for _ in range(CALLS):
                y, expected = scripted(x, w), scaled(x, w)
                found, wanted = (torch.autograd.grad(z.square().sum(), (x, w)) for z in (y, expected))
            assert relevant_strides(y) == relevant_strides(expected)
            torch.testing.assert_close((y, *found), (expected, *wanted), rtol=1e-4, atol=1e-4)
    assert is_packed(scripted, x, w)


def test_an_operand_of_which_eager_saves_a_cast_may_be_written_to():
    """On the CPU."""
    scripted, w = fresh(scaled), torch.ones(8, dtype=torch.bfloat16)
    found = []
    with tsfuser.fuser():
        for called in CALLS * [scripted] + [scaled]:
            x = torch.linspace(-2, 3, 32).view(4, 8).bfloat16().requires_grad_()
            y = called(x, w)
            with torch.no_grad():
                x.add_(1)
            found.append(torch.autograd.grad(y[:, :3].sum(), x)[0])
    for got in found[:-1]:
        torch.testing.assert_close(got, found[-1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_usual_epsilon_is_that_of_what_is_computed_in(device, dtype):
    """Of 16 bits that is float32."""

    def normed(x: Tensor):
        return torch.rms_norm(x, [8]) * 2.0

    scripted, x = fresh(normed), torch.full((4, 8), 0.01, device=device, dtype=dtype, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(CALLS):
            y = scripted(x)
            torch.testing.assert_close(y, normed(x), rtol=0.01, atol=0)


@pytest.mark.parametrize("sizes", ["[y.size(-1)]", "[y.size(1), y.size(2)]", "[a, b]"])
def test_the_sizes_may_be_computed_and_are_checked(sizes):
    scripted = script(f"""
def f(x: Tensor, a: int, b: int):
    y = torch.cos(x)
    return torch.nn.functional.rms_norm(y, {sizes}, eps=0.25) * 2.0
""")
    x = torch.randn(2, 3, 4, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(4):
            got = torch.autograd.grad(scripted(x, 3, 4).square().sum(), x)
        dims = [4] if "-1" in sizes else [3, 4]
        wanted = (torch.nn.functional.rms_norm(x.cos(), dims, eps=0.25) * 2.0).square().sum()
        torch.testing.assert_close(got, torch.autograd.grad(wanted, x))
        assert is_packed(scripted, x, 3, 4)
        if sizes == "[a, b]":
            for others in ((4, 3), (12, 1), (2, 6), (4, 4)):
                with pytest.raises(RuntimeError):
                    scripted(x, *others)


@pytest.mark.parametrize("weight", [None, "w"])
def test_the_backward_is_one_group(weight):
    """The check of sizes views the operand by a list that the forward saves."""
    body = f"torch.sigmoid(torch.rms_norm(x.tanh(), [6], {weight}) * w)"
    scripted = script(f"def f(x: Tensor, w: Tensor):\n    return {body}\n")
    x, w = (torch.randn(size).requires_grad_() for size in ((3, 5, 6), 6))
    with tsfuser.fuser():
        for _ in range(CALLS):
            torch.autograd.grad(scripted(x, w).sum(), (x, w))
    assert is_packed(scripted, x, w) and len(groups(scripted)) == 2
