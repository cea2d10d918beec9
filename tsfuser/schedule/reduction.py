"""The reduction schedule: one sweep over the data. If there are too few outputs to keep the GPU busy, the
data of each is split over several blocks.

In: a segment of reductions over the same axes, and of elementwise results that the same sweep stores. Out:
one kernel, or two: the first stores a partial result for each split, the second combines them.

Neighbouring threads read neighbouring elements, in one of two forms:

inner  the contiguous dim is reduced, and the threads of a row combine. If outer dims are reduced, too, a
thread
       has several rows of them in flight, and if they are long enough, they are split instead of the rows.
outer  the contiguous dim is not reduced. Each thread owns `vector` columns, and the threads along y combine.
The
       more columns there are, the fewer threads combine.

Example: the bias gradient of [65536, 1024] is an outer reduction with 66 splits.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Axis
from ..segment import Allocations, Segment
from .machine import Machine
from .partials import parted
from .proposal import Proposal, Stage
from .reduction_loops import apply
from .reduction_params import ReductionParams, Shape, plan


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments of reductions, if nothing in the segment depends on their results."""
    if not segment.reductions:
        return "it has no reduction"
    if segment.uses_reductions:
        return "something depends on its reductions"
    sides, params, shape = plan(call, segment, machine)
    if call.decide(sz.lt(1, shape.splits)):
        params = replace(params, split=True)
        return Proposal(
            params, lambda allocations: _split(call, segment, machine, params, shape, allocations)
        )
    return Proposal(params, lambda _: [Stage(segment, apply(sides, params, shape, machine, None), params)])


def _split(
    call: Call,
    segment: Segment,
    machine: Machine,
    params: ReductionParams,
    shape: Shape,
    allocations: Allocations,
) -> list[Stage]:
    """Two kernels: the first computes partial results, the second combines them."""
    multiple = 1 if params.inner else params.vector  # each split begins at a whole access
    first, second, distance = parted(
        segment, segment.reductions, Axis("splits", shape.splits), multiple, allocations
    )
    sides, _, _ = plan(call, first, machine)
    return [
        Stage(first, apply(sides, params, shape, machine, distance), params),
        finish(call, second, machine),
    ]


def finish(call: Call, segment: Segment, machine: Machine) -> Stage:
    """The kernel that combines partial results."""
    sides, params, shape = plan(call, segment, machine, small=True)
    schedule = apply(sides, params, shape, machine, None)
    return Stage(
        segment,
        replace(schedule, reduction=replace(schedule.reduction, combines_partials=machine.overlaps_launches)),
        params,
    )
