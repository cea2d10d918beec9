"""A value computed a second time, because one loop cannot walk two of its dims, or memory is walked
otherwise.

In: a value of a Draft. Out: its copy, over axes of its own or over finer ones: the ops that it depends on
once more, from inputs that are read once more. Example, the transpose of `y = x + 1` beside `y` itself, x[N,
N]:

    y = add(x over (a, b), 1)
    rematerialized(draft, y) = add(x over (c, d), 1)

For y + y.t(), c is joined to b and d to a, where a and b must not be one. What is a part of another tensor,
or has parts of its own, is such a copy along a dim of another size:

    moved(draft, y, 1, Move(e, 3))[i, j] = y[i, j - 3] over (a, e) = add(x over (a, e), 1)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from . import size as sz
from .axes import loop_strides
from .draft import Draft
from .fusion import (
    PLACES,
    Axis,
    Located,
    Lookup,
    Op,
    Position,
    Random,
    Reduce,
    Reshape,
    Scan,
    TensorInput,
    Value,
)
from .layout import Layout, contiguous
from .values import Window

MAX_REPEATED = 64  # ops that are computed twice because a value meets itself along another dim


def rematerialized(
    draft: Draft, value: Value, into: dict[Axis, tuple[Axis, ...]] | None = None
) -> Value | None:
    """`value` computed a second time, from inputs that are read a second time: over axes of its own, or,
    where `into` is given, over the same axes but for those that it splits into several, outermost first. None
    where that cannot be done, or costs too much."""
    copy = _Copy(draft, into)
    cone = copy.cone(value)
    if into is not None and any(
        draft.axes.is_split(a) for v in (value, *(v for op in cone for v in op.operands)) for a in v.axes
    ):
        return None
    if len(cone) > MAX_REPEATED or any(isinstance(op, Random) for op in cone):
        return None
    draft.ops += map(copy.op, cone)
    if into is not None:
        draft.splits.append((value, into))
    return copy.value(value)


@dataclass(frozen=True)
class Move:
    """How a dim of a value becomes another one, over `axis` (None: of size 1): its element `i` is that of the
    value at `i * step - start`. With a `window` there is none outside of it."""

    axis: Axis | None
    start: sz.Size
    window: Window | None = None
    step: int = 1


def moved(draft: Draft, value: Value, dim: int, move: Move) -> Value | None:
    """`value` computed a second time with `move` of its dim `dim`: not defined outside of the window, and
    nothing is read there. `value` itself where the dim is of size 1. None where that cannot be done, or costs
    too much."""
    if value.dims[dim] is None:
        return value
    own = draft.axis(value.dims[dim])
    moves, loops = {own: move}, draft.axes.parts(own)
    others = _over(draft, value, moves) - {own}
    if any(not set(loops).isdisjoint(draft.axes.parts(a)) for a in others):
        # some loop of the dim is walked by other dims, too; the outermost one by further values
        others = _over(draft, value, {own: move, loops[0]: move}) - {own}
        moves = _moves_of_loops(draft, own, move, others)
    copy = _Copy(draft, moves=moves)
    cone = copy.cone(value)
    bound = (Random, Reduce, Lookup, Located, Position)  # to their axes
    if any(isinstance(op, Scan) for op in cone) and any(m.step != -1 for m in moves.values()):
        return None  # of other places there may be fewer; in reverse order it goes the other way
    if not moves or len(cone) > MAX_REPEATED or any(isinstance(op, bound) for op in cone):
        return None
    plain = move.axis is not None and move.step == 1
    for window in copy.windows(value, cone):
        if moves.keys() & set(map(draft.axis, window.axes)) and (len(window.axes) > 1 or not plain):
            return None
    draft.ops += map(copy.op, cone)
    return copy.value(value)


def _over(draft: Draft, value: Value, moves: Mapping[Axis, Move]) -> set[Axis]:
    """The axes of the values that are computed a second time with `moves`, and of those that these read."""
    cone = _Copy(draft, moves=moves).cone(value)
    return {draft.axis(a) for v in (value, *(v for op in cone for v in op.operands)) for a in v.axes}


def _moves_of_loops(draft: Draft, own: Axis, move: Move, others: Collection[Axis]) -> dict[Axis, Move]:
    """The moves of axis `own` and of the outermost of its loops, where `others` walk these one by one: a
    window that begins at a head and has whole heads is one of elements and of heads. Else empty."""
    axes, decide = draft.axes, draft.call.decide
    first, *rest = axes.parts(own)
    if move.axis is None or move.window is None or any(first in axes.parts(a) and a != first for a in others):
        return {}
    inner = sz.product([loop.extent for loop in rest])
    if decide(move.start % inner) or decide(move.axis.extent % inner):
        return {}
    shares = axes.shared_out([move.axis], [sz.divided(move.axis.extent, inner), *(a.extent for a in rest)])
    if shares is None or any(len(share) > 1 for share in shares):
        return {}
    (outer,), *pairs = shares
    for (loop,), known in zip(pairs, rest):
        if axes.clash(known, loop):
            return {}
        axes.join(known, loop)
    stop = None if move.window.stop is None else sz.divided(move.window.stop, inner)
    start = sz.const(0) if move.start is sz.const(0) else sz.divided(move.start, inner)
    return {own: move, first: Move(outer, start, Window((outer,), start, stop))}


class _Copy:
    """What stands in the copy for axes and values; `into` as in `rematerialized`; or the `moves`
    of some axes, which become others."""

    def __init__(
        self,
        draft: Draft,
        into: Mapping[Axis, tuple[Axis, ...]] | None = None,
        moves: Mapping[Axis, Move] | None = None,
    ):
        self.draft, self.moves = draft, moves or {}
        self.own = into is None and moves is None  # axes of its own
        self._axes: dict[Axis, tuple[Axis | None, ...]] = dict(into or {})
        self._axes |= {axis: (move.axis,) for axis, move in self.moves.items()}
        self._values: dict[str, Value] = {}
        self._inputs = {i.value.name: i for i in draft.reads}

    def cone(self, value: Value) -> list[Op]:
        """The ops that `value` depends on and the copy cannot share, in order. What is stored on the way is
        read once more."""
        needed, cone = {value.name}, []
        for op in reversed(self.draft.ops):
            if op.output.name in needed and not self._is_shared(op.output):
                cone.append(op)
                needed.update(v.name for v in op.operands if not isinstance(op, Reshape))
        return cone[::-1]

    def windows(self, value: Value, cone: Sequence[Op]) -> list[Window]:
        """Those in which `value` and what `cone` needs are read so far."""
        names = {value.name, *(v.name for op in cone for v in op.operands)}
        found = [w for name in names & self._inputs.keys() for w in self._inputs[name].windows]
        found += [w for op in cone if isinstance(op, Reshape) for w in op.windows]
        return found + [op.window for op in cone if isinstance(op, PLACES)]

    def _is_shared(self, value: Value) -> bool:
        """Whether the copy has the same axes, so that the value itself will do."""
        if value.is_number or not value.axes:
            return True
        return not self.own and all(self._split(a) == (self.draft.axis(a),) for a in value.axes)

    def _split(self, axis: Axis) -> tuple[Axis | None, ...]:
        """What the copy has instead of `axis`, outermost first."""
        root = self.draft.axis(axis)
        if root not in self._axes:
            self._axes[root] = (self._fresh(root) if self.own else root,)
        return self._axes[root]

    def _fresh(self, root: Axis) -> Axis:
        """An axis of the copy's own. It is split into as many loops as `root`."""
        axes = self.draft.axes
        if not axes.is_split(root):
            return self.draft.fresh_axis(root.extent)
        return axes.whole([self._split(part)[0] for part in axes.parts(root)], root.extent)

    def _walk(
        self, value: Value, strides: Sequence[sz.Size]
    ) -> tuple[list[Axis | None], tuple[sz.Size, ...]]:
        """The dims of the copy of `value`, and its strides where those of `value` are `strides`."""
        parts = [(None,) if a is None else self._split(a) for a in value.dims]
        if at := self._moved(value):
            strides = [s * at[1].step if d == at[0] else s for d, s in enumerate(strides)]
        return list(chain.from_iterable(parts)), loop_strides(parts, strides)

    def _moved(self, value: Value) -> tuple[int, Move] | None:
        """The dim of `value` that is moved, and how."""
        for d, axis in enumerate(value.dims or ()):
            if axis is not None and self.draft.axis(axis) in self.moves:
                return d, self.moves[self.draft.axis(axis)]
        return None

    def value(self, value: Value) -> Value:
        """The copy of `value`."""
        if self._is_shared(value):
            return value
        if value.name not in self._values:
            layout = self.draft.layout(value)
            dims, strides = self._walk(value, layout.strides)
            dense = layout.dense and not self.moves
            new = self.draft.new(
                value.name, value.dtype, dims, Layout(self.draft.extents(dims), strides, dense)
            )
            if value.name in self._inputs:
                read = self._inputs[value.name]
                self.draft.rereads.append(replace(read, value=new, **self._place(read, read.strides, value)))
            self._values[value.name] = new
        return self._values[value.name]

    def op(self, op: Op) -> Op:
        """The copy of `op`."""
        if isinstance(op, Lookup):
            op = replace(op, strides=self._walk(op.output, op.strides)[1])
        if isinstance(op, PLACES):
            return replace(op, window=self._within(op.window), output=self.value(op.output))
        if isinstance(op, Reshape):
            return self._reshape(op)
        new = replace(op, operands=tuple(map(self.value, op.operands)), output=self.value(op.output))
        if isinstance(new, (Reduce, Scan)):
            axes = tuple(chain.from_iterable(map(self._split, new.axes)))
            if isinstance(new, Scan):
                flips = any(self.draft.axis(a) in self.moves for a in new.axes)
                return replace(new, axes=axes, backwards=new.backwards != flips)
            return replace(new, axes=axes)
        return new

    def _reshape(self, op: Reshape) -> Reshape:
        """The copy of `op`, which reads what is stored for the first one."""
        new = replace(op, output=self.value(op.output))
        if not self.moves and op.strides is None:
            return new
        strides = op.strides or contiguous(self.draft.sizes(op.output)).strides
        return replace(new, **self._place(op, strides, op.output))

    def _place(
        self, read: TensorInput | Reshape, strides: Sequence[sz.Size], before: Value
    ) -> dict[str, Any]:
        """Where and in which windows the copy of `before` is read, which is in memory by `strides`."""
        made: dict[str, Any] = {
            "strides": self._walk(before, strides)[1],
            "windows": tuple(map(self._within, read.windows)),
        }
        if at := self._moved(before):
            made["offset"] = read.offset - at[1].start * strides[at[0]]
            if at[1].window is not None:
                made["windows"] = (*made["windows"], at[1].window)
        return made

    def _within(self, window: Window) -> Window:
        """The same places of the copy."""
        axes = [self.draft.axis(a) for a in window.axes]
        split = tuple(a for axis in axes for a in self._split(axis) if a is not None)
        if axes[0] not in self.moves:
            return replace(window, axes=split)
        by, stop = self.moves[axes[0]].start, axes[0].extent if window.stop is None else window.stop
        return Window(split, window.start + by, stop + by)
