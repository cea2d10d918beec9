"""Quotients by numbers, and by values of a row, are rounded as a division is, on every device, and special
values are IEEE's."""

import math

import numpy
import pytest
import torch

from kit.reductions import Fused, check

SOURCE = """
def f(x):
    return x / 3, x / 1.4142135623730951, x / -0.1, x / 768, x / 8, -(x / 1000)
"""
DIVISORS = [3, 1.4142135623730951, -0.1, 768, 8, -1000]


def test_quotients_are_rounded_as_divisions(target, device):
    bits = numpy.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=numpy.uint32)
    special = numpy.float32([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1.0])
    x = numpy.concatenate([bits.view(numpy.float32), special])
    x[(numpy.abs(x) < 1e-20) & (x != 0)] = 1.5  # below, the last place may be off by one
    found = check(Fused(SOURCE), torch.from_numpy(x).to(device))
    for result, divisor in zip(found, DIVISORS):
        with numpy.errstate(all="ignore"):
            exact = torch.from_numpy(x / numpy.float32(divisor))
        assert torch.equal(result.cpu().isnan(), exact.isnan())
        assert torch.equal(result.cpu()[~exact.isnan()], exact[~exact.isnan()])


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
