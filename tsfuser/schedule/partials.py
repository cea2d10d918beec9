"""Reductions in two kernels: partial results, and their combination.

In: a segment, and those of its reductions that are split over blocks. Out: the segment that leaves one result
of each a split in memory, and the one that combines these. Example: a sum over 65536 rows in 66 splits is 66
partial sums of each column, and their sum. Moments leave three numbers each.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.fusion import MOMENTS, PARTIAL_MOMENTS, Axis, Reduce, Value
from ..ir.size import Size
from ..segment import Allocations, Buffer, Segment


def parted(
    segment: Segment, ops, axis: Axis, multiple: int, allocations: Allocations
) -> tuple[Segment, Segment, Size]:
    """`segment` with the reductions `ops` in two steps: (the segment that leaves one result of each a step of
    `axis`, the one that combines these, elements from one such result to the next, a multiple of `multiple`).
    The first sees its results as tensors without that axis; the schedule tells where each begins."""
    stores = {b.value.name: b for b in segment.stores}
    partials: dict[str, Buffer] = {}
    second, first = [], [op for op in segment.ops if op not in ops]
    for op in ops:
        sources = _partial(op, ops)
        for source in (s for s in sources if s.output.name not in partials):
            dtype = op.output.dtype.register
            partials[source.output.name] = allocations.new(
                Value(f"{source.output.name}_partial", dtype, (axis, *op.output.dims)), multiple
            )
            first.append(replace(source, output=Value(source.output.name, dtype, op.output.dims)))
        second.append(
            replace(op, operands=tuple(partials[s.output.name].value for s in sources), axes=(axis,))
        )
    early = {
        name: replace(b, strides=b.strides[1:], value=replace(b.value, dims=b.value.dims[1:], name=name))
        for name, b in partials.items()
    }
    targets = tuple(stores.pop(op.output.name) for op in second)
    first = replace(segment, ops=tuple(first), stores=(*stores.values(), *early.values()))
    distance = next(iter(partials.values())).strides[0]
    return (
        first,
        Segment(tuple(second), tuple(partials.values()), targets, (axis, *second[0].output.axes)),
        distance,
    )


def _same(a: Reduce, b: Reduce) -> bool:
    """Whether both are of the same data, in the same dtype."""
    of_data = a.operands == b.operands and set(a.axes) == set(b.axes)
    return of_data and a.output.dtype.register is b.output.dtype.register


def _partial(op: Reduce, ops) -> list[Reduce]:
    """The reductions of a part of the data from which `op`, one of `ops`, is combined: itself, or all that
    moments need, once for those that share it."""
    if op.combine not in MOMENTS:
        return [op]
    first = next(other for other in ops if other.combine in MOMENTS and _same(op, other)).output
    return [
        replace(op, name=part, combine=part, output=replace(first, name=f"{part}_of_{first.name}"))
        for part in PARTIAL_MOMENTS
    ]
