"""Gradients at special values of operands and of incoming gradients: infinite, NaN, zero of either sign, so
large that they overflow. Autodiff has formulas of its own; what is fused has eager's values."""

import pytest
import torch

import tsfuser
from kit.support import script

SPECIAL = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 3.0, 6.0]
LARGE = [1e30, -1e30, 1e-30]
GRADIENTS = [1.0, -2.0, float("inf"), float("-inf"), float("nan"), 0.0, -0.0]

#: Eager rounds results that its derivatives read, as the tanh in 1 - tanh(x)**2; powers multiply errors. At 6
#: a tanh that is off by 4 units of the last place, as vector functions are on the CPU, changes that by 4e-11.
TOLERANCES = {torch.float64: 4e-11, torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}

#: Those whose formulas are corrected; `s` is a number, 0 in the test.
CORRECTED = """
relu(x) | relu6(x) | threshold(x, 0.5, 2.0) | hardtanh(x, -1.0, 1.0) | hardshrink(x) | hardswish(x)
clamp(x, -1.0, 1.0) | clamp(x, min=0.5) | clamp(x, max=0.5) | clamp(x, s, 2.0) | where(x > 0, x, y)
x.masked_fill(x > 0, 2.0) | max(x, y) | min(x, y) | rsqrt(x) | reciprocal(x) | 2.0 / x
pow(x, y) | pow(0.0, y) | pow(s, y) | pow(s + 2.0, y) | leaky_relu(x, 0.1)
"""
OTHERS = """
hardsigmoid(x) | elu(x) | celu(x) | selu(x) | softplus(x) | softshrink(x) | logsigmoid(x)
gelu(x) | gelu(x, approximate='tanh') | silu(x) | mish(x) | sigmoid(x) | tanh(x) | exp(x) | expm1(x) | log(x)
log1p(x) | log2(x) | sqrt(x) | abs(x) | neg(x) | sin(x) | cos(x) | tan(x) | asin(x) | acos(x) | atan(x)
sinh(x) | cosh(x) | erf(x) | erfc(x) | frac(x) | pow(x, 2) | pow(x, 0) | pow(x, 3.0) | pow(x, 0.5)
pow(x, -1) | pow(2.0, x) | maximum(x, y) | minimum(x, y) | x * y | x / y | x - y | 1 - x
addcmul(x, y, x) | addcdiv(x, y, x) | lerp(x, y, 0.3) | fmod(x, 2.0) | remainder(x, 2.0) | atan2(x, y)
nan_to_num(x) | logit(x) | xlogy(x, y)
"""
SATURATED = """
silu(x) | mish(x) | gelu(x) | gelu(x, approximate='tanh') | sigmoid(x) | tanh(x) | softplus(x) | logsigmoid(x)
elu(x) | hardswish(x)
"""
FUNCTIONAL = """
relu6 threshold hardtanh hardshrink hardswish leaky_relu hardsigmoid elu celu selu softplus softshrink
logsigmoid gelu silu mish
""".split()


def calls_of(table):
    return [call.strip() for line in table.strip().splitlines() for call in line.split("|")]


def source_of(call):
    name = call.split("(")[0]
    where = "torch.nn.functional." if name in FUNCTIONAL else "torch." * name.isidentifier()
    return f"def f(x, y, s: float):\n    return {where}{call} * 1.0\n"


def gradients(function, x, y, gradient):
    operands = [v.clone().requires_grad_() for v in (x, y)]
    result = function(*operands, 0.0)
    return torch.autograd.grad(result, operands, gradient, allow_unused=True)


def check(device, call, dtype, numbers):
    """A row for each incoming gradient, a column for each pair of operands. There are 64 of each column, as
    eager's loops over vectors on the CPU leave none then: those over single elements differ at NaN."""
    values = torch.tensor(numbers, device=device).to(dtype).repeat(64)
    x = values.repeat(len(GRADIENTS), 1)
    y = values.flip(0).roll(3).repeat(len(GRADIENTS), 1)
    gradient = torch.tensor(GRADIENTS, device=device).to(dtype)[:, None].expand(x.shape).contiguous()
    scripted, eager = script(source_of(call)), {"torch": torch}
    exec(source_of(call), eager)
    with tsfuser.fuser():
        for _ in range(4):
            found = gradients(scripted, x, y, gradient)
    wanted = gradients(eager["f"], x, y, gradient)
    tolerance = TOLERANCES[dtype]
    for mine, theirs in zip(found, wanted):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("call", calls_of(CORRECTED))
def test_corrected_formulas(device, call, dtype):
    large = LARGE * (dtype in (torch.float32, torch.float64))  # with 16 bits eager rounds on the way
    check(device, call, dtype, SPECIAL + large)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call", calls_of(OTHERS))
def test_other_formulas(device, call, dtype):
    if (call, dtype) == ("hardsigmoid(x)", torch.float64):
        pytest.skip("eager's sixth is one of float32 there")
    check(device, call, dtype, SPECIAL + LARGE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", calls_of(SATURATED))
def test_limits_of_16_bits(device, call, dtype):
    """What is left of 1 or 0 where a function saturates is multiplied by the largest numbers."""
    limits = torch.finfo(dtype)
    check(device, call, dtype, [*SPECIAL, limits.max, limits.min, limits.max / 2, limits.tiny, -limits.tiny])


@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("given, made", [(0, 3), (4, 0), (0, 0), (4, 3)])
def test_linear_without_features(device, rows, given, made):
    x = torch.randn(*rows, given, device=device, requires_grad=True)
    w, b = (torch.randn(*sizes, device=device, requires_grad=True) for sizes in ((made, given), (made,)))
    text = "def f(x, w, b):\n    return torch.nn.functional.linear(torch.tanh(x) * 2.0, w, b) * 3.0\n"
    scripted, eager = script(text), {"torch": torch}
    exec(text, eager)
    gradient = torch.randn(*rows, made, device=device)
    with tsfuser.fuser():
        for _ in range(4):
            found = torch.autograd.grad(scripted(x, w, b), (x, w, b), gradient)
    for mine, theirs in zip(found, torch.autograd.grad(eager["f"](x, w, b), (x, w, b), gradient)):
        torch.testing.assert_close(mine, theirs)
