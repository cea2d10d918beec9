"""The derivative of relu behind a batch norm, which computes where the result is positive."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.norm_steps import DTYPES, evaluated, operands, trained
from kit.support import assert_matches, fresh, kinds, no_fallback
from tsfuser.frontends.torchscript import passes


def normed(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
    y = F.batch_norm(x, mean, var, w, b, training=training)
    return torch.relu(y) * 0.5


def scaled(x: Tensor, w: Tensor, b: Tensor | None, mean: Tensor, var: Tensor, training: bool):
    y = F.batch_norm(x, mean, var, w, training=training)
    return torch.relu(y) * 0.5


def perhaps(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, training: bool):
    y = F.batch_norm(x, mean, var, w, b, training=training)
    return torch.relu(y) * 0.5


def in_place(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
    y = F.batch_norm(x, mean, var, w, b, training=training)
    torch.relu_(y)
    return y * 0.5


def asked(seen):
    groups = [g for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    return sum(kind == "tsfuser::relu_backward" for g in groups for kind in kinds(g))


@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype, channels_last, training):
    tensors = operands(device, dtype, channels_last=channels_last)
    gradient = torch.randn(4, 6, 9, 11, generator=torch.Generator().manual_seed(8)).to(device)
    if channels_last and dtype != torch.float32:  # of float32 it lies in memory otherwise than the operand
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    scripted = fresh(normed)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(scripted, tensors, gradient, training, 4)
    assert by_joint_graphs() or asked(seen) >= 1
    double = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = trained(normed, double, gradient.double(), training)
    for mine, theirs, true in zip(got, trained(normed, tensors, gradient, training), exact):
        assert_matches(mine, theirs, true, ops=2000, precision=dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_takes_the_branches_of_the_forward(device, dtype, training):
    """Many results lie near 0, or are 0 once they are rounded. The gradient of the shift counts those that
    are positive."""
    x, w, b, mean, var = operands(device, dtype, (16, 4, 32, 32))
    with torch.no_grad():
        x.copy_((x * 4).round() / 16)
        b.zero_()
        w.copy_(torch.tensor([1e-3, -1e-7, 3e-8, 0.0]))
        mean.zero_()

    def program(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
        y = torch.relu(F.batch_norm(x, mean, var, w, b, training=training))
        return y, y * 1.0

    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            y, z = scripted(x, w, b, mean.clone(), var.clone(), training)
            [counted] = torch.autograd.grad(z, b, torch.ones_like(z))
    assert by_joint_graphs() or asked(seen) >= 1
    assert torch.equal(counted, (y > 0).sum((0, 2, 3)).to(counted.dtype))
    assert 0 < (y > 0).sum() < y.numel()


def test_running_statistics_that_move_before_the_backward(device):
    """The branches of an evaluation are those that it took."""
    tensors = operands(device)
    scripted, want = fresh(normed), evaluated(normed, tensors)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            got = evaluated(scripted, tensors)
    for mine, theirs in zip(got, want):
        assert_matches(mine, theirs, ops=4000)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_operand_that_the_forward_makes_is_not_read_rounded(device, dtype, training):
    """The forward's group has it with more digits than the backward would read."""

    def program(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool):
        y = torch.relu(F.batch_norm(torch.tanh(x), mean, var, w, b, training=training))
        return y, y * 1.0

    x, w, b, mean, var = operands(device, dtype, (8, 3, 64, 64))
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            y, z = scripted(x, w, b, mean.clone(), var.clone(), training)
            [counted] = torch.autograd.grad(z, b, torch.ones_like(z))
    assert asked(seen) == 0
    assert torch.equal(counted, (y > 0).sum((0, 2, 3)).float())


def test_a_bias_that_is_written_to_before_the_backward(device):
    x, w, b, mean, var = operands(device)
    gradient = torch.randn_like(x)
    want = trained(normed, (x, w, b, mean, var), gradient, True)
    scripted, bias = fresh(normed), b.detach().clone()
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            y = scripted(x, w, b, mean.clone(), var.clone(), True)
            b.data.add_(100.0)
            gradients = torch.autograd.grad(y, (x, w, b), gradient)
            b.data.copy_(bias)
    for mine, theirs in zip([y.detach(), *gradients], want):
        assert_matches(mine, theirs, ops=4000)


@pytest.mark.parametrize("program, given", [(in_place, "wb"), (scaled, "w"), (perhaps, "wb"), (perhaps, "w")])
def test_other_forms(device, program, given):
    x, w, b, mean, var = operands(device)
    tensors = x, w, b if "b" in given else None, mean, var
    gradient = torch.randn_like(x)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got = trained(fresh(program), tensors, gradient, True, 4)
    # a bias that may be None is not copied
    assert by_joint_graphs() or (asked(seen) > 0) == (program is not perhaps)
    for mine, theirs in zip(got, trained(program, tensors, gradient, True)):
        assert_matches(mine, theirs, ops=4000)


def test_second_derivatives(device):
    tensors = operands(device, torch.float64, (2, 3, 4, 4))
    scripted = fresh(normed)

    def second(function):
        x, w, b, mean, var = tensors
        [first] = torch.autograd.grad(
            (function(x, w, b, mean.clone(), var.clone(), True) ** 2).sum(), x, create_graph=True
        )
        return torch.autograd.grad((first**2).sum(), x)[0]

    want = second(normed)
    with tsfuser.fuser():
        for _ in range(4):
            got = second(scripted)
    torch.testing.assert_close(got, want)


def test_another_result_than_that_of_a_norm_is_compared(device):
    def program(x: Tensor, w: Tensor):
        return torch.relu(x * w) * 0.5

    x = torch.randn(5, 7, device=device, requires_grad=True)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for _ in range(4):
            [got] = torch.autograd.grad(scripted(x, x.detach() + 1).sum(), x)
    assert seen and asked(seen) == 0
    [want] = torch.autograd.grad(program(x, x.detach() + 1).sum(), x)
    assert_matches(got, want, ops=4)
