"""How the combinations of a reduction are spelled.

In: the `combine` word of a Reduce. Out: its `Combination`. A new one is one row here and its functor in
runtime/reduce.h. `mean`, `squares` (the sum of squared distances from the mean) and what partial results need
are parts of one accumulator (`moments`), which reductions of the same operands share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.dtypes import COMPLEX64, COMPLEX128, DOUBLE, FLOAT, DType
from ..ir.fusion import Reduce
from ..ir.limits import bounds
from ..ir.symbols import define
from .literals import literal


def conversion(have: str, want: str) -> str:
    """The symbol that turns a value of C type `have` into `want`."""
    return "copy" if have == want else "convert"


@dataclass(frozen=True)
class Combination:
    """`symbol` combines an accumulator with a value, `functor` (runtime/reduce.h) two accumulators;
    `identity` changes nothing (for a largest or smallest value an infinity, or the end of the integers'
    range). `part`: the result is that part of an accumulator of moments."""

    symbol: str
    functor: str
    identity: float
    part: str = ""

    def ctype(self, dtype: DType) -> str:
        """C type of the accumulators whose numbers are of `dtype`."""
        return f"moments<{dtype.ctype}>" if self.part else dtype.ctype

    def bytes(self, dtype: DType) -> int:
        """Size of an accumulator."""
        return dtype.itemsize * (4 if self.part else 1)

    def result(self, have: str, want: str) -> str:
        """The symbol that makes a result of C type `want` of an accumulator of numbers of type `have`."""
        if not self.part:
            return conversion(have, want)
        return f"{self.part}_of" if have == want else f"{self.part}_of_converted"

    def start(self, dtype: DType) -> str:
        """C text of the identity in `dtype`'s register type."""
        if self.part:
            return f"{self.ctype(dtype)}{{}}"
        value = self.identity
        if value in (math.inf, -math.inf) and not dtype.is_floating:
            low, high = (0, 1) if dtype.kind == "b" else bounds(dtype)
            value = high if value > 0 else low
        return literal(value, dtype)


define("either", "({0} || {1})", cheap=True)
define("both", "({0} && {1})", cheap=True)
define("combine_moments", "Moments::combine({0}, {1})")
for _part in ("mean", "squares", "count", "origin", "rest", "sum", "largest"):  # of accumulators with parts
    define(f"{_part}_of", f"{_part}_of({{0}})")
    define(f"{_part}_of_converted", f"convert<{{ctype}}>({_part}_of({{0}}))")

COMBINATIONS = {
    "sum": Combination("add", "Sum", 0),
    "prod": Combination("mul", "Product", 1),
    "max": Combination("maximum", "Largest", -math.inf),
    "min": Combination("minimum", "Smallest", math.inf),
    "log_sum": Combination("logaddexp", "LogSum", -math.inf),
    "any": Combination("either", "Any", 0),
    "all": Combination("both", "All", 1),
    "mean": Combination("combine_moments", "Moments", 0, "mean"),
    "squares": Combination("combine_moments", "Moments", 0, "squares"),
    "count": Combination("combine_moments", "Moments", 0, "count"),
    "origin": Combination("combine_moments", "Moments", 0, "origin"),
    "rest": Combination("combine_moments", "Moments", 0, "rest"),
}


def totals(ops: Sequence[Reduce]) -> dict[str, Reduce]:
    """The accumulators that `ops` need, each with the first op that reads it: name -> op."""
    found: dict[str, Reduce] = {}
    for op in ops:
        found.setdefault(total_of(op, ops), op)
    return found


def total_of(op: Reduce, ops: Sequence[Reduce]) -> str:
    """The name of the accumulator of `op`, one of `ops`: that of the first one which shares it."""
    first = op
    if COMBINATIONS[op.combine].part:
        first = next(x for x in ops if COMBINATIONS[x.combine].part and _terms(x) == _terms(op))
    return f"{first.output.name}_total"


def _terms(op: Reduce) -> tuple:
    """What `op` adds up, in which dtype."""
    return op.operands, set(op.axes), op.output.dtype.register


def accumulator(op: Reduce, in_double: bool) -> DType:
    """The dtype in which a thread accumulates. A block of the host is one thread, which adds up long chains,
    where float would lose what a GPU's many short chains keep; it adds up some in float and these in double
    (`host.chunk`)."""
    dtype = op.output.dtype.register
    wider = {FLOAT: DOUBLE, COMPLEX64: COMPLEX128} if in_double and op.combine == "sum" else {}
    return wider.get(dtype, dtype)
