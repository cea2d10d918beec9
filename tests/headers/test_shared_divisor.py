"""Quotients by a divisor whose reciprocal is known are rounded as divisions."""

import numpy
import pytest
import torch

from kit import harness

SOURCE = """#include "tsfuser.h"
struct Args { const float* x; const float* y; float* exact; float* fast; int64_t n; };
KERNEL(divided, Args, 1) {
  const float y = args.y[0], scale = divisor_scale(y), divisor = y * scale;
  const float reciprocal = divisor_reciprocal(divisor);
  for (int64_t i = blockIdx.x; i < args.n; i += gridDim.x) {
    args.exact[i] = shared_quotient(args.x[i], divisor, reciprocal, scale);
    args.fast[i] = fast_shared_quotient(args.x[i], divisor, reciprocal, scale);
  }
}
"""
LARGEST = float(numpy.finfo("float32").max)
#: Of all kinds, next to where the scale changes, and with mantissas that are hard to divide by.
DIVISORS = [
    *(3.0, -3.0, 0.7, -1.0, 1.0, 2.0**24 - 1, -(1.0 + 2.0**-23), 2.0 - 2.0**-23),
    *(2.0**-64, -(2.0**-64) * (1 - 2.0**-24), 2.0**64, 2.0**64 * (1 + 2.0**-23), 1e-12, -1e12),
    *(2.0**64.38, -(2.0**80.1), 1e-38, -3e-39, 1e-45, LARGEST, -LARGEST, 2.0**126, -(2.0**127)),
]
SPECIAL = [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan]


def run(x, divisor, target):
    """`x / divisor`, exactly and fast, and what IEEE says."""
    place = harness.device(target)
    exact, fast = (torch.empty(len(x), device=place) for _ in range(2))
    y = torch.tensor([divisor], device=place)
    harness.Kernel(SOURCE, "divided", target)(x.to(place), y, exact, fast, len(x), grid=64)
    with numpy.errstate(all="ignore"):
        expected = torch.from_numpy(x.numpy() / numpy.float32(divisor))
    return exact.cpu(), fast.cpu(), expected


def numerators(seed):
    """Numbers of all exponents, infinities and NaN among them, and many of one exponent."""
    random = numpy.random.default_rng(seed)
    bits = random.integers(0, 1 << 32, 30_000, dtype=numpy.uint32)
    near = (random.integers(0, 1 << 23, 10_000) + (127 << 23)).astype(numpy.uint32)
    values = numpy.concatenate([bits, near]).view(numpy.float32)
    return torch.from_numpy(numpy.concatenate([values, numpy.array(SPECIAL, numpy.float32)]))


def dividends(divisor, seed):
    """Numbers whose quotients are of all exponents down to the smallest normal ones."""
    random = numpy.random.default_rng(seed)
    quotients = random.uniform(1, 2, 20_000) * 2.0 ** random.integers(-125, 20, 20_000)
    with numpy.errstate(all="ignore"):
        return torch.from_numpy((quotients * numpy.float32(divisor)).astype(numpy.float32))


def places(a, b):
    """By how many units of the last place numbers of one sign are apart."""
    return (a.view(torch.int32) - b.view(torch.int32)).abs()


@pytest.mark.parametrize("target", harness.HERE)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_quotient_is_rounded_as_a_division(divisor, target):
    x = torch.cat([numerators(3), dividends(divisor, 4)])
    made, _, expected = run(x, divisor, target)
    known = ~expected.isnan()
    assert torch.equal(made.isnan(), ~known)
    assert torch.equal(made.signbit()[known], expected.signbit()[known])
    assert places(made, expected)[known].max() <= 1
    small = (x.abs() < 2.0**-100) | (expected.abs() < 2.0**-125)
    plain = known & ~(small & (x != 0)) & ~((expected.abs() == LARGEST) & made.isinf())
    assert plain.float().mean() > 0.3
    assert torch.equal(made[plain], expected[plain])


@pytest.mark.parametrize("target", harness.HERE)
@pytest.mark.parametrize("divisor", SPECIAL)
def test_special_divisors(divisor, target):
    for made in run(numerators(3), divisor, target)[:2]:
        expected = run(numerators(3), divisor, target)[2]
        known = ~expected.isnan()
        assert torch.equal(made.isnan(), ~known)
        assert torch.equal(made[known], expected[known])
        assert torch.equal(made.signbit()[known], expected.signbit()[known])


@pytest.mark.parametrize("target", harness.HERE)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_fast_quotient_is_off_by_little(divisor, target):
    x = numerators(5)
    _, made, expected = run(x, divisor, target)
    normal = expected.isfinite() & (expected.abs() > 2.0**-125) & (expected.abs() < 2.0**127)
    assert normal.any()
    error = (made.double() - expected.double()).abs() / expected.double().abs()
    assert error[normal].max() < 2.0**-22
    unbounded = expected.isinf() & (x.isinf() | (x.double().abs() / abs(divisor) > 2 * LARGEST))
    assert torch.equal(made[unbounded], expected[unbounded])
    assert torch.equal(made.isnan(), expected.isnan())
    zero = x == 0
    assert torch.equal(made[zero].signbit(), expected[zero].signbit())
