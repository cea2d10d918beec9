"""A value computed a second time, because one loop cannot walk two of its dims, or memory is walked
otherwise.

In: a value of a Draft. Out: its copy, over axes of its own or over finer ones: the ops that it depends on
once more, from inputs that are read once more. Example, the transpose of `y = x + 1` beside `y` itself, x[N,
N]:

    y = add(x over (a, b), 1)
    rematerialized(draft, y) = add(x over (c, d), 1)

For y + y.t(), c is joined to b and d to a, where a and b must not be one. What is a part of another tensor,
or has parts of its own, is such a copy along a dim of another size:

    moved(draft, y, 1, Window((e,), 3, None))[i, j] = y[i, j - 3] over (a, e) = add(x over (a, e), 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from . import size as sz
from .axes import loop_strides
from .draft import Draft
from .fusion import Axis, Lookup, Op, Random, Reduce, Reshape, TensorInput, Value, Within
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
    return copy.value(value)


def moved(draft: Draft, value: Value, dim: int, window: Window) -> Value | None:
    """`value` computed a second time along the axis of `window` in dim `dim`, so that its elements lie in the
    window. It is not defined elsewhere, and nothing is read there. `value` itself where the dim is of size 1.
    None where that cannot be done, or costs too much."""
    if value.dims[dim] is None:
        return value
    own = draft.axis(value.dims[dim])
    copy = _Copy(draft, {own: window.axes}, window)
    cone = copy.cone(value)
    loops = set(draft.axes.parts(own))
    over = {draft.axis(a) for v in (value, *(v for op in cone for v in op.operands)) for a in v.axes}
    if any(a != own and not loops.isdisjoint(draft.axes.parts(a)) for a in over):
        return None  # some loop of the dim is walked by other dims, too
    if len(cone) > MAX_REPEATED or any(isinstance(op, (Random, Reduce, Lookup)) for op in cone):
        return None
    if any(own in map(draft.axis, w.axes) and len(w.axes) > 1 for w in copy.windows(value, cone)):
        return None
    draft.ops += map(copy.op, cone)
    return copy.value(value)


class _Copy:
    """What stands in the copy for axes and values; `into` as in `rematerialized`. With a `window`
    the axis of `into` becomes another one, along which the copy lies there."""

    def __init__(self, draft: Draft, into: dict[Axis, tuple[Axis, ...]] | None, window: Window | None = None):
        self.draft, self.into, self.window = draft, into, window
        self._axes: dict[Axis, tuple[Axis, ...]] = dict(into or {})
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
        return found + [op.window for op in cone if isinstance(op, Within)]

    def _is_shared(self, value: Value) -> bool:
        """Whether the copy has the same axes, so that the value itself will do."""
        if value.is_number or not value.axes:
            return True
        return self.into is not None and all(self._split(a) == (self.draft.axis(a),) for a in value.axes)

    def _split(self, axis: Axis) -> tuple[Axis, ...]:
        """What the copy has instead of `axis`, outermost first."""
        root = self.draft.axis(axis)
        if root not in self._axes:
            self._axes[root] = (self._fresh(root) if self.into is None else root,)
        return self._axes[root]

    def _fresh(self, root: Axis) -> Axis:
        """An axis of the copy's own, of as many loops as `root` is."""
        axes = self.draft.axes
        if not axes.is_split(root):
            return self.draft.fresh_axis(root.extent)
        return axes.whole([self._split(part)[0] for part in axes.parts(root)], root.extent)

    def _walk(
        self, value: Value, strides: Sequence[sz.Size]
    ) -> tuple[list[Axis | None], tuple[sz.Size, ...]]:
        """The dims of the copy of `value`, and its strides where those of `value` are `strides`."""
        parts = [(None,) if a is None else self._split(a) for a in value.dims]
        return list(chain.from_iterable(parts)), loop_strides(parts, strides)

    def value(self, value: Value) -> Value:
        """The copy of `value`."""
        if self._is_shared(value):
            return value
        if value.name not in self._values:
            layout = self.draft.layout(value)
            dims, strides = self._walk(value, layout.strides)
            new = self.draft.new(
                value.name, value.dtype, dims, Layout(self.draft.extents(dims), strides, layout.dense)
            )
            if value.name in self._inputs:
                read = self._inputs[value.name]
                self.draft.rereads.append(
                    replace(read, value=new, strides=strides, **self._place(read, strides, value))
                )
            self._values[value.name] = new
        return self._values[value.name]

    def op(self, op: Op) -> Op:
        """The copy of `op`."""
        if isinstance(op, Lookup):
            op = replace(op, strides=self._walk(op.output, op.strides)[1])
        if isinstance(op, Within):
            return replace(op, window=self._within(op.window), output=self.value(op.output))
        if isinstance(op, Reshape):
            return self._reshape(op)
        new = replace(op, operands=tuple(map(self.value, op.operands)), output=self.value(op.output))
        if isinstance(new, Reduce):
            return replace(new, axes=tuple(chain.from_iterable(map(self._split, new.axes))))
        return new

    def _reshape(self, op: Reshape) -> Reshape:
        """The copy of `op`, which reads what is stored for the first one."""
        new = replace(op, output=self.value(op.output))
        if self.window is None and op.strides is None:
            return new
        strides = op.strides or contiguous(self.draft.sizes(op.output)).strides
        steps = self._walk(op.output, strides)[1]
        return replace(new, strides=steps, **self._place(op, steps, op.output))

    def _place(
        self, read: TensorInput | Reshape, strides: Sequence[sz.Size], before: Value
    ) -> dict[str, Any]:
        """Where and in which windows the copy of `before`, which is in memory, is read by `strides`."""
        windows = tuple(map(self._within, read.windows))
        if self.window is None:
            return {"windows": windows}
        ((own, _),) = (self.into or {}).items()
        at = [a is not None and self.draft.axis(a) == own for a in before.dims].index(True)
        offset = read.offset - self.window.start * strides[at]
        return {"offset": offset, "windows": (*windows, self.window)}

    def _within(self, window: Window) -> Window:
        """The same places of the copy."""
        axes = [self.draft.axis(a) for a in window.axes]
        split = tuple(chain.from_iterable(map(self._split, axes)))
        if self.window is None or axes[0] not in (self.into or {}):
            return replace(window, axes=split)
        by, stop = self.window.start, axes[0].extent if window.stop is None else window.stop
        return Window(split, window.start + by, stop + by)
