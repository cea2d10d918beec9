"""Approximate instructions of a GPU are off by no more than codegen/runtime/fast.h takes them to be.

Over all numbers of 32 bits, against double. On the host the instructions are emulated, with these errors."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kit import harness

SMALLEST = 2.0**-126  # of the numbers that are not subnormal
LARGEST = torch.finfo(torch.float32).max
PART = 1 << 26

KERNELS = {
    "approx_exp2": "approx_exp2(args.x[i])",
    "approx_reciprocal": "approx_reciprocal(args.x[i])",
    "approx_log2": "approx_log2(args.x[i])",
    "approx_sqrt": "approx_sqrt(args.x[i])",
    "approx_divide": "approx_divide(args.x[i], args.y[i])",
}
SOURCE = '#include "tsfuser.h"\n' + "".join(
    f"""
struct Args_{name} {{ const float* x; const float* y; float* result; int64_t n; }};
KERNEL({name}_of, Args_{name}, 256) {{
  const int64_t step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < args.n; i += step)
    args.result[i] = {call};
}}"""
    for name, call in KERNELS.items()
)


def approximate(name, x, y):
    result = torch.empty_like(x)
    kernel = harness.Kernel(SOURCE, f"{name}_of", "cuda")
    kernel(x, y, result, x.numel(), grid=2048, block=(256, 1))
    return result.double()


def all_numbers():
    """All of float32, a part at a time."""
    for first in range(-(1 << 31), 1 << 31, PART):
        yield torch.arange(first, first + PART, device="cuda").to(torch.int32).view(torch.float32)


def worst(name, numbers, exact_of, unit_of, taken=lambda x: True):
    """The largest error, in the unit of each, where the exact result is a finite normal number."""
    found = 0.0
    for x in numbers:
        exact = exact_of(x.double())
        normal = (exact.abs() >= SMALLEST) & (exact.abs() <= LARGEST) & taken(x)
        off = (approximate(name, x, x) - exact).abs() / unit_of(x, exact)
        found = max(found, torch.where(normal, off, 0).max().item())
    return found


def relative(x, exact):
    return exact.abs()


def of_logarithm(x, exact):
    """Absolute where the logarithm is near 0."""
    return torch.where((x > 0.5) & (x < 2), 1.0, exact.abs())


@pytest.mark.parametrize(
    "name, exact, unit, bound",
    [
        ("approx_exp2", torch.exp2, relative, 2.4e-7),
        ("approx_reciprocal", torch.reciprocal, relative, 1.2e-7),
        ("approx_log2", torch.log2, of_logarithm, 2.4e-7),
        ("approx_sqrt", torch.sqrt, relative, 1.2e-7),
    ],
)
def test_of_all_numbers(name, exact, unit, bound):
    normal_or_kept = (lambda x: x.abs() >= SMALLEST) if name == "approx_reciprocal" else (lambda x: True)
    assert 0 < worst(name, all_numbers(), exact, unit, normal_or_kept) <= bound


def test_of_quotients():
    """All binades of both, many mantissas. Beyond 2^126 the quotient may be 0, as the PTX ISA says."""
    generator = torch.Generator("cuda").manual_seed(2)
    found = 0.0
    for _ in range(8):
        bits = torch.randint(-(1 << 31), 1 << 31, (2, PART), device="cuda", generator=generator)
        x, y = bits.to(torch.int32).view(torch.float32)
        exact = x.double() / y.double()
        taken = (exact.abs() >= SMALLEST) & (exact.abs() <= LARGEST) & (y.abs() >= SMALLEST)
        taken &= y.abs() <= 2.0**126
        off = (approximate("approx_divide", x, y) - exact).abs() / exact.abs()
        found = max(found, torch.where(taken, off, 0).max().item())
    assert 0 < found <= 2.4e-7


def test_exp2_of_whole_numbers_is_exact():
    """As in the emulation."""
    x = torch.arange(-126, 128, device="cuda").float()
    assert torch.equal(approximate("approx_exp2", x, x), torch.exp2(x.double()))


def test_reciprocals_of_powers_of_two_are_exact():
    """As in the emulation. `1 / (1 + 0)`, a sigmoid, has to be 1: what is left to 1 may be multiplied by the
    largest number, as in the derivative of silu."""
    x = torch.ldexp(torch.ones(253, device="cuda"), torch.arange(-126, 127, device="cuda"))
    for sign in (1, -1):
        assert torch.equal(approximate("approx_reciprocal", sign * x, x), sign / x.double())
