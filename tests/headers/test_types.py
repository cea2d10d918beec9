"""`convert` between all element types equals torch's conversion on the same device."""

import itertools
import platform

import numpy as np
import pytest
import torch

from kit import harness
from tsfuser.ir import dtypes

#: Without the floats of 8 bits: test_float8 has these.
DTYPES = {d.name: d for d in dtypes.DTYPES.values() if d.computes or d.is_unsigned}


SOURCE = harness.conversions(itertools.product(DTYPES, DTYPES))
HALF = harness.conversions([("float32", "float16"), ("float16", "float32")])


def converted(x, to, mode, text=SOURCE):
    """`x` converted by the header's code."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=to, device=x.device)
    names = [str(d).removeprefix("torch.") for d in (x.dtype, to)]
    harness.Kernel(text, "_to_".join(names), mode)(x, y, x.numel(), grid=1)
    return y


def same(a, b):
    """Equal bits, but any NaN equals any NaN."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b)) if a.is_floating_point() else a == b
    return bool((equal | ((a != a) & (b != b))).all())


def samples(name, device):
    """Values of dtype `name`: limits, zeros of both signs, subnormals, infinities, NaN, and random ones of
    all magnitudes."""
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(3)
    if name == "bool":
        return torch.tensor([False, True, True, False], device=device)
    if not dtype.is_floating_point and not dtype.is_complex:
        info = torch.iinfo(dtype)
        wide = torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), (3000,), generator=generator)
        shift = torch.randint(0, 63, (3000,), generator=generator)
        limits = torch.tensor([info.min, info.max, 0, 1, 2, info.max - 1], dtype=dtype)
        return torch.cat([limits, (wide >> shift).to(dtype)]).to(device)
    special = [0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, 127.5, 255.9, 65504.0, 65519.9, 65520.0]
    special += [5e-8, 2.98e-8, 6e-5, 1e-40, 1e-45, 3e38, 3.4e38, float("inf"), float("-inf"), float("nan")]
    random = torch.randn(3000, generator=generator, dtype=torch.float64)
    random *= 2.0 ** torch.randint(-30, 30, (3000,), generator=generator)
    values = torch.cat([torch.tensor(special, dtype=torch.float64), random])
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
    return values.to(dtype).to(device)


@pytest.mark.each_value(("name", "to"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_equals_torch(name, to, mode):
    """Also where C leaves the result open (NaN, infinities and large floats to integers): torch has the
    processor's answer, and so have we."""
    x = samples(name, harness.device(mode))
    if (
        to == "uint32" and mode != "cuda"
    ):  # the others torch itself converts in two ways, as vectors and alone
        real = (x.real if x.is_complex() else x).double()
        x = x[(real >= -(2.0**31)) & (real < 2.0**32)]
    to = getattr(torch, to)
    assert same(converted(x, to, mode), x.to(to))


def every(name):
    """All values of a 16-bit dtype."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(getattr(torch, name))


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_16_bit_values_to_float(name, mode):
    x = every(name).to(harness.device(mode))
    y = converted(x, torch.float32, mode)
    assert same(y, x.float())
    if name == "float16":
        np.testing.assert_array_equal(y.cpu().numpy(), x.cpu().numpy().astype(np.float32))


def rounding_cases(name):
    """Floats around every rounding decision of the 16-bit type: each value, each midpoint of neighbours, one
    float to both sides; and random bit patterns."""
    values = every(name).float().numpy()
    values = np.sort(values[np.isfinite(values)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([values, middles])
    random = np.random.default_rng(5).integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.float32)
    up, down = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))
    return torch.from_numpy(np.concatenate([exact, up, down, random]))


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_float_rounds_to_nearest_even(name, mode):
    x = rounding_cases(name).to(harness.device(mode))
    y = converted(x, getattr(torch, name), mode)
    assert same(y, x.to(getattr(torch, name)))
    if name == "float16":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(y.cpu().numpy(), x.cpu().numpy().astype(np.float16))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86 compilers")
@pytest.mark.parametrize(
    "option",
    ["-mno-avx512f", "-mprefer-vector-width=128", "-mprefer-vector-width=512", "-mno-f16c", "-mno-avx"],
)
def test_half_on_other_processors(option, monkeypatch):
    """Widths of vectors, and instruction sets, that another machine would choose."""
    monkeypatch.setenv("CXX", f"{harness.compiler()} {option}")
    x = rounding_cases("float16")
    rounded = converted(x, torch.float16, "host", HALF)
    assert same(rounded, x.half()) and same(converted(rounded, torch.float32, "host", HALF), rounded.float())


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_compiles_for(arch):
    harness.compile_for(SOURCE, "conversions", arch)
