"""Quotients by values of a row are rounded as a division is, on every device, and special values are IEEE's;
those by numbers have the bits of eager, which multiplies by the reciprocal on CUDA."""

import math

import numpy
import pytest
import torch

import tsfuser
from kit.reductions import Fused, check
from kit.support import no_fallback

SOURCE = """
def f(x, n: float):
    return x / 3, x / 1.4142135623730951, x / -0.1, x / 768, x / 8, -(x / 1000), x / n, x / 0.0
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("n", [448.0, -1e-40, math.inf])
def test_quotients_by_numbers_have_the_bits_of_eager(device, dtype, n):
    bits = numpy.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=numpy.uint32)
    special = numpy.float32([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1.0])
    x = torch.from_numpy(numpy.concatenate([bits.view(numpy.float32), special]))
    x = (x if dtype.is_floating_point else torch.arange(-999, 999)).to(dtype).to(device)
    function = Fused(SOURCE)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            found = function.scripted(x, n)
    assert "aten::div" in function.kinds
    for made, plain in zip(found, function.plain(x, n)):
        assert torch.equal(made.isnan(), plain.isnan()) and torch.equal(made.nan_to_num(), plain.nan_to_num())


BY_ROWS = """
def f(x, y):
    q = x / y
    return q, q.sum(-1), torch.softmax(x * 2 / y, -1)
"""


def divisors(dtype, device):
    """Values of rows, the special ones among them, and next to where the way of dividing changes."""
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3.4e38, -3.4e38, 2.0**-64, 2.0**64]
    return torch.cat([torch.tensor(special), torch.randn(29)]).to(dtype)[:, None].to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 33, 1000])
def test_quotients_by_values_of_rows(device, dtype, length):
    y = divisors(dtype, device)
    x = torch.randn(len(y), length).to(dtype)
    x[:, 0] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan]).repeat(len(y) // 5)
    [quotient, *_] = check(Fused(BY_ROWS), x.to(device), y)
    if dtype in (torch.float32, torch.float64):
        with numpy.errstate(all="ignore"):
            exact = torch.from_numpy(x.numpy() / y.cpu().numpy())
        known = ~exact.isnan()
        assert torch.equal(quotient.cpu().isnan(), ~known)
        assert torch.equal(quotient.cpu().signbit()[known], exact.signbit()[known])
        normal = known & (exact.abs() > 2.0**-125)
        assert torch.equal(quotient.cpu()[normal], exact[normal])


ALONG = """
def f(x, y):
    return torch.softmax(x / y, 1)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_of_quotients_along_an_outer_dim(device, dtype):
    """As many values as a block can keep: those of the divisor take no room."""
    x, y = torch.randn(3, 384, 64), torch.rand(3, 384, 1) + 0.5
    check(Fused(ALONG), x.to(device, dtype), y.to(device, dtype))
