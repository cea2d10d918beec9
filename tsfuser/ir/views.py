"""Values in other dims: what eager does as views is a relabeling of axes.

In: a value of a Draft and the dims that it is to have. Out: that value with its axes in those dims, or an
argument read once more, over other axes; where no loops are those of both shapes, what is stored in the one
and read in the other. Example, x[N, C] as [N, C, 1]:

    view(draft, "unsqueeze", x, (*x.dims, None), (*draft.layout(x).strides, sz.const(1)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import Refusal
from . import size as sz
from .draft import Draft
from .fusion import Axis, Pointwise, Reshape, TensorInput, Value
from .layout import Layout, order_of


def view(
    draft: Draft,
    name: str,
    value: Value,
    dims: Sequence[Axis | None],
    strides: Sequence[sz.Size],
    copies: bool = False,
) -> Value:
    """`value` with its axes as the dims `dims` and further axes along which it does not change: a relabeling,
    nothing in memory. `strides` are those of eager's view, or of the copy that eager makes where it `copies`.
    """
    output = draft.new(name, value.dtype, dims, Layout(draft.extents(dims), tuple(strides)))
    draft.ops.append(Pointwise(name, "copy", (value,), None, output))
    draft.views.add(output.name)
    if draft.is_read(value) and not copies:
        draft.sources[output.name] = draft.sources[value.name]
    return output


def read_as(
    draft: Draft,
    name: str,
    value: Value,
    dims: Sequence[Axis | None],
    strides: Sequence[sz.Size],
    into: dict[Axis, tuple[Axis, ...]] | None = None,
) -> Value:
    """A view of the value that `is_read`, over other axes, by which the input is read once more; over those
    of an earlier read of the same walk, as of a view that becomes what it was. `into`: the axes of `value`,
    each with the finer ones among `dims` that it is split into."""
    source = draft.sources[value.name]
    earlier = _read_likewise(draft, source, draft.extents(dims), strides)
    if earlier is not None:
        return view(draft, name, earlier, earlier.dims, strides)
    output = draft.new(name, value.dtype, dims, Layout(draft.extents(dims), tuple(strides)))
    draft.rereads.append(replace(source, value=output, strides=tuple(strides)))
    if into is not None and not source.windows:
        draft.split_reads.append((source.value, output, into))
    draft.sources[output.name] = source
    draft.views.add(output.name)
    return output


def _read_likewise(
    draft: Draft, source: TensorInput, sizes: Sequence[sz.Size], strides: Sequence[sz.Size]
) -> Value | None:
    """What has been read where `source` is, with dims of these `sizes` and `strides`."""
    where = (source.index, source.offset, source.windows)
    for read in draft.reads:
        if (read.index, read.offset, read.windows) != where or len(read.value.dims) != len(sizes):
            continue
        pairs = (*zip(draft.sizes(read.value), sizes), *zip(read.strides, strides))
        if read.value.name in draft.sources and all(draft.call.decide(sz.eq(*pair)) for pair in pairs):
            return read.value
    return None


def placed(draft: Draft, value: Value, at: int, rank: int) -> Value:
    """`value`, of one dim, as a tensor of `rank` dims of which it is dim `at`: what a channel's number
    becomes beside [N, C, H, W]."""
    return _relabeled(draft, value, [value.dims[0] if d == at else None for d in range(rank)])


def split(draft: Draft, value: Value, dim: int, count: int) -> Value:
    """`value` with dim `dim` as two, the first of size `count`; the axis is split in the whole group."""
    axis, size = value.dims[dim], draft.sizes(value)[dim]
    if count < 1 or draft.call.decide(size % count):
        raise Refusal("a dimension that cannot be split evenly is an error in eager")
    pair: Sequence[Axis | None] | None
    if count == 1 or axis is None:
        pair = (None, axis)
    elif draft.call.decide(sz.eq(size, count)):
        pair = (axis, None)
    else:
        pair = regrouped(draft, value, [dim], [sz.const(count), sz.divided(size, count)])
        if pair is None:  # it is of loops that do not fit
            return split(draft, through_memory(draft, value, draft.layout(value)), dim, count)
    return _relabeled(draft, value, (*value.dims[:dim], *pair, *value.dims[dim + 1 :]))


def merged(draft: Draft, value: Value, dim: int, axis: Axis | None) -> Value:
    """`value` with dims `dim` and `dim + 1`, the halves of one like `axis`, as one again."""
    loops = [part for a in value.dims[dim : dim + 2] if a is not None for part in draft.axes.parts(a)]
    if loops and loops != draft.axes.parts(axis):
        axis = draft.axes.whole(loops, axis.extent)
    return _relabeled(draft, value, (*value.dims[:dim], axis, *value.dims[dim + 2 :]))


def regrouped(draft: Draft, value: Value, dims: Sequence[int], sizes: Sequence[sz.Size]) -> list[Axis] | None:
    """The axes of dims of `sizes`, not 1, that have the elements of the dims `dims` of `value` in order: of
    the same loops, which are cut in the whole group; None where no loops are those of both."""
    shares = draft.axes.shared_out([value.dims[d] for d in dims], sizes)
    return None if shares is None else list(map(draft.axes.whole, shares, sizes))


def through_memory(draft: Draft, value: Value, layout: Layout) -> Value:
    """`value` stored, and read with dims of the sizes of `layout`, eager's, over axes of their own."""
    stored = _relabeled(draft, value, value.dims)
    dims = [None if draft.call.decide(sz.eq(size, 1)) else draft.fresh_axis(size) for size in layout.sizes]
    output = draft.new("reshape", value.dtype, dims, layout)
    draft.ops.append(Reshape("reshape", (stored,), output))
    draft.views.add(output.name)
    return output


def in_own_order(draft: Draft, value: Value) -> Value:
    """`value` stored, and read over axes of its own, in the order of eager's memory where that is dense."""
    layout = draft.layout(value)
    order = order_of(draft.call, layout) or range(len(layout.sizes))
    sizes, strides = ([given[d] for d in order] for given in (layout.sizes, layout.strides))
    turned = view(draft, "view", value, [value.dims[d] for d in order], strides)
    stored = through_memory(draft, turned, Layout(tuple(sizes), tuple(strides)))
    back = [stored.dims[list(order).index(d)] for d in range(len(order))]
    return view(draft, "view", stored, back, layout.strides)


def _relabeled(draft: Draft, value: Value, dims: Sequence[Axis | None]) -> Value:
    """`value` in other dims, as a row-major copy that may leave the group."""
    output = draft.new("view", value.dtype, dims)
    draft.ops.append(Pointwise("view", "copy", (value,), None, output))
    return output
