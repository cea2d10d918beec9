"""Tables: costly values of few elements, which a kernel of their own computes for ops of many elements.

In: the ops of a Fusion. Out: the next such values. Example, rotary embedding: x[B, H, T, D] is multiplied by
the cosine of angles[T, D]. The kernel of the product would compute each cosine B * H times. That takes 40
instructions an element, where about 25 fit in the time that memory needs. Instead, a kernel of its own stores
T * D cosines, and the product reads them from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Axis, Op, Pointwise, Reduce, Value, Within
from ..ir.symbols import COSTLY, find
from ..ir.values import Window
from .records import Buffer

FEWER = 8  # elements of the reader over elements of the table, at least
MOST_TABLES = 8  # at a time: each is an argument of the kernels that read it, and takes registers
WORTH_A_TABLE = 1 << 21  # elements of the reader: to compute as many sines takes as long as a launch


def next_tables(call: Call, ops: Collection[Op], between: Callable[[Value], list[Op]]) -> list[Value]:
    """The values that are to be in memory before the rest of `ops` is computed: those over the fewest axes,
    all over the same ones. Empty if there are none. `between`: the ops between memory and a value."""
    if len({op.output.axes for op in ops}) < 2:
        return []
    bounds: dict[str, int | None] = {}
    found: dict[str, Value] = {}
    for op in ops:
        bounds[op.output.name] = _bound(op, bounds)
        space = op.operands[0].axes if isinstance(op, Reduce) else op.output.axes
        for value in op.operands:
            if (bounds.get(value.name) or 0) < COSTLY or value.name in found:
                continue
            if value.axes and set(value.axes) < set(space) and _pays(call, value, space):
                if sum(map(_own, between(value))) >= COSTLY:
                    found[value.name] = value
    fewest = min(found.values(), key=lambda v: len(v.axes), default=None)
    return [] if fewest is None else [v for v in found.values() if set(v.axes) == set(fewest.axes)]


def _bound(op: Op, bounds: dict[str, int | None]) -> int | None:
    """An upper bound of the cost to compute an element of the result, at most `COSTLY`; None if an op on the
    way is not pointwise."""
    costs = [bounds.get(v.name, 0) for v in op.operands]
    if not is_plain([op]) or None in costs:
        return None
    return min(COSTLY, _own(op) + sum(costs))


def _own(op: Op) -> int:
    return find(op.symbol).cost if isinstance(op, Pointwise) else 1


def _pays(call: Call, value: Value, space: tuple[Axis, ...]) -> bool:
    """Whether `space`, over which `value` is read, has enough elements, and enough more than `value`."""
    size = sz.product([a.extent for a in space])
    own = sz.product([a.extent for a in value.axes])
    return bool(call.decide(sz.le(WORTH_A_TABLE, size))) and bool(call.decide(sz.le(own * FEWER, size)))


def is_plain(ops: list[Op]) -> bool:
    """Whether there are ops, all of them elementwise."""
    return bool(ops) and all(isinstance(op, (Pointwise, Within)) for op in ops)


def windows(ops: list[Op], loads: list[Buffer]) -> tuple[Window, ...]:
    """The windows outside of which a value that `ops` compute from `loads` need not be defined or read. A
    value that `Within` selects is defined everywhere."""
    if any(isinstance(op, Within) for op in ops):
        return ()
    return tuple(dict.fromkeys(window for buffer in loads for window in buffer.windows))
