"""Reductions in two kernels: the first computes partial results, the second combines them.

In: a segment, and those of its reductions that are split over blocks. Out: a segment that stores one partial
result of each reduction for each split, and a segment that combines them. Example: a sum over 65536 rows in
66 splits is 66 partial sums of each column, and their sum. A partial result of moments is three numbers.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.fusion import MOMENTS, PARTIAL_MOMENTS, Axis, Reduce, Value
from ..ir.size import Size
from ..segment import Allocations, Buffer, Segment


def parted(
    segment: Segment, ops, axis: Axis, multiple: int, allocations: Allocations
) -> tuple[Segment, Segment, Size]:
    """`segment` with the reductions `ops` in two kernels: (the segment that stores partial results, the
    segment that combines them, the distance of two partial results in elements, a multiple of `multiple`).
    `axis` numbers the splits. The results of the first segment lack this axis; its schedule adds the
    distance."""
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
    earlier = replace(segment, ops=tuple(first), stores=(*stores.values(), *early.values()))
    distance = next(iter(partials.values())).strides[0]
    return (
        earlier,
        Segment(tuple(second), tuple(partials.values()), targets, (axis, *second[0].output.axes)),
        distance,
    )


def _same(a: Reduce, b: Reduce) -> bool:
    """Whether both reduce the same data, in the same dtype."""
    of_data = a.operands == b.operands and set(a.axes) == set(b.axes)
    return of_data and a.output.dtype.register is b.output.dtype.register


def _partial(op: Reduce, ops) -> list[Reduce]:
    """The reductions of one split from whose results `op`, one of `ops`, is combined. That is `op` itself.
    For moments it is the three numbers that they need; moments of the same data share them."""
    if op.combine not in MOMENTS:
        return [op]
    first = next(other for other in ops if other.combine in MOMENTS and _same(op, other)).output
    return [
        replace(op, name=part, combine=part, output=replace(first, name=f"{part}_of_{first.name}"))
        for part in PARTIAL_MOMENTS
    ]
