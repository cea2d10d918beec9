"""When the elements of a load are needed at all.

In: the ops of a segment, and the results that it stores. Out: for each value, the windows outside of (or
inside of) which nothing reads it, because a choice takes another operand there. A `stack` chooses so between
its operands, which lie in memory of their own. Example, of stack((a, b)) with the axis s of size 2:

    within_1 = s < 1;  stack_2 = where(within_1, a, b)      a: within_1; b: not within_1
"""

from __future__ import annotations

from typing import TypeAlias

from ..ir.fusion import Located, Lookup, Op, Pointwise, Reduce, Within
from ..segment import Segment

Need: TypeAlias = tuple[Within, bool]  # an element is needed only where it is inside (or, if False, outside)


def needs(segment: Segment) -> dict[str, frozenset[Need]]:
    """By the name of a value: what holds wherever it is needed. Values that are always needed are absent."""
    windows = {op.output.name: op for op in segment.ops if isinstance(op, Within)}
    if not windows:
        return {}
    found: dict[str, frozenset[Need]] = {b.value.name: frozenset() for b in segment.stores}
    for op in reversed(segment.ops):
        after = frozenset(n for n in found.get(op.output.name, frozenset()) if _holds_before(op, n))
        for k, operand in enumerate(op.operands):
            use = after | _chosen(op, k, windows)
            found[operand.name] = found[operand.name] & use if operand.name in found else use
    return {name: need for name, need in found.items() if need}


def _holds_before(op: Op, need: Need) -> bool:
    """Whether the operands, too, are needed only where `need` holds, as the result of `op` is."""
    if isinstance(
        op, (Located, Lookup)
    ):  # every index is checked, so that one out of range is an error as in eager
        return False
    # a result that is needed anywhere needs all that it reduces
    return not isinstance(op, Reduce) or not set(op.axes) & set(need[0].window.axes)


def _chosen(op: Op, k: int, windows: dict[str, Within]) -> frozenset[Need]:
    """Where a choice takes operand `k` of `op`, as far as that is known."""
    if not isinstance(op, Pointwise) or op.symbol != "where" or k == 0 or op.operands[0].name not in windows:
        return frozenset()
    return frozenset({(windows[op.operands[0].name], k == 1)})
