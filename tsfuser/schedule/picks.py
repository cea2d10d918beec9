"""Choices between tensors in memory by nothing but a place: a kernel finds the tensor first, and loads once.

In: a segment. Out: the same with a `Pick` for such a chain of choices, which a `cat` or a `stack` is where
what it joins is in memory. Example, cat((x, y, z), 1):

    within_1 = j < 3;  within_2 = j < 8;  cat_3 = where(within_2, y, z);  cat_4 = where(within_1, x, cat_3)
becomes
    cat_4 = Pick(("x", "y", "z"), axes (j,), stops (3, 8))

As it stands, the chain asks of each of n tensors whether an element lies in it, makes an address in it, and
issues a load that n - 1 times loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.fusion import Op, Pointwise, Value, Within
from ..ir.size import Size
from ..ir.values import Axis, Window
from ..segment import Buffer, Segment

FEWEST = 3  #: for two tensors, two loads, one of which loads nothing, are faster than a search and a load


@dataclass(frozen=True)
class Pick:
    """`output` = the element of one of the loads `pieces`: the first whose entry in `stops`, which ascend, is
    behind the place of the element along `axes`; the last piece has none."""

    name: str
    pieces: tuple[str, ...]
    axes: tuple[Axis, ...]
    stops: tuple[Size, ...]
    output: Value
    operands: tuple[Value, ...] = ()  # an op has some: no piece is a value of its own

    @property
    def window(self) -> Window:
        """All places along its axes."""
        return Window(self.axes, sz.const(0), None)


def picks_of(segment: Segment) -> tuple[Pick, ...]:
    """The picks that the results of `segment` need, in the order of its ops."""
    if not any(isinstance(op, Within) for op in segment.ops):
        return ()
    makers, loads = _makers(segment), {b.value.name: b for b in segment.loads}
    needed = {v.name for b in segment.stores for v in (b.value, *b.at)}
    found: list[Pick] = []
    for op in reversed(segment.ops):
        if op.output.name not in needed:
            continue
        pick = _pick(op, makers, loads)
        if pick is None:
            needed.update(v.name for v in op.operands)
        else:
            found.append(pick)
    return tuple(reversed(found))


def with_picks(segment: Segment, picks: Iterable[Pick]) -> tuple[Segment, frozenset[str]]:
    """`segment` with `picks`, without what nobody needs then, and the names of its loads that are left to
    them."""
    made = {pick.output.name: pick for pick in picks}
    needed = {v.name for b in segment.stores for v in (b.value, *b.at)}
    ops: list[Op | Pick] = []
    for op in reversed(segment.ops):
        if op.output.name in needed:
            ops.insert(0, made.get(op.output.name, op))
            needed.update(v.name for v in ops[0].operands)
    pieces = {name for pick in made.values() for name in pick.pieces}
    return replace(segment, ops=tuple(ops)), frozenset(pieces - needed)  # type: ignore[arg-type]


def spare_loads(segment: Segment) -> tuple[str, ...]:
    """The names of loads that take no instructions and no registers, because those of another one stand for
    all of their pick."""
    names: dict[str, None] = {}
    axes = {b.value.name: len(b.value.axes) for b in segment.loads}
    for pick in picks_of(segment):
        widest = max(pick.pieces, key=lambda name: axes[name])
        names.update((name, None) for name in pick.pieces if name != widest)
    return tuple(names)


def _makers(segment: Segment) -> dict[str, Op]:
    return {op.output.name: op for op in segment.ops}


def _pick(op: Op, makers: dict[str, Op], loads: dict[str, Buffer]) -> Pick | None:
    """What the chain of choices that ends with `op` picks; None if it is none, or a short one."""
    pieces: list[str] = []
    axes: tuple[Axis, ...] | None = None
    stops: list[Size] = []
    rest: Op | None = op
    while isinstance(rest, Pointwise) and rest.symbol == "where":
        here = makers.get(rest.operands[0].name)
        if not isinstance(here, Within) or here.window.stop is None or here.window.start is not sz.const(0):
            return None
        if axes not in (None, here.window.axes) or rest.output.dtype != op.output.dtype:
            return None
        axes = here.window.axes
        start = stops[-1] if stops else sz.const(0)
        stops.append(here.window.stop)
        pieces.append(_piece(rest.operands[1], makers, loads, op, Window(axes, start, stops[-1])))
        last, rest = rest.operands[2], makers.get(_source(rest.operands[2], makers).name)
    if axes is None or len(stops) + 1 < FEWEST:
        return None
    pieces.append(_piece(last, makers, loads, op, Window(axes, stops[-1], None)))
    return Pick(op.name, tuple(pieces), axes, tuple(stops), op.output) if all(pieces) else None


def _source(value: Value, makers: dict[str, Op]) -> Value:
    """What `value` is a copy of."""
    op = makers.get(value.name)
    while isinstance(op, Pointwise) and op.symbol == "copy" and op.operands[0].dtype == value.dtype:
        value = op.operands[0]
        op = makers.get(value.name)
    return value


def _piece(value: Value, makers: dict[str, Op], loads: dict[str, Buffer], op: Op, window: Window) -> str:
    """The name of the load that `value` is, if it has one element for each place in `window`; "" if not, as
    for windows of negative size, whose ends would not ascend."""
    load = loads.get(_source(value, makers).name)
    if load is None or load.by_value or load.value.dtype != op.output.dtype:
        return ""
    of_one = not load.windows and (window.stop is None or window.stop is window.start + 1)
    return load.value.name if of_one or load.windows == (window,) else ""
