"""Gradients of ops that choose among tensors: bounds that require one, ties, NaN and infinities, as in
eager."""

import itertools
import math

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fresh, no_fallback, script

pytestmark = [pytest.mark.optimized, pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
PARTS = torch.tensor([-1.0, 0.0, 1.0, math.nan, math.inf, -math.inf])


def clamp(x, a, b):
    return torch.clamp(x * 1.5, a * 1.5, b * 1.5) * 2.0


def clamp_to_inputs(x, a, b):
    return torch.clamp(x * 1.5, a, b) * 2.0


def clamp_from_below(x, a, b):
    return torch.clamp(x * 1.5, a * 1.5) * 2.0 + b


def clamp_from_above(x, a, b):
    return torch.clamp(x * 1.5, None, b * 1.5) * 2.0 + a


def clamp_min(x, a, b):
    return torch.clamp_min(x * 1.5, a * 1.5) * 2.0 + b


def clamp_max(x, a, b):
    return torch.clamp_max(x * 1.5, b * 1.5) * 2.0 + a


def maximum(x, a, b):
    return torch.maximum(x * 1.5, a * 1.5) * 2.0 + b


def minimum(x, a, b):
    return torch.minimum(x * 1.5, a * 1.5) * 2.0 + b


def max_of_two(x, a, b):
    return torch.max(x * 1.5, a * 1.5) * 2.0 + b


def min_of_two(x, a, b):
    return torch.min(x * 1.5, a * 1.5) * 2.0 + b


def max_of_one(x, a, b):
    y = x * 1.5
    return torch.max(y, y) * a + b


def max_and_min(x, a, b):
    y, z = x * 1.5, a * 1.5
    return torch.max(y, z) * 2.0 + torch.min(y, z) * b


PROGRAMS = (
    clamp,
    clamp_to_inputs,
    clamp_from_below,
    clamp_from_above,
    clamp_min,
    clamp_max,
    maximum,
    minimum,
    max_of_two,
    min_of_two,
    max_of_one,
    max_and_min,
)


def train(function, tensors, asked):
    leaves = [t.clone().requires_grad_(a) for t, a in zip(tensors, asked)]
    out = function(*leaves)
    out.backward(torch.arange(1.0, out.numel() + 1, device=out.device).reshape(out.shape).to(out.dtype))
    return [out.detach(), *(t.grad for t in leaves)]


def compare(program, tensors, asked):
    scripted = fresh(program)
    expected = train(program, tensors, asked)
    with tsfuser.fuser():
        for _ in range(4):
            got = train(scripted, tensors, asked)
    for mine, theirs in zip(got, expected):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.dtype == theirs.dtype and torch.allclose(mine, theirs, equal_nan=True)


@pytest.mark.each_value
@pytest.mark.parametrize("asked", [a for a in itertools.product((True, False), repeat=3) if any(a)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients(device, program, asked):
    tensors = torch.cartesian_prod(PARTS, PARTS, PARTS).to(device).unbind(1)
    compare(program, tensors, asked)


@pytest.mark.graphs
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_of_broadcast_operands(device, program):
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 8), (8,), (4, 1))
    compare(
        program,
        [torch.randint(-2, 3, s, generator=generator).to(device, torch.float64) for s in sizes],
        (True, True, True),
    )


def test_ties_are_fused(device):
    from kit.support import groups

    scripted = fresh(max_of_two)
    with tsfuser.fuser():
        for _ in range(4):
            train(scripted, [torch.zeros(8, device=device)] * 3, (True, True, True))
    assert len(groups(scripted)) == 2


BOUNDED = {
    "threshold": "F.threshold(x * 1.0, 0.5, -1.0)",
    "threshold at zero": "F.threshold(x * 1.0, 0.0, 0.5)",
    "hardtanh": "F.hardtanh(x * 1.0, -0.5, 0.5)",
    "clamp": "torch.clamp(x * 1.0, -0.5, 0.5)",
    "hardshrink": "F.hardshrink(x * 1.0, 0.5)",
    "softshrink": "F.softshrink(x * 1.0, 0.5)",
    "leaky_relu": "F.leaky_relu(x * 1.0, 0.1)",
    "relu": "torch.relu(x * 1.0)",
    "relu6": "F.relu6(x * 6.0)",
    "softplus": "F.softplus(x * 1.0, 2.0, 0.5)",
    "hardswish": "F.hardswish(x * 6.0)",
    "hardsigmoid": "F.hardsigmoid(x * 6.0)",
    "abs": "torch.abs(x * 1.0)",
}


@pytest.mark.graphs
@pytest.mark.parametrize("name", BOUNDED)
def test_gradients_at_the_bounds_of_an_op_are_eagers(device, name):
    source = BOUNDED[name].replace("F.", "torch.nn.functional.")
    source = f"def f(x):\n    return {source} * 2.0\n"
    bounds = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.25, -0.75, 3.0, -3.0], device=device)
    scripted, found = script(source), []
    exec(source, {"torch": torch}, eager := {})
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            x = bounds.clone().requires_grad_()
            scripted(x).sum().backward()
            found.append(x.grad)
    x = bounds.clone().requires_grad_()
    eager["f"](x).sum().backward()
    for gradient in found:
        assert_matches(gradient, x.grad, ops=4)


