"""Gradients have the layout of the tensor that they are the gradient of."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.support import assert_matches, fresh, kinds, no_fallback, train
from tsfuser.frontends.torchscript import passes
from tsfuser.frontends.torchscript.training.gradient_layout import LAID_OUT

pytestmark = pytest.mark.graphs


def heads(x: Tensor, w: Tensor):
    """What is fused reads a permuted view, and its result is permuted back, by an op that autodiff does not
    take."""
    n, t, c = x.shape
    h = (x * 2.0).tanh().view(n, t, 4, c // 4).movedim(1, 2)
    h = torch.tanh(h * w) * torch.sigmoid(h) * w
    return h.movedim(1, 2).reshape(n, t, c)


def last_exchanged(x: Tensor, w: Tensor):
    h = (x * 2.0).transpose(-2, -1)
    return torch.tanh(h.contiguous() * w) * torch.sigmoid(h) * w


def given(x: Tensor, w: Tensor):
    return torch.tanh(x * w) * torch.sigmoid(x) * w


def tensors(device, sizes=(3, 10, 32), dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    width = {heads: sizes[2] // 4, last_exchanged: sizes[1]}
    return lambda program: [
        torch.randn(s, generator=generator).to(device, dtype).requires_grad_()
        for s in (sizes, (width.get(program, sizes[2]),))
    ]


def wished(program, arguments):
    """The scripted program, trained, and the groups that follow a layout hint."""
    scripted = fresh(program)
    with tsfuser.fuser(), passes.watching() as seen, no_fallback():
        for _ in range(4):
            scripted(*arguments).sum().backward()
    graphs = [outcome.graph for outcome in seen]
    made = [
        g
        for graph in graphs
        for g in graph.findAllNodes("prim::CudaFusionGroup", True)
        if LAID_OUT in kinds(g)
    ]
    assert not any(graph.findAllNodes(LAID_OUT, True) for graph in graphs)  # none is left outside
    return scripted, made


@pytest.mark.parametrize("program", [heads, last_exchanged])
def test_a_gradient_lies_as_what_it_is_of(device, program):
    arguments = tensors(device)(program)
    scripted, made = wished(program, arguments)
    assert made
    seen = []
    with tsfuser.fuser():
        out = scripted(*arguments)
        waiting = [out.grad_fn]
        while waiting:  # the gradient that comes to a view, of the view's sizes
            node = waiting.pop()
            if node.name() in ("TransposeBackward0", "PermuteBackward0"):
                node.register_prehook(lambda g: seen.append(g[0].stride()))
            waiting += [n for n, _ in node.next_functions if n is not None]
        out.sum().backward()
    n, t, c = arguments[0].shape
    wanted = (t * c, c // 4, c, 1) if program is heads else (t * c, 1, c)
    assert seen[-1] == wanted


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("program", [heads, last_exchanged, given])
def test_gradients(device, program, dtype):
    scripted = fresh(program)
    for sizes in ((3, 10, 32), (2, 7, 8), (1, 10, 32), (3, 1, 4), (0, 5, 8)):
        arguments = tensors(device, sizes, dtype)(program)
        with tsfuser.fuser():
            out, gradients = train(scripted, arguments)
        want, expected = train(program, arguments, calls=1)
        wide = [t.detach().double().requires_grad_() for t in arguments]
        exact, exact_gradients = train(program, wide, calls=1)
        for got, eager, true in zip([out, *gradients], [want, *expected], [exact, *exact_gradients]):
            assert_matches(got, eager, true, ops=80)


def test_what_the_program_is_given_has_no_wish(device):
    """The caller would see the strides."""
    x, w = tensors(device)(given)
    scripted, made = wished(
        given, (x.detach().transpose(0, 2).requires_grad_(), torch.ones(3, device=device, requires_grad=True))
    )
    assert not made


def test_second_derivatives(device):
    """Where some gradients are zeros without elements, which no op takes. A pass that fails there fails the
    test (`no_pass_fails`)."""
    arguments = [t.detach().double().requires_grad_() for t in tensors(device, (2, 3, 8))(heads)]
    scripted = fresh(heads)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(*arguments).sum().backward()
        assert torch.autograd.gradcheck(scripted, arguments, nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(scripted, arguments, nondet_tol=1e-12)


def test_another_rank_in_a_later_call(device):
    """The order is for the rank that was profiled; the group of another rank has no layout hint."""

    def program(x: Tensor, w: Tensor):
        h = (x * 2.0).transpose(0, 1)
        return torch.tanh(h * w) * torch.sigmoid(h) * w

    scripted = fresh(program)
    for sizes in ((4, 6), (4, 6, 5), (4, 6)):
        x = torch.randn(sizes, device=device, requires_grad=True)
        w = torch.randn(sizes[:2][::-1] + sizes[2:], device=device, requires_grad=True)
        with tsfuser.fuser():
            _, gradients = train(scripted, (x, w))
        _, expected = train(program, (x, w), calls=1)
        for got, want in zip(gradients, expected):
            torch.testing.assert_close(got, want)
