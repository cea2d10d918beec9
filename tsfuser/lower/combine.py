"""How the combinations of a reduction are spelled.

In: the `combine` word of a Reduce. Out: its `Combination`. A new one is one row here and its functor in runtime/reduce.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir.dtypes import COMPLEX64, COMPLEX128, DOUBLE, FLOAT, DType
from ..ir.fusion import Reduce
from .literals import literal


@dataclass(frozen=True)
class Combination:
    """`template` combines an accumulator with a value, `functor` (runtime/reduce.h) two accumulators; `identity` changes nothing (for a largest or
    smallest value an infinity, or the end of the integers' range)."""

    template: str
    functor: str
    identity: float

    def start(self, dtype: DType) -> str:
        """C text of the identity in `dtype`'s register type."""
        value = self.identity
        if value in (math.inf, -math.inf) and not dtype.is_floating:
            bits = 8 * dtype.itemsize
            signed = dtype.is_integral and dtype.name != "uint8"
            low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, 1 if dtype.kind == "b" else (1 << bits) - 1)
            value = high if value > 0 else low
        return literal(value, dtype)


COMBINATIONS = {
    "sum": Combination("({0} + {1})", "Sum", 0),
    "prod": Combination("({0} * {1})", "Product", 1),
    "max": Combination("nan_max({0}, {1})", "Largest", -math.inf),
    "min": Combination("nan_min({0}, {1})", "Smallest", math.inf),
    "any": Combination("({0} || {1})", "Any", 0),
    "all": Combination("({0} && {1})", "All", 1),
}


def accumulator(op: Reduce, threads: int, brief: bool = False) -> DType:
    """The dtype in which a thread accumulates. A block of the host is one thread, which adds up long chains, where float would lose what a GPU's
    many short chains keep; it adds up some in float and these in double (`host.chunk`). `brief`: so few that
    there is nothing to add up in double."""
    dtype = op.output.dtype.register
    wider = {FLOAT: DOUBLE, COMPLEX64: COMPLEX128} if threads == 1 and not brief and op.combine == "sum" else {}
    return wider.get(dtype, dtype)