@pytest.mark.graphs
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BOUNDED)
def test_numbers_that_16_bits_do_not_hold(device, name, dtype, training):
    """What is compared with 0.1 or 0.3 is their neighbours, which eager may round these to first. So may be
    what is subtracted, as softshrink does on CUDA."""
    source = BOUNDED[name].replace("F.", "torch.nn.functional.").replace("0.5", "0.1").replace("-1.0", "0.3")
    source = f"def f(x):\n    return {source} * 2.0\n"
    near = torch.tensor([0.1, 0.3, 1.0, 3.0]).to(dtype)
    above, below = (torch.nextafter(near, torch.tensor(end, dtype=dtype)) for end in (9.0, -9.0))
    values = torch.cat([near, above, below, -near, -above, -below]).to(device)
    scripted, found = script(source), []
    exec(source, {"torch": torch}, eager := {})
    with tsfuser.fuser():
        for function in (eager["f"], *[scripted] * 4):
            x = values.clone().requires_grad_(training)
            y = function(x)
            found.append((y.detach(), *(torch.autograd.grad(y.sum(), x) if training else ())))
    for mine, theirs in zip(found[-1], found[0], strict=True):
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=2 * rounding, atol=0.3 * rounding)


@pytest.mark.graphs
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.5, 0.25, 2.0, 3.0, -1.0, -2.0])
def test_powers_at_infinity_and_minus_zero(device, exponent, dtype, given):
    """Whether eager takes a root depends on the dtype and the device. `given`: as an argument."""
    source = f"def f(x, n: float):\n    return torch.pow(x * 1.0, {'n' if given else exponent}) * 2.0\n"
    exec(source, {"torch": torch}, eager := {})
    scripted, found = script(source), []
    with tsfuser.fuser(), no_fallback():
        for function in (eager["f"], *[scripted] * 4):
            x = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 4.0, 1.0], dtype=dtype, device=device)
            y = function(x.requires_grad_(), exponent)
            found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    for mine, theirs in zip(found[-1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
        assert torch.equal(mine.signbit()[theirs == 0], theirs.signbit()[theirs == 0])


@pytest.mark.graphs
@pytest.mark.parametrize("written", [False, True])
def test_gradients_of_small_results_of_softplus_are_eagers(device, written):
    """Whether the derivative reads the result, or the operand."""
    result = "y" if written else "y * 2.0"
    source = f"def f(x):\n    y = torch.nn.functional.softplus(x * 1.0)\n    return {result}\n"
    exec(source, {"torch": torch}, eager := {})
    scripted, found = script(source), []
    with tsfuser.fuser():
        for function in (eager["f"], *[scripted] * 4):
            x = torch.tensor([-4.0, -9.0, -16.0, -30.0, -60.0, 19.0, 21.0], device=device).requires_grad_()
            function(x).sum().backward()
            found.append(x.grad)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-5, atol=0)
