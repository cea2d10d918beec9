"""Results in 16 bits of ops with a fast form, over all numbers of 16 bits: within three quarters of the last
place of the exact one, of which half is the rounding to 16 bits itself; on the whole as near as eager's."""

import pytest
import torch

import tsfuser
from kit.support import fuse, no_fallback
from tsfuser import options

#: Those whose kernels have fast forms.
TARGETS = ["cpu-fibers", *(["cuda"] if torch.cuda.is_available() else [])]
pytestmark = [pytest.mark.usefixtures("single_nodes"), pytest.mark.parametrize("target", TARGETS)]
DTYPES = [torch.bfloat16, torch.float16]


def bell(x):
    return 0.5 * torch.erfc(x * -(0.5**0.5))


def sigmoid_of_gelu(x):
    return torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


#: Op -> what it is in double, where eager's own formula cancels in double, too.
UNARY = {
    "torch.exp(x)": None,
    "torch.expm1(x)": None,
    "torch.log(x)": None,
    "torch.log2(x)": None,
    "torch.log10(x)": None,
    "torch.log1p(x)": None,
    "torch.sqrt(x)": None,
    "torch.reciprocal(x)": None,
    "torch.tanh(x)": None,
    "torch.sigmoid(x)": None,
    "x / 3.0": None,
    "F.silu(x)": None,
    "F.mish(x)": None,
    "F.selu(x)": None,
    "F.elu(x, 1.5)": None,
    "F.celu(x, 1.5)": None,
    "F.hardswish(x)": None,
    "F.hardsigmoid(x)": None,
    "F.softplus(x)": None,
    "F.logsigmoid(x)": None,
    "F.gelu(x)": lambda x: x * bell(x),
    'F.gelu(x, approximate="tanh")': lambda x: x * sigmoid_of_gelu(x),
}


def gelu_slope(x):
    return bell(x) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327


def gelu_tanh_slope(x):
    s = sigmoid_of_gelu(x)
    rest = sigmoid_of_gelu(-x)  # 1 - s
    return s + x * s * rest * 1.5957691216057308 * (1 + 0.134145 * x * x)


#: Derivatives, the same: what eager computes in float32 is off by a rounding of the gradient where they are
#: near 0.
GRADIENTS = {
    "torch.ops.aten.gelu_backward(g, x)": gelu_slope,
    'torch.ops.aten.gelu_backward(g, x, approximate="tanh")': gelu_tanh_slope,
    "torch.ops.aten.silu_backward(g, x)": None,
    "torch.ops.aten.hardswish_backward(g, x)": None,
    "torch.ops.aten.softplus_backward(g, x, 1.0, 20.0)": None,
    "torch.ops.aten.elu_backward(g, 1.5, 1.0, 1.0, False, x)": None,
    "g / x": None,
}


def program(expressions):
    """Source of a function that returns the value of each."""
    values = ",\n            ".join(e.replace("F.", "torch.nn.functional.") for e in expressions)
    return f"def f(x, g):\n    return ({values})\n"


def numbers(dtype, device):
    """All numbers of a dtype of 16 bits."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    return bits.to(torch.int16).view(dtype).to(device)


def places(exact, dtype):
    """The last places of numbers in `dtype`."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny))[1] - 1
    return torch.ldexp(torch.full_like(exact, info.eps), exponent)


def errors(result, exact):
    """How far `result` is off, in last places of its dtype; 0 where the exact value is not finite in it."""
    off = (result.double() - exact).abs() / places(exact, result.dtype)
    return torch.where(result.isfinite() & (exact.abs() <= torch.finfo(result.dtype).max), off, 0)


def run(expressions, dtype, device):
    """What is fused, eager's results, and x, g."""
    x = numbers(dtype, device)
    generator = torch.Generator().manual_seed(5)
    g = torch.randn(len(x), generator=generator).to(dtype).to(device)
    source = program(expressions)
    space = {"torch": torch}
    exec(source, space)
    scripted = torch.jit.CompilationUnit(source).f
    with no_fallback():
        fuse(scripted, x, g)
        fused = fuse(scripted, x, g)(x, g)
    return fused, space["f"](x, g), x, g


def check(name, x, fused, eager, exact, cancelled=None):
    """`cancelled`: the last places by which each may be off besides."""
    cancelled = torch.zeros_like(exact) if cancelled is None else cancelled
    assert fused.dtype == eager.dtype
    plain = x.abs() < 1e15  # of others eager's vector code and its scalar code do not agree
    assert torch.equal(fused.isnan() & plain, eager.isnan() & plain), name
    known = plain & (exact.abs() < torch.finfo(fused.dtype).max)  # beyond, a rounding decides
    assert not (fused.isinf() & known).any(), name
    mine, plain = errors(fused, exact), errors(eager, exact)
    worst = (mine - cancelled).argmax()
    assert mine[worst] <= 0.75 + cancelled[worst], (name, worst)
    assert mine.mean() <= 1.01 * plain.mean() + 1e-6, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_of_one_number(device, dtype):
    fused, eager, x, _ = run(UNARY, dtype, device)
    space = {"torch": torch, "F": torch.nn.functional, "x": x.cpu().double()}
    for (name, own), mine, plain in zip(UNARY.items(), fused, eager):
        check(name, space["x"], mine.cpu(), plain.cpu(), own(space["x"]) if own else eval(name, space))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_derivatives(device, dtype):
    fused, eager, x, g = run(GRADIENTS, dtype, device)
    space = {"torch": torch, "x": x.cpu().double(), "g": g.cpu().double()}
    for (name, own), mine, plain in zip(GRADIENTS.items(), fused, eager):
        exact = space["g"] * own(space["x"]) if own else eval(name, space)
        cancelled = space["g"].abs() * 2**-17 / places(exact, dtype)
        check(name, space["x"], mine.cpu(), plain.cpu(), exact, cancelled)


def test_float32_is_exact_unless_fast_math_asks_otherwise(device):
    def program(x):
        return torch.sigmoid(x) * 0.5

    x = torch.linspace(-40, 40, 10_000, device=device)
    exact = torch.sigmoid(x.double()) * 0.5
    off = {}
    for asked in ({}, {"fast_math": ""}):
        tsfuser.reset()  # plans of the other choice
        with options.override(enable=asked), no_fallback():
            result = fuse(program, x)(x)
        off[bool(asked)] = ((result.double() - exact) / exact).abs().max().item()
    tsfuser.reset()
    assert off[False] < 2**-21 < off[True] < 2**-16.5
