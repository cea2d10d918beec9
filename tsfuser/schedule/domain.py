"""The iteration space of a segment, with as few dimensions as memory allows.

In: a Segment. Out: a `Domain`: dims in memory order, and the stride of each buffer in each dim. Two
neighbouring dims are merged if every tensor can step over both with one stride. Example: a contiguous [B, T,
C] plus a bias [C] is a domain of two dims, B*T and C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call, once_a_call
from ..ir.fusion import Axis, Located, Lookup, Reduce, Scan
from ..ir.size import Size
from ..ir.values import Window
from ..segment import Buffer, BufferKind, Segment
from .picks import spare_loads

#: Of the buffers with the most axes, the domain takes its order of axes from one that is stored (2), else
#: from an input.
_PREFERENCE = {BufferKind.LOOKUP: 0, BufferKind.INPUT: 1}


@dataclass(frozen=True)
class Dim:
    """One merged dimension. `name` is the name of its loop; `axes` are outermost first."""

    name: str
    extent: Size
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Access:
    """A buffer with its stride in each dim of the domain, in elements; constant 0 where it is broadcast.

    For a lookup: its index k reads `index * steps[k]` elements further, and is less than `extents[k]`. The
    indices vary along the dims `indexed`. What is added to places that indices name has their steps and
    extents, too.

    For a load that shares the vectors of another, `part_of`: it reads the elements at `place`, counted along
    the last dim, of the vectors that begin where the other load reads."""

    buffer: Buffer
    strides: tuple[Size, ...]
    steps: tuple[Size, ...] = ()
    extents: tuple[Size, ...] = ()
    indexed: tuple[int, ...] = ()
    part_of: str = ""
    place: int = 0

    @property
    def itemsize(self) -> int:
        return self.buffer.value.dtype.itemsize

    def moves(self, d: int) -> bool:
        return not (self.strides[d].is_const and self.strides[d].a == 0)

    def is_unit(self, d: int) -> bool:
        return self.strides[d].is_const and self.strides[d].a == 1


@dataclass(frozen=True)
class Domain:
    """`dims` from outermost to innermost; `loads`, `stores`, `randoms` and `lookups` in the segment's order.

    The strides of a random op are those of its linear index. The strides of a lookup are those of its table,
    without the dim that is indexed. `windows` are those of loads and of ops that
    ask for places. `spare`: the names of
    loads for which another one stands (picks.py)."""

    dims: tuple[Dim, ...]
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    randoms: tuple[Access, ...] = ()
    lookups: tuple[Access, ...] = ()
    windows: tuple[Window, ...] = ()
    spare: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[Access, ...]:
        """The loads that a kernel issues."""
        return tuple(a for a in self.loads if a.buffer.value.name not in self.spare)

    @property
    def accesses(self) -> tuple[Access, ...]:
        return self.loads + self.stores

    def walking(self, inner: int) -> tuple[Access, ...]:
        """The accesses that may be vectors along dim `inner`, because their stride there is 1. Such a lookup
        is a vector only if its indices do not vary along that dim."""
        return tuple(a for a in (*self.accesses, *self.lookups) if a.is_unit(inner))

    @property
    def elements(self) -> Size:
        return sz.product([d.extent for d in self.dims])

    def numbered(self, window: Window) -> tuple[tuple[Size, ...], Size]:
        """The index along the dim of a window, times a scale, as a linear function of the domain's dims: the
        factor of each dim, and the scale. The scale is the number of neighbours in memory that have the same
        index."""
        scale = sz.const(1)
        for dim in self.dims:
            if window.axes[-1] in dim.axes:
                scale = sz.product([a.extent for a in dim.axes[dim.axes.index(window.axes[-1]) + 1 :]])
        steps = []
        for dim in self.dims:
            own = [k for k, axis in enumerate(window.axes) if axis in dim.axes]
            last = len(window.axes) - 1
            inside = [a.extent for a in window.axes[own[-1] + 1 :]] if own else []
            steps.append(
                sz.const(0) if not own else sz.const(1) if own[-1] == last else sz.product(inside) * scale
            )
        return tuple(steps), scale


@once_a_call
def domain(call: Call, segment: Segment, like: Domain | None = None) -> Domain:
    """The domain of `segment`. If `like` is given, the axes are in its order.

    An axis is never merged with one over which other reductions, or scans, run (in a result without
    elements the strides of both may be 0)."""
    memory = segment.loads + segment.stores
    randoms = tuple(
        Buffer(op.output, BufferKind.RANDOM, op.stream, op.linear_strides, sz.const(256))
        for op in segment.randoms
    )
    lookups = tuple(
        Buffer(op.output, BufferKind.LOOKUP, op.table, op.strides, op.alignment, offset=op.offset)
        for op in segment.lookups
    )
    buffers = memory + randoms + lookups
    tables = tuple(_in_order(b, op) for b, op in zip(lookups, segment.lookups))
    along: tuple[Reduce | Scan, ...] = (*segment.reductions, *segment.scans)
    reduced = {axis: tuple(axis in op.axes for op in along) for axis in segment.axes}
    reference = max(
        memory + tables,
        key=lambda b: (len(b.value.axes), _PREFERENCE.get(b.kind, 2)),
    )
    axes = (
        [a for d in like.dims for a in d.axes]
        if like
        else _sorted_axes(call, segment.axes, reference, memory + randoms + tables)
    )
    strides = {(b, a): _stride(call, b, a) for b in buffers for a in axes}
    groups: list[list[Axis]] = []
    for axis in axes:
        same_side = groups and reduced[groups[-1][-1]] == reduced[axis]
        if (
            same_side
            and all(_walk_as_one(call, strides[b, groups[-1][-1]], strides[b, axis], axis) for b in buffers)
            and all(_stay_in(w, groups[-1][-1], axis) for w in segment.windows)
        ):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    groups = groups or [[]]  # a single element: one dim, so that schedules have a loop to bind
    dims = tuple(Dim(f"i{k}", sz.product([a.extent for a in g]), tuple(g)) for k, g in enumerate(groups))

    located = {op.output.name: op for op in segment.ops if isinstance(op, Located)}

    def access(b: Buffer) -> Access:
        own = tuple(strides[b, d.axes[-1]] if d.axes else sz.const(0) for d in dims)
        places = [located[v.name] for v in b.at]
        return Access(b, own, tuple(op.step for op in places), tuple(op.extent for op in places))

    def indexed(op: Lookup) -> Access:
        varying = {axis for index in op.operands for axis in index.axes}
        own = tuple(d for d, dim in enumerate(dims) if varying.intersection(dim.axes))
        return replace(access(table[op.output.name]), steps=op.steps, extents=op.extents, indexed=own)

    table = {b.value.name: b for b in lookups}
    return Domain(
        dims,
        tuple(map(access, segment.loads)),
        tuple(map(access, segment.stores)),
        tuple(map(access, randoms)),
        tuple(map(indexed, segment.lookups)),
        segment.windows,
        spare_loads(segment),
    )


def _in_order(buffer: Buffer, op: Lookup) -> Buffer:
    """The buffer of a lookup, as if its indices were 0, 1, 2...: so its axes can be sorted like those of
    other buffers."""
    return replace(buffer, strides=tuple(op.steps[0] if s is sz.const(0) else s for s in buffer.strides))


def _stride(call: Call, buffer: Buffer, axis: Axis) -> Size:
    """The stride, as a constant if it is 0 or 1, so that schedulers see broadcast and contiguous accesses."""
    stride = buffer.stride(axis)
    for value in (0, 1):
        if not stride.is_const and call.decide(sz.eq(stride, value)):
            return sz.const(value)
    return stride


def _walk_as_one(call: Call, outer: Size, inner: Size, axis: Axis) -> bool:
    """Whether a step of the outer axis is as long as all of the inner axis, so that both can be one dim."""
    zero = sz.const(0)
    if outer is zero or inner is zero:
        return outer is inner
    return bool(call.decide(sz.eq(outer, inner * axis.extent)))


def _stay_in(window: Window, outer: Axis, inner: Axis) -> bool:
    """Whether the index of the window is still linear in the dim into which both axes are merged."""
    axes = window.axes
    if outer in axes and inner in axes:
        return axes.index(outer) + 1 == axes.index(inner)
    return outer == axes[-1] or (outer not in axes and inner not in axes)


def _sorted_axes(call: Call, axes, reference: Buffer, buffers) -> list[Axis]:
    """The axes from outermost to innermost in the memory of `reference`. Axes that it lacks come first, in
    the order of the other buffers."""
    order = [reference] + [b for b in buffers if b is not reference]

    def inner_first(a: Axis, b: Axis) -> bool:
        """Whether `a` is inside `b` in the first buffer that can tell."""
        for buffer in order:
            x, y = buffer.stride(a), buffer.stride(b)
            if call.decide(sz.eq(x, 0)) or call.decide(sz.eq(y, 0)):
                continue
            if call.decide(sz.lt(x, y)):
                return True
            if call.decide(sz.lt(y, x)):
                return False
        return False

    result: list[Axis] = []
    for axis in axes:  # insertion sort: few axes, and the comparison is a recorded decision
        at = len(result)
        while at > 0 and inner_first(result[at - 1], axis):
            at -= 1
        result.insert(at, axis)
    lacking = [a for a in result if a not in reference.value.axes]
    held = [a for a in result if a in reference.value.axes]
    return lacking + held
