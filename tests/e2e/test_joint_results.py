"""Derivatives of activations that read the result where that is saved anyway (tsfuser/joint/results.py)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.support import fresh

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


def clipped(x: Tensor, w: Tensor):
    return torch.mm(F.relu6(x * 9.0), w)


def bounded(x: Tensor, w: Tensor):
    return torch.mm(F.hardtanh(x * 3.0, -0.5, 2.0), w)


def soft(x: Tensor, w: Tensor):
    return torch.mm(F.softplus(x * 9.0), w)


def soft_early(x: Tensor, w: Tensor):
    return torch.mm(F.softplus(x * 9.0, 2.0, 0.5), w)


def leaky(x: Tensor, w: Tensor):
    return torch.mm(F.leaky_relu(x * 9.0, 0.1), w)


def falling(x: Tensor, w: Tensor):
    """The result does not tell the operand's sign."""
    return torch.mm(F.leaky_relu(x * 9.0, -0.5), w)


def rounded(x: Tensor, w: Tensor):
    """In 16 bits 0.7 is less."""
    return torch.mm(F.hardtanh(x * 1.0, -0.7, 0.7), w)


def returned(x: Tensor, w: Tensor):
    y = F.relu6(x * 9.0)
    return torch.cat([y, torch.exp(w)])


def operands():
    edges = torch.tensor([0.0, -0.0, 2 / 3, 1.0, -3.0, 30.0, float("nan"), 0.1], dtype=torch.float64)
    return edges.view(2, 4).requires_grad_(), torch.rand(4, 4, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(
    "program, tensors", [(clipped, 2), (bounded, 2), (soft, 2), (soft_early, 3), (leaky, 2), (falling, 3)]
)
def test_values_and_what_is_saved(program, tensors):
    scripted, (x, w), memory = fresh(program), operands(), set()

    def pack(tensor):
        memory.add(tensor.data_ptr())
        return tensor

    with tsfuser.fuser():
        for _ in range(4):
            memory.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = scripted(x, w)
            found = torch.autograd.grad(y.sum(), (x, w))
    assert len(memory) == tensors
    expected = program(x, w)
    wanted = torch.autograd.grad(expected.sum(), (x, w))
    torch.testing.assert_close((y, *found), (expected, *wanted), equal_nan=True, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("program", [clipped, bounded, soft, soft_early, leaky])
def test_second_derivatives(program):
    scripted, (x, w) = fresh(program), operands()
    x = x.detach().nan_to_num(0.3).requires_grad_()

    def second(function):
        (first,) = torch.autograd.grad(function(x, w).square().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sin().sum(), (x, w))]

    with tsfuser.fuser():
        for _ in range(4):
            found = second(scripted)
    torch.testing.assert_close(found, second(program), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bounds_that_are_rounded(dtype):
    """The derivative is 0 where the operand is beyond them."""
    scripted = fresh(rounded)
    x = torch.tensor([[0.7, 0.71, -3.0, 0.69], [0.3, 8.0, -0.7, 0.0]], dtype=dtype, requires_grad=True)
    w = torch.ones(4, 2, dtype=dtype, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(4):
            found = torch.autograd.grad(scripted(x, w).sum(), (x, w))
    torch.testing.assert_close(found, torch.autograd.grad(rounded(x, w).sum(), (x, w)))


def test_a_result_that_only_this_derivative_reads_may_be_written_to():
    """Eager saves the operand."""
    scripted, (x, w) = fresh(returned), operands()
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (scripted, returned):
                y = function(x, w)
                y.mul_(2.0)
                found.append(torch.autograd.grad(y.nan_to_num().sum(), (x, w)))
            torch.testing.assert_close(*found, equal_nan=True)
