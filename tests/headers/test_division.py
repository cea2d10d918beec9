"""Divisions without a branch: by six, by what is at least one, and the scale of a mean's terms."""

import math

import numpy
import pytest
import torch

from kit import harness

SOURCE = """#include "tsfuser.h"
struct Args { const float* x; float* scale; int64_t n; };
KERNEL(scales, Args, 1) {
  for (int64_t i = blockIdx.x; i < args.n; i += gridDim.x) args.scale[i] = sum_scale(fabs(args.x[i]));
}
"""


def numerators():
    """Numbers of all exponents, and those of one exponent next to a power of two."""
    bits = numpy.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=numpy.uint32)
    near = (numpy.arange(-3000, 3000) + (127 << 23)).astype(numpy.uint32)
    return torch.from_numpy(numpy.concatenate([bits, near]).view(numpy.float32))


@pytest.mark.parametrize("target", harness.HERE)
def test_the_scale_of_a_sum_is_the_largest_power_of_two_that_is_no_larger_than_the_share_of_a_term(target):
    n = torch.cat([torch.arange(1, 5000), 2 ** torch.arange(12, 60), 2 ** torch.arange(12, 60) + 2**11])
    x = n.float()
    place = harness.device(target)
    scale = torch.empty(len(x), device=place)
    harness.Kernel(SOURCE, "scales", target)(x.to(place), scale, len(x), grid=64)
    assert torch.equal(scale.cpu().double(), 2.0 ** -x.double().log2().ceil())


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
        exact = [1 / y.numpy(), x.numpy() / y.numpy(), (x.to(place) / 6).cpu().numpy()]
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
