"""Divisions without a branch: by a number that is part of the code, and the scale of a mean's terms."""

import math
import struct

import numpy
import pytest
import torch

from kit import harness
from tsfuser.ops.reciprocal import parts

DIVISORS = [3.0, 1.4142135623730951, -0.1, 768.0, 1e-9, 1e20, 0.7]
#: Of this one a numerator is known that is rounded to the other neighbour.
HARD = 2.0**24 - 1
SOURCE = """#include "tsfuser.h"
struct Args { const float* x; float* made; float* scale; int64_t n; };
KERNEL(divided, Args, 1) {
  for (int64_t i = blockIdx.x; i < args.n; i += gridDim.x) {
    args.made[i] = divided_by(args.x[i], HIGH, LOW);
    args.scale[i] = sum_scale(fabs(args.x[i]));
  }
}
"""


def run(divisor, x, target):
    """`x / divisor`, and the scale for `x` terms."""
    high, low = parts(divisor)
    source = SOURCE.replace("HIGH", f"{high!r}f").replace("LOW", f"{low!r}f")
    place = harness.device(target)
    made, scale = (torch.empty(len(x), device=place) for _ in range(2))
    harness.Kernel(source, "divided", target)(x.to(place), made, scale, len(x), grid=64)
    return made.cpu(), scale.cpu()


def divided(x, divisor):
    """As IEEE says; torch multiplies by the reciprocal on some devices."""
    with numpy.errstate(all="ignore"):
        return torch.from_numpy(x.numpy() / numpy.float32(divisor))


def numerators():
    """Numbers of all exponents, and those of one exponent next to a power of two."""
    bits = numpy.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=numpy.uint32)
    near = (numpy.arange(-3000, 3000) + (127 << 23)).astype(numpy.uint32)
    return torch.from_numpy(numpy.concatenate([bits, near]).view(numpy.float32))


@pytest.mark.parametrize("target", harness.HERE)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_quotient_by_a_known_number_is_rounded_as_a_division(divisor, target):
    x = numerators()
    made, _ = run(divisor, x, target)
    exact = divided(x, divisor)
    # where what is added underflows, the last place may be off by one
    small = exact.abs() < 2.0**-100
    assert torch.equal(made[~small].isnan(), exact[~small].isnan())
    plain = ~small & ~exact.isnan()
    assert torch.equal(made[plain], exact[plain])
    last = made.view(torch.int32)[small] - exact.view(torch.int32)[small]
    assert last.abs().max() <= 1


@pytest.mark.parametrize("target", harness.HERE)
def test_special_numerators(target):
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, -3.4e38])
    for divisor in (3.0, -0.3):
        made, _ = run(divisor, x, target)
        exact = divided(x, divisor)
        assert torch.equal(made.signbit()[~x.isnan()], exact.signbit()[~x.isnan()])
        torch.testing.assert_close(made, exact, rtol=0, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("target", harness.HERE)
def test_the_one_numerator_of_an_exponent_that_is_rounded_otherwise(target):
    """Of 2^23 numerators at most one, by one unit of the last place."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    x = (mantissas | (127 << 23)).view(torch.float32)
    if target == "fibers":  # which are slow
        x = torch.cat([x[:2000], x[-2000:]])
    made, _ = run(HARD, x, target)
    last = made.view(torch.int32) - divided(x, HARD).view(torch.int32)
    assert last.count_nonzero() <= 1 and last.abs().max() <= 1


@pytest.mark.parametrize("target", harness.HERE)
def test_the_scale_of_a_sum_is_the_largest_power_of_two_that_is_no_larger_than_the_share_of_a_term(target):
    n = torch.cat([torch.arange(1, 5000), 2 ** torch.arange(12, 60), 2 ** torch.arange(12, 60) + 2**11])
    x = n.float()
    _, scale = run(3.0, x, target)
    assert torch.equal(scale.double(), 2.0 ** -x.double().log2().ceil())


def test_powers_of_two_and_extreme_numbers_are_left_to_the_division():
    for divisor in (2.0, -0.25, 0.0, -0.0, 1.0, 1e-38, 3e38, math.inf, math.nan):
        assert parts(divisor) is None


@pytest.mark.parametrize("divisor", [*DIVISORS, HARD])
def test_both_parts_have_the_sign_of_the_divisor(divisor):
    high, low = parts(divisor)
    [own] = struct.unpack("<f", struct.pack("<f", divisor))
    assert high * own > 0 and low * own > 0 and abs(high) < abs(1 / own)
    assert abs((high + low) * own - 1) < 2.0**-46


OTHERS = """#include "tsfuser.h"
struct Args { const float* x; const float* y; float* inverse; float* ratio; float* part; int64_t n; };
KERNEL(others, Args, 1) {
  for (int64_t i = blockIdx.x; i < args.n; i += gridDim.x) {
    args.inverse[i] = one_over(args.y[i]);
    args.ratio[i] = over(args.x[i], args.y[i]);
    args.part[i] = sixth(args.x[i]);
  }
}
"""


@pytest.mark.parametrize("target", harness.HERE)
def test_divisions_by_numbers_from_one_on(target):
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, 1.0])
    x = torch.cat([numerators(), special.repeat(9)])
    y = torch.cat([1 + numerators().abs(), (1 + special.abs()).repeat_interleave(9)])
    place = harness.device(target)
    made = [torch.empty(len(x), device=place) for _ in range(3)]
    harness.Kernel(OTHERS, "others", target)(x.to(place), y.to(place), *made, len(x), grid=64)
    with numpy.errstate(all="ignore"):
        exact = [1 / y.numpy(), x.numpy() / y.numpy(), x.numpy() / numpy.float32(6)]
    for result, wanted in zip((r.cpu() for r in made), map(torch.from_numpy, exact)):
        assert torch.equal(result.isnan(), wanted.isnan())
        plain = ~wanted.isnan()
        last = result[plain].view(torch.int32) - wanted[plain].view(torch.int32)
        # a few of those between two numbers may be the other one
        assert last.abs().max() <= 1 and torch.equal(result.signbit()[plain], wanted.signbit()[plain])
        normal = wanted[plain].abs() > 2.0**-100
        assert last[normal].count_nonzero() <= len(x) / 10000


@pytest.mark.parametrize(
    "call", ["sigmoid(x)", "silu(x)", "hardswish(x)", "silu_backward(x, x)", "sum_scale(x)"]
)
def test_a_gpu_takes_no_branch(nvrtc, call):
    if nvrtc is None:
        pytest.skip("there is no NVRTC")
    source = f"""#include "tsfuser.h"
struct Args {{ float* x; }};
KERNEL(one, Args, 1) {{
  const float x = args.x[threadIdx.x];
  args.x[threadIdx.x] = {call};
}}
"""
    assert b"slowpath" not in nvrtc.compile_for(source, "one", 90).content
    assert b"slowpath" in nvrtc.compile_for(source.replace(call, "1 / x"), "one", 90).content
