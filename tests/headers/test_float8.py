"""Floats of 8 bits are converted from and to all other types as torch does it on the same device, bit for
bit: NaN, infinities, zeros and subnormals too."""

import numpy as np
import pytest
import torch

from kit import harness
from tsfuser.ir.dtypes import DTYPES
from tsfuser.planning.torch_casts import with_torchs_casts

FLOAT8 = [name for name in DTYPES if name.startswith("float8")]
OTHERS = [d.name for d in DTYPES.values() if d.converts]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


PAIRS = [pair for f in FLOAT8 for o in OTHERS for pair in ((f, o), (o, f))]
SOURCE = with_torchs_casts(harness.conversions(dict.fromkeys(PAIRS)))


def converted(x, to, mode):
    """`x` converted by the header's code."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=to, device=x.device)
    names = [str(d).removeprefix("torch.") for d in (x.dtype, to)]
    harness.Kernel(SOURCE, "_to_".join(names), mode)(x, y, x.numel(), grid=1)
    return y


def bits(x):
    """The elements as integers; those of complex numbers in a row."""
    x = torch.view_as_real(x).flatten() if x.is_complex() else x
    return x.to(torch.uint8) if x.dtype == torch.bool else x.view(BITS[x.itemsize])


def assert_as_torch(x, to, mode):
    x = x.to(harness.device(mode))
    to = getattr(torch, to)
    ours, theirs = bits(converted(x, to, mode)), bits(x.to(to))
    wrong = (ours != theirs).nonzero().flatten()
    each = len(ours) // x.numel()  # a complex number is two
    shown = [(x.flatten()[i // each], hex(ours[i]), hex(theirs[i])) for i in wrong[:5]]
    assert not len(wrong), f"{len(wrong)} differ: {shown}"


@pytest.mark.each_value(("name", "to"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("to", OTHERS)
@pytest.mark.parametrize("name", FLOAT8)
def test_all_patterns_to(name, to, mode):
    assert_as_torch(torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)), to, mode)


@pytest.mark.each_value(("name", "to"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("to", FLOAT8)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "int16", "uint16"])
def test_all_patterns_of_16_bits(name, to, mode):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    assert_as_torch(every.view(getattr(torch, name)), to, mode)


def boundaries(name):
    """Doubles where a conversion changes: each value, and each middle between neighbours."""
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double().numpy()
    values = np.unique(values[np.isfinite(values)])
    last = values[-1] + (values[-1] - values[-2]) / 2 * np.arange(1, 5)
    return np.concatenate([values, (values[1:] + values[:-1]) / 2, last, -last, [0.0, -0.0]])


def around(exact, dtype):
    """Numbers of `dtype` at, just below and just above `exact`."""
    with np.errstate(over="ignore"):
        exact = exact.astype(dtype)
    up, down = np.nextafter(exact, dtype(np.inf)), np.nextafter(exact, dtype(-np.inf))
    return np.concatenate([exact, up, down, -exact, -up, -down])


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("to", FLOAT8)
def test_float32_around_every_boundary(to, mode):
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 1e-45, 1e-40, 3e38], np.float32)
    random = np.random.default_rng(5).integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.float32)
    x = np.concatenate([around(boundaries(to), np.float32), special, random])
    assert_as_torch(torch.from_numpy(x), to, mode)


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("to", FLOAT8)
def test_float64_is_rounded_to_float_first(to, mode):
    near = around(around(boundaries(to), np.float32).astype(np.float64), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = near * (1 + 2.0**-25)
    x = np.concatenate([near, halves, [np.inf, -np.inf, np.nan, -np.nan, 1e-320, 1e300, -1e300]])
    assert_as_torch(torch.from_numpy(x), to, mode)


@pytest.mark.each_value(("name", "to"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("to", FLOAT8)
@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "complex64"])
def test_other_numbers(name, to, mode):
    wide = torch.randint(-(2**62), 2**62, (3000,), generator=torch.Generator().manual_seed(3))
    numbers = torch.cat([wide >> torch.arange(3000) % 62, torch.arange(-600, 600)])
    assert_as_torch(numbers.to(getattr(torch, name)), to, mode)


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_compiles_for(arch):
    harness.compile_for(SOURCE, "conversions", arch)
