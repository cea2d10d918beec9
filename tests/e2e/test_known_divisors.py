"""Quotients by numbers are rounded as a division is, on every device, and special values are IEEE's."""

import math

import numpy
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
