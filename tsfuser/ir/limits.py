"""Which numbers an argument may be: beyond them eager raises an error, or does something that no kernel does.

In: a dtype, or bounds. Out: a `Limit`. A number that the graph holds is checked when a plan is made. C++
checks the numbers of each call (csrc_stubs/plan.h); a call beyond a limit runs the ops themselves. Example:

    convertible(DTYPES["uint8"])   # integers from -255 to 255, floats from 0 to 255, no NaN
    between(0.0, 1.0)              # a probability
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .dtypes import DType

_LARGEST: dict[int, Any] = {
    2: {"float16": 65504.0, "bfloat16": 3.3895313892515355e38},
    4: 3.4028234663852886e38,
    8: math.nextafter(math.inf, 0),
}
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
            bits = 8 * dtype.itemsize - (dtype.name != "uint8")
            return self.admits(0 if dtype.name == "uint8" else -(1 << bits)) and self.admits((1 << bits) - 1)
        return self.nan and self.infinite and self.admits(-largest(dtype)) and self.admits(largest(dtype))

    def admits(self, number: bool | int | float | complex) -> bool:
        """Whether the number is within the limit."""
        if isinstance(number, int):
            return self.low <= number <= self.high
        if isinstance(number, complex):
            return self.admits(number.real) and self.admits(number.imag)
        if math.isnan(number):
            return self.nan
        return self.infinite if math.isinf(number) else self.least <= number <= self.most


def largest(dtype: DType) -> float:
    """The largest finite number of a floating dtype, or of the parts of a complex one."""
    size = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    return _LARGEST[size][dtype.name] if size == 2 else _LARGEST[size]


def convertible(dtype: DType) -> Limit | None:
    """The numbers that c10::Scalar::to converts to `dtype` without the error of an overflow; None if it
    converts all. Negative ints wrap in unsigned dtypes. 2.0**63, which passes that check for int64, is beyond
    the limit."""
    if dtype.kind == "b":
        return None
    if dtype.kind != "i":
        most = largest(dtype)
        whole = int(min(most, 2.0**64))
        return Limit(max(-whole, _LOWEST_INT), min(whole, _HIGHEST_INT), -most, most)
    bits = 8 * dtype.itemsize - (dtype.name != "uint8")
    low, high = (0 if dtype.name == "uint8" else -(1 << bits)), (1 << bits) - 1
    most = float(high) if bits < 53 else math.nextafter(2.0**bits, 0)
    return Limit(-high if low == 0 else low, high, float(low), most, nan=False, infinite=False)


def between(least: float, most: float) -> Limit:
    """The finite numbers from `least` to `most`."""
    low, high = (max(min(x, 2**63), -(2**63)) for x in (least, most))
    return Limit(math.ceil(low), min(math.floor(high), _HIGHEST_INT), least, most, nan=False, infinite=False)


def without_lowest(limit: Limit | None) -> Limit:
    """The same without the lowest int64, which is its own negative."""
    limit = limit or Limit()
    return replace(limit, low=max(limit.low, _LOWEST_INT + 1))
