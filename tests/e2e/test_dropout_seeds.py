"""Dropout in training by TorchScript: the forward saves the seed of a mask, which the backward draws again.
Where either runs unfused, both still have one mask."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from kit.support import assert_matches, counted, fresh, groups, kinds
from tsfuser import options
from tsfuser.schedule.machine import Machine

CALLS = 4
DROPOUT, ITS_GRADIENT = "aten::native_dropout", "aten::native_dropout_backward"


@pytest.fixture(autouse=True)
def drawn_again(monkeypatch):
    """On the host, too, where it does not pay."""
    monkeypatch.setattr(Machine, "computes_fast", True)
    torch.manual_seed(1234)


def step(function, *inputs, gradient=None):
    """Result, gradient of the first input, and the tensors that autograd has saved, but for the inputs."""
    saved = []
    inputs[0].grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = function(*inputs)
    result.backward(torch.ones_like(result) if gradient is None else gradient)
    given = {x.data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
    return result.detach(), inputs[0].grad, [t for t in saved if t.data_ptr() not in given]


def trained(function, *inputs, gradient=None):
    """`function` scripted, and its last step of as many as it takes to be fused. None of them falls back."""
    scripted = fresh(function)
    with tsfuser.fuser(), counted() as rise:
        for _ in range(CALLS):
            last = step(scripted, *inputs, gradient=gradient)
    assert rise["fallbacks"] == {}
    return scripted, last


def ones(*shape, device, dtype=torch.float32):
    return torch.ones(shape, device=device, dtype=dtype).requires_grad_()


def seeds(saved):
    """The lengths of the seeds among saved tensors; none of these may be a mask."""
    assert torch.bool not in {t.dtype for t in saved}
    return [len(t) for t in saved if t.dtype == torch.int64]


def dropped(x):
    return F.dropout(x * 2.0, 0.25, True) * 1.5


def seldom(x):
    return F.dropout(x * 2.0, 0.1, True) * 1.5


def nearly_all(x):
    return F.dropout(x * 2.0, 0.999, True) * 1.5


def all_of_it(x):
    return F.dropout(x * 2.0, 1.0, True) * 1.5


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program, p", [(seldom, 0.1), (nearly_all, 0.999), (all_of_it, 1.0)])
def test_a_seed_is_saved_and_mask_and_scale_are_those_of_the_result(dtype, program, p, device):
    x = ones(33, 65, device=device, dtype=dtype)
    _, (y, gradient, saved) = trained(program, x)
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.int64, (2,))]
    assert torch.equal(y, gradient)
    rate = (y != 0).double().mean().item()
    assert abs(rate - (1 - p)) <= 5 * (p * (1 - p) / x.numel()) ** 0.5
    exact = (y != 0).double() * (3 / (1 - p) if p < 1 else 0)
    assert_matches(y, exact.to(dtype), exact, ops=3)


def as_the_host_does(x):
    """Of its own: a plan that the same program got in another test has a seed."""
    return F.dropout(x * 2.0, 0.375, True) * 1.5


def test_the_host_reads_the_mask(monkeypatch):
    """A number takes it longer than a byte."""
    monkeypatch.undo()
    with options.override(host_launch="block"):
        _, (y, gradient, saved) = trained(as_the_host_does, ones(33, 65, device="cpu"))
    assert torch.equal(y, gradient) and {t.dtype for t in saved} == {torch.bool}


def transposed(*shape):
    return torch.ones(shape).transpose(0, 1)


def channels_last(*shape):
    return torch.ones(shape).contiguous(memory_format=torch.channels_last)


#: What comes, and the length of the seed, which says in which order memory holds the elements.
LAYOUTS = {
    "row": (lambda: torch.ones(201), 2),
    "transposed": (lambda: transposed(33, 9), 3),
    "channels last": (lambda: channels_last(2, 8, 5, 7), 5),
    "transposed, 5 dims": (lambda: transposed(2, 3, 4, 5, 3), 26),
    "expanded": (lambda: torch.ones(67).expand(5, 67), 2),
    "with gaps": (lambda: torch.ones(50, 14)[:, ::2], 2),
    "sizes of 1": (lambda: torch.ones(1, 35, 1, 7), 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, device):
    made, length = LAYOUTS[name]
    x = made().to(device).requires_grad_()
    _, (y, gradient, saved) = trained(dropped, x)
    assert seeds(saved) == [length]
    assert torch.equal(y, gradient) and set(y.unique().tolist()) == {0.0, 4.0}


def test_an_order_that_no_seed_has_leaves_the_mask_stored(device):
    x = torch.ones(2, 3, 2, 3, 7, device=device).permute(4, 3, 2, 1, 0).requires_grad_()
    _, (y, gradient, saved) = trained(dropped, x)
    assert [t.dtype for t in saved] == [torch.bool] and torch.equal(y, gradient)


@pytest.mark.parametrize("form", ["row-major", "expanded", "transposed"])
def test_a_gradient_in_another_layout_meets_the_same_mask(form, device):
    x = channels_last(2, 8, 5, 3).to(device).requires_grad_()
    gradient = {
        "row-major": torch.ones(2, 8, 5, 3),
        "expanded": torch.ones(()).expand(2, 8, 5, 3),
        "transposed": torch.ones(3, 5, 8, 2).permute(3, 2, 1, 0),
    }[form].to(device)
    _, (y, found, saved) = trained(dropped, x, gradient=gradient)
    assert seeds(saved) == [5] and torch.equal(y, found)


def in_turn(x, y):
    first = F.dropout(x * y, 0.25, True)
    second = F.dropout(first + y, 0.5, True)
    return second * y + F.dropout(x * 0.5, 0.5, True)


def test_several_dropouts_in_a_group_have_seeds_of_their_own(device):
    """Rates are powers of two, so that sums are exact and the gradient says which masks it was made by."""
    x, y = ones(64, 33, device=device), torch.ones(64, 33, device=device)
    _, (result, gradient, saved) = trained(in_turn, x, y)
    assert seeds(saved) == [2, 2, 2] and len({tuple(t.tolist()) for t in saved if t.dim() == 1}) == 3
    # (a / .75 + 1) * b / .5 + c: gradient a / .75 * b / .5 + c, the rest is 2 b
    rest = result - gradient
    assert set(rest.round(decimals=4).unique().tolist()) == {0.0, 2.0}
    assert {round(v, 4) for v in gradient.unique().tolist()} == {0.0, 1.0, 2.6667, 3.6667}


def normalised(x, w):
    return F.layer_norm(F.dropout(x * 2.0, 0.5, True), [100], w) * w


def test_the_backward_reduces_rows_of_what_it_draws(device):
    """Every sweep over a row, and every kernel, draws the same numbers."""
    x = torch.rand(17, 100, device=device).add(1).requires_grad_()
    w = torch.rand(100, device=device).requires_grad_()
    incoming = torch.randn(17, 100, generator=torch.Generator().manual_seed(3)).to(device)
    scripted, (_, _, saved) = trained(normalised, x, w, gradient=incoming)
    assert seeds(saved) == [2]
    w.grad = None
    y, gradient, _ = step(scripted, x, w, gradient=incoming)
    wide, scale = (t.detach().double().requires_grad_() for t in (x, w))
    exact = F.layer_norm(wide * 4 * (gradient != 0), [100], scale) * scale
    exact.backward(incoming.double())
    assert_matches(y, exact.to(y.dtype), exact, ops=32)
    assert_matches(gradient, wide.grad.to(y.dtype), wide.grad, ops=64)
    assert_matches(w.grad, scale.grad.to(y.dtype), scale.grad, ops=64)


def test_special_values_where_eager_has_them(device):
    """What is dropped is multiplied by 0, forward and backward: infinite is NaN then."""
    incoming = torch.full((32, 33), math.inf, device=device)
    x = torch.full((32, 33), math.inf, device=device, requires_grad=True)
    _, (y, gradient, saved) = trained(dropped, x, gradient=incoming)
    assert seeds(saved) == [2]
    assert torch.equal(y.isnan(), gradient.isnan()) and torch.equal(y.isinf(), gradient.isinf())
    assert y.isnan().any() and y.isinf().any() and (y.isnan() | y.isinf()).all()


def test_no_elements(device):
    x = ones(0, 5, device=device)
    _, (y, gradient, _) = trained(dropped, x)
    assert y.shape == gradient.shape == (0, 5)


@contextlib.contextmanager
def left_out(*kinds_of_ops):
    """Inside, no group holds these ops."""
    for kind in kinds_of_ops:
        assert not torch._C._jit_set_nvfuser_skip_node_kind(kind, True)
    try:
        yield
    finally:
        for kind in kinds_of_ops:
            torch._C._jit_set_nvfuser_skip_node_kind(kind, True)


@pytest.mark.parametrize(
    "unfused, saves",
    [
        ((DROPOUT,), torch.bool),
        ((ITS_GRADIENT,), torch.int64),
        (("tsfuser::dropout_mask",), torch.int64),
        (("tsfuser::dropout_mask", ITS_GRADIENT), torch.int64),
        (("tsfuser::dropout_seed",), torch.bool),
    ],
)
@pytest.mark.parametrize("form", ["row-major", "channels last", "sizes of 1"])
def test_forward_and_backward_of_which_one_is_unfused(unfused, saves, form, device):
    """Unfused, the forward saves the mask that it has drawn, which is eager's; the backward draws what the
    group of the forward has drawn."""
    x = LAYOUTS.get(form, (lambda: torch.ones(2, 3, 8, 5), 2))[0]().to(device).requires_grad_()
    with left_out(*unfused):
        _, (y, gradient, saved) = trained(dropped, x)
    assert {t.dtype for t in saved if t.dtype != torch.float32} == {saves}
    assert torch.equal(y, gradient) and set(y.unique().tolist()) == {0.0, 4.0}


def test_calls_that_a_guard_sends_to_the_fallback(device):
    """Other ranks, layouts and dtypes, also between a forward and its backward, whose groups have guards of
    their own; in the end what was fused first is fused again."""
    scripted, _ = trained(dropped, ones(33, 65, device=device))
    forms = [
        torch.ones(65, 33, device=device).t(),
        torch.ones(5, 7, 3, device=device),
        torch.ones(4, 6, device=device, dtype=torch.float64),
        channels_last(2, 8, 5, 3).to(device),
        torch.ones(1, device=device),
        torch.ones(33, 65, device=device),
    ]
    for form in forms * 3:
        x = form.clone().requires_grad_()
        with tsfuser.fuser():
            out = scripted(x)
            other = scripted(form.clone().requires_grad_())  # of another seed
            out.backward(torch.ones_like(out, memory_format=torch.contiguous_format))
        assert torch.equal(out, x.grad) and other.shape == out.shape
    assert seeds(step(scripted, ones(33, 65, device=device))[2]) == [2]


def test_without_guards(device):
    scripted, _ = trained(dropped, ones(33, 65, device=device))
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    try:
        for form in (torch.ones(65, 33).t(), channels_last(2, 8, 5, 3), torch.ones(1), torch.ones(33, 65)):
            x = form.to(device).requires_grad_()
            y, gradient, _ = step(scripted, x)
            assert torch.equal(y, gradient)
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(65, 64), nn.Dropout(0.25)

    def forward(self, x):
        return self.dropout(self.linear(x)) * 1.5


def test_the_mode_of_a_module_may_change(device):
    """A seed is saved in training; in evaluation at most a mask that is all true."""
    scripted, x = torch.jit.script(Block().to(device)), torch.rand(33, 65, device=device, requires_grad=True)
    with tsfuser.fuser():
        for training in (True, False, True):
            scripted.train(training)
            for _ in range(CALLS):
                out, gradient, saved = step(lambda x: scripted(x), x)
            kept = (out != 0).double() * (1 / 0.75 if training else 1) * 1.5
            exact = kept @ scripted.linear.weight.detach().double()
            assert_matches(gradient, exact.to(gradient.dtype), exact, ops=64)
            assert (out == 0).any().item() == training
            assert not training or torch.bool not in {t.dtype for t in saved}


def test_the_forward_draws_what_it_draws_without_seeds(device):
    """The state of the generator after a step is the same, too."""
    x, found = ones(33, 65, device=device), []
    for word in ("", "recompute"):
        with options.override(disable=frozenset({word} - {""})):
            scripted, _ = trained(dropped, x)
        torch.manual_seed(11)
        y, gradient, saved = step(scripted, x)
        assert torch.equal(y, gradient) and ({t.dtype for t in saved} == {torch.bool}) == bool(word)
        found.append((y, torch.rand(3, device=device)))
    assert all(map(torch.equal, *found))


def test_eager_numbers_leave_the_mask_stored(device):
    with options.override(enable=frozenset({"eager_random"})):
        _, (y, gradient, saved) = trained(dropped, ones(33, 65, device=device))
    assert torch.equal(y, gradient) and {t.dtype for t in saved} == {torch.bool}


def test_two_backwards_of_one_forward_and_one_after_another_forward(device):
    x = ones(33, 65, device=device)
    scripted, _ = trained(dropped, x)
    first, second = scripted(x), scripted(x)
    for out in (first, second, first):
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
        assert torch.equal(out, gradient)
    assert not torch.equal(first, second)


def curved(x, y):
    return torch.sin(F.dropout(x * y, 0.25, True)) * 2.0


def test_double_backward(device):
    x, y = (torch.rand(33, 65, device=device).add(1).requires_grad_() for _ in range(2))
    scripted, _ = trained(curved, x, y)
    with tsfuser.fuser():
        for _ in range(CALLS):
            out = scripted(x, y)
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(gradient.sum(), y)
    kept = (gradient != 0).double() / 0.75
    a, b = (t.detach().double().requires_grad_() for t in (x, y))
    exact = torch.sin(a * b * kept) * 2
    (slope,) = torch.autograd.grad(exact.sum(), a, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), b)
    for mine, theirs in ((out, exact), (gradient, slope), (second, bend)):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_saved_tensors_may_be_elsewhere_meanwhile(device):
    x = channels_last(2, 8, 5, 3).to(device).requires_grad_()
    scripted, _ = trained(dropped, x)
    x.grad = None
    with torch.autograd.graph.save_on_cpu(), counted() as rise:
        y = scripted(x)
        y.backward(torch.ones_like(y))
    assert torch.equal(y, x.grad) and rise["fallbacks"] == {} and rise["launches"] == 2


def test_a_step_without_gradients_between(device):
    x = ones(33, 65, device=device)
    scripted, _ = trained(dropped, x)
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(CALLS):
            assert set(scripted(x).unique().tolist()) == {0.0, 4.0}
    y, gradient, saved = step(scripted, x)
    assert seeds(saved) == [2] and torch.equal(y, gradient)


def apart(x, w):
    return torch.mm(F.dropout(torch.mm(x, w), 0.5, True), w)


def test_a_dropout_between_matrix_products_stays_torchs(device):
    """It is no group by itself, with and without gradients, so that a checkpoint draws one mask."""
    x, w = ones(16, 16, device=device), torch.eye(16, device=device)
    scripted, (y, gradient, saved) = trained(apart, x, w)
    assert torch.equal(y, gradient) and torch.bool in {t.dtype for t in saved}
    assert all(DROPOUT not in kinds(group) for group in groups(scripted))


def test_a_kernel_by_itself_stores_the_seed_where_its_arguments_say(device):
    x = ones(33, 65, device=device)
    found = tsfuser.explain(fresh(dropped), x)
    [kernel] = [k for k in found.kernels if k.name.endswith("mask_dropout")]
    launch = kernel.arguments(x.detach())
    seed = launch.tensors[-1]
    assert (seed.dtype, tuple(seed.shape)) == (torch.int64, (2,))
    assert launch.args[0]["seed"] == seed.data_ptr()
