"""Whether a Fusion compares values with extremes of values.

Kernels compute a value again in each sweep over the data that needs it. Of `v = x * y + z` and
`v == amax(v)` one sweep finds the extreme, and a later one compares. Both have to give `v` the same bits. But
a compiler may contract `x * y + z` to one instruction in one of them, and not in the other, where the product
is needed itself. Then perhaps no element of a row is equal to its extreme. So such kernels are compiled
without contraction.

In: a Fusion. Out: a bool.
"""

from __future__ import annotations

from .fusion import Fusion, Pointwise, Reduce, Scan
from .symbols import ROUNDING, find

_EXTREMES = ("max", "min")


def compares_extremes(fusion: Fusion) -> bool:
    """Whether an op that jumps has an operand that depends on an extreme. Softmaxes have no such op."""
    dependent: set[str] = set()
    for op in fusion.ops:
        operands = getattr(op, "operands", ())
        reached = any(value.name in dependent for value in operands)
        if reached and isinstance(op, Pointwise) and _jumps(op):
            return True
        if reached or (isinstance(op, (Reduce, Scan)) and op.combine in _EXTREMES):
            dependent.add(op.output.name)
    return False


def _jumps(op: Pointwise) -> bool:
    """Whether it may, as far as its symbol says; a rounding moves no more than its operand."""
    rounds = op.symbol.startswith(ROUNDING)
    return op.output.dtype.kind == "b" or not (find(op.symbol).grows or rounds)
