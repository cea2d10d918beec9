"""Which numbers an argument may be: beyond them eager raises an error, or does something that no kernel does.

In: a dtype, or bounds. Out: a `Limit`. A number that the graph holds is checked when a plan is made. C++
checks the numbers of each call (csrc_stubs/plan.h); a call beyond a limit runs the ops themselves. Example:

    convertible(DTYPES["uint8"])   # integers from -255 to 255, floats from 0 to 255, no NaN
    between(0.0, 1.0)              # a probability
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .dtypes import DType

_LOWEST_INT, _HIGHEST_INT = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Limit:
    """An int is from `low` to `high`. A float, or each part of a complex number, is from `least` to `most`;
    it may be NaN if `nan`, and infinite if `infinite`."""

    low: int = _LOWEST_INT
    high: int = _HIGHEST_INT
    least: float = -math.inf
    most: float = math.inf
    nan: bool = True
    infinite: bool = True

    def admits_all(self, dtype: DType) -> bool:
        """Whether all numbers of `dtype` are within the limit."""
        if dtype.kind == "b":
            return self.admits(0) and self.admits(1)
        if dtype.kind == "i":
            low, high = bounds(dtype)
            return self.admits(low) and self.admits(high)
        return self.nan and self.infinite and self.admits(-dtype.largest) and self.admits(dtype.largest)

    def admits(self, number: bool | int | float | complex) -> bool:
        """Whether the number is within the limit."""
        if isinstance(number, int):
            return self.low <= number <= self.high
        if isinstance(number, complex):
            return self.admits(number.real) and self.admits(number.imag)
        if math.isnan(number):
            return self.nan
        return self.infinite if math.isinf(number) else self.least <= number <= self.most


def bounds(dtype: DType) -> tuple[int, int]:
    """The lowest and the highest number of an integer dtype."""
    bits = 8 * dtype.itemsize
    return (0, (1 << bits) - 1) if dtype.is_unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def convertible(dtype: DType) -> Limit | None:
    """The numbers that c10::Scalar::to converts to `dtype` without the error of an overflow; None if it
    converts all. Negative ints wrap in unsigned dtypes. 2.0**63, which passes that check for int64, is beyond
    the limit."""
    if dtype.kind == "b":
        return None
    if dtype.kind != "i":
        least, most = dtype.lowest, dtype.largest
        low, high = math.ceil(max(least, -(2.0**64))), math.floor(min(most, 2.0**64))
        whole = max(low, _LOWEST_INT), min(high, _HIGHEST_INT)
        return Limit(*whole, least, most, infinite=dtype.has_infinity)
    low, high = bounds(dtype)
    most = float(high) if high < 2**53 else math.nextafter(float(high), 0)
    least = max(-high if dtype.is_unsigned else low, _LOWEST_INT)
    return Limit(least, min(high, _HIGHEST_INT), float(low), most, nan=False, infinite=False)


def between(least: float, most: float) -> Limit:
    """The finite numbers from `least` to `most`."""
    low, high = (max(min(x, 2**63), -(2**63)) for x in (least, most))
    return Limit(math.ceil(low), min(math.floor(high), _HIGHEST_INT), least, most, nan=False, infinite=False)


def without_lowest(limit: Limit | None) -> Limit:
    """The same without the lowest int64, which is its own negative."""
    limit = limit or Limit()
    return replace(limit, low=max(limit.low, _LOWEST_INT + 1))
