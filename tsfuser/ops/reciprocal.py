"""The reciprocal of a number as two floats, for a division without a branch.

In: a divisor that is known. Out: `high` and `low`, with `1 / divisor = high + low` to 48 bits, `high` rounded
towards zero, so that both have one sign and infinities stay what they are. Example: `parts(3.0)` is
`(0.33333331, 1.98682198e-08)`, and `divided_by(x, *parts(3.0))` of runtime/math.h is `x / 3`.
"""

from __future__ import annotations

import math
import struct

_RANGE = 2.0**100  # within it neither part is near to what underflows or overflows


def parts(divisor: float) -> tuple[float, float] | None:
    """`high` and `low`; None for a power of two, by which compilers multiply, and for what is very large or
    small."""
    if not 1 / _RANGE <= abs(divisor) <= _RANGE or abs(math.frexp(_float(divisor))[0]) == 0.5:
        return None
    exact = 1 / _float(divisor)
    high = _float(exact)
    if abs(high) > abs(exact):
        [bits] = struct.unpack("<I", struct.pack("<f", high))
        [high] = struct.unpack("<f", struct.pack("<I", bits - 1))
    return high, _float(exact - high)


def _float(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]
