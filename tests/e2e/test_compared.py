"""Values that are compared with a result that depends on them: gradients of extremes, masks of elements that
equal one."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kit.compared import gradients, leaves
from kit.support import fuse

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

#: The error of a gradient: a few roundings of factors of about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def amax(z):
    return z.amax(1), z.amax()


def amin(z):
    return z.amin(0), z.amin()


def largest(z):
    return z.max(1).values, z.min()


def median(z):
    return z.median(1).values, z.median()


def norm(z):
    return torch.linalg.vector_norm(z, float("inf"), 1), torch.linalg.vector_norm(z, -float("inf"))


def equal(z):
    return torch.where(z == z.amax(1, keepdim=True), z * 3, z)


def at_least(z):
    return torch.where(z >= z.amax(1, keepdim=True).detach(), z * 3, z)


def distance(z):
    return (z - z.amax(1, keepdim=True)).abs(), (z - z[:, :1]).abs()


def above_the_least(z):
    return torch.relu(z - z.amin(1, keepdim=True))


def below_0(z):
    r = torch.relu(z)
    return (z - r).abs(), r @ torch.ones_like(r.t())


def between(z):
    return torch.clamp(z, z.amin(1, keepdim=True), z.amax(1, keepdim=True))


def of_two(z):
    r = torch.relu(z)
    return torch.maximum(z, r), r @ torch.ones_like(r.t())


PROGRAMS = (amax, amin, largest, median, norm, equal, at_least)
PROGRAMS += (distance, above_the_least, below_0, between, of_two)


def saved_by(function, given):
    """What autograd saves besides the arguments."""
    saved, known = [], {x.data_ptr() for x in given}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.compile(function, backend="tsfuser")(*given)
    return [t for t in saved if t.data_ptr() not in known]


def assert_same_gradients(function, given):
    torch.manual_seed(2)
    compiled = torch.compile(function, backend="tsfuser")
    for ours, eager in zip(gradients(compiled, given), gradients(function, given)):
        most = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours, eager, rtol=most, atol=most)


@pytest.mark.graphs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_choose_the_elements_that_eager_chooses(program, dtype, device):
    """Here the forward runs the op by itself, and the backward would run it in a kernel of ours."""
    assert_same_gradients(lambda x, y: program(torch.atan2(x, y)), leaves(device, dtype, 16, 6))


@pytest.mark.graphs
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_also_behind_products_that_are_contracted(program, dtype, device):
    assert_same_gradients(lambda x, y: program(x * y + 0.375), leaves(device, dtype, 16, 6))


@pytest.mark.graphs
def test_a_checkpoint_ends_with_what_is_compared(device):
    def step(x, y):
        z = checkpoint(lambda x, y: torch.atan2(x, y), x, y, use_reentrant=False)
        return z.median(1).values, z.median()

    assert_same_gradients(step, leaves(device, torch.float32, 16, 6))
    assert any(t.shape == (16, 6) for t in saved_by(step, leaves(device, torch.float32, 16, 6)))


@pytest.mark.graphs
def test_a_checkpoint_around_all_of_it_saves_no_more(device):
    def inner(x, y):
        z = torch.atan2(x, y)
        return z.amax(1) + z.sum(1)

    def step(x, y):
        return checkpoint(inner, x, y, use_reentrant=False) * 2

    given = leaves(device, torch.float32, 16, 6)
    assert_same_gradients(step, given)
    assert not any(t.shape == (16, 6) for t in saved_by(step, given))


# ---- TorchScript


def differences(x, y):
    z = torch.exp(x * y + 0.25) - 1.0
    r = torch.relu(z)
    return (z - r).abs() * z, r


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_training_subtracts_what_the_forward_subtracted(dtype, device):
    """`r` is saved. If `z` were computed again, `z - r` would be what `r` has lost where it was rounded."""
    most = 16 * torch.finfo(dtype).eps  # exp of 12 makes a rounding of its operand 12 times as large
    scripted = fuse(differences, *leaves(device, dtype, 33, 71))
    for seed in range(6):
        torch.manual_seed(seed)
        given = leaves(device, dtype, 33, 71)
        exact = [v.detach().double().requires_grad_() for v in given]
        for ours, wanted in zip(gradients(scripted, given), gradients(differences, exact)):
            torch.testing.assert_close(ours.double(), wanted, rtol=most, atol=most)


# ---- without gradients


def found(x, y):
    z = x * y + 0.375
    m = z.amax(1, keepdim=True)
    return z, m, z == m, z < m, (z - m).sign()


def found_in_sweeps(x, y):
    """One sweep finds the extreme; the one that compares also stores the product, which is not contracted."""
    p = x * y
    z = p + 0.375
    return p, z == z.amax(1, keepdim=True), z.amin(1)


def found_alone(x, y):
    z = torch.tanh(x * y + 0.375)
    m = z.amin(1, keepdim=True)
    return m, (z == m).sum(1), (z - m).sign().sum(1)


def rounded(x, y):
    z = x * y
    return z, torch.floor(z), z > 0.5, torch.isinf(z * 1e4), z * 1e4, torch.remainder(z, 0.25), torch.sign(z)


SIZES = [(7, 5), (3, 6000), (300, 33)]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mask_says_what_the_results_say(sizes, dtype, device):
    x, y = (v.detach() for v in leaves(device, dtype, *sizes))
    for z, m, equal, less, sign in (fuse(found, x, y)(x, y), torch.compile(found, backend="tsfuser")(x, y)):
        assert torch.equal(m, z.amax(1, keepdim=True))
        assert torch.equal(equal, z == m) and torch.equal(less, z < m) and torch.equal(sign, (z - m).sign())


@pytest.mark.parametrize("sizes", SIZES)
def test_sweeps_give_a_value_the_same_bits(sizes, device):
    x, y = (v.detach() for v in leaves(device, torch.float32, *sizes))
    for _, equal, _ in (
        fuse(found_in_sweeps, x, y)(x, y),
        torch.compile(found_in_sweeps, backend="tsfuser")(x, y),
    ):
        assert equal.any(1).all()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_row_has_an_extreme(sizes, dtype, device):
    x, y = (v.detach() for v in leaves(device, dtype, *sizes))
    for _, count, signs in (
        fuse(found_alone, x, y)(x, y),
        torch.compile(found_alone, backend="tsfuser")(x, y),
    ):
        assert (count > 0).all()
        assert torch.equal(signs.double(), sizes[1] - count.double()) or dtype is not torch.float32


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_jumps_reads_what_is_stored(dtype, device):
    x, y = (v.detach() for v in leaves(device, dtype, 40, 33))
    z, floor, larger, infinite, scaled, rest, sign = fuse(rounded, x, y)(x, y)
    assert torch.equal(floor, torch.floor(z)) and torch.equal(larger, z > 0.5)
    assert torch.equal(infinite, torch.isinf(scaled)) and torch.equal(rest, torch.remainder(z, 0.25))
    assert torch.equal(sign, torch.sign(z))
