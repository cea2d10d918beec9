"""The row schedule: normalisations and softmax over the contiguous dim.

In: a segment whose reductions run over the contiguous dim, and results that depend on them. On a GPU a row
may have several pieces, like a channel of a batch. Or other reductions may run over all other dims
(*columns*), like the gradients of a normalisation's parameters, or over some of these, like that of a bias
that all images of a batch share. Out: one kernel, or two if there are columns.

The threads of a row combine, all of them get the result, and they sweep over the row again.

- A row that fits into registers is read once (*persistent*); each sweep reads a longer row again.
- Short rows share a block.
- *Cooperative* blocks share a long row. They run at the same time, combine in memory, and go over many rows:
  while they work on one, shared memory fetches the next.
- If a row needs few enough blocks, they are a *cluster* and combine in each other's shared memory.
- A block with columns goes over many rows, and adds up its part of the columns in registers. A second kernel
  adds up the parts. Where not all rows have columns in common, each thread goes over rows that do.

Example: layer_norm over 1024 floats has 64 threads per row, each with four float4.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.dtypes import INT64
from ..ir.fusion import MOMENTS, Axis, Value
from ..segment import Allocations, Segment
from . import online_softmax, reduction
from .loops import Cooperative, Schedule
from .machine import Machine
from .partials import parted
from .placement import with_saved_values
from .proposal import Proposal, Stage
from .row_choice import choose_row_params
from .row_loops import apply
from .row_params import RowParams, block_shape, blocks_at_once, fits, parts_of_all_rows
from .row_space import Rows, rows_of
from .sweeps import sweeps_of

# where rows are few, rows of more elements are worth a kernel with several blocks a row, and one that follows
LONG_ROW = 65536
WORDS = 8  # 4-byte words of the widest accumulator, moments of double
LARGE = 1 << 19  # elements from which on two kernels that read memory in order beat one that does not


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments whose reductions run over the contiguous dim. If nothing depends on these, a row must be
    in one piece."""
    if not segment.reductions:
        return "it has no reduction"
    reason = _refusal(call, segment, machine)
    if reason is not None:
        return reason
    rows, _, columns = rows_of(call, segment)
    if len(rows.along) > 1 and not segment.uses_reductions:
        return "its rows are in several pieces, and nothing depends on its reductions"
    params = choose_row_params(call, segment, machine)
    return Proposal(  # another sum costs blocks that share a row another exchange
        params,
        lambda allocations: _stages(call, segment, machine, params, allocations),
        rereads_are_free=params.persistent and not params.cooperative,
    )


def _refusal(call: Call, segment: Segment, machine: Machine) -> str | None:
    """None, or the reason why the segment is not one pass over rows."""
    rows, along, columns = rows_of(call, segment)
    if not along or (len(rows.along) > 1 and (not machine.has_threads or columns)):
        return "its reduced dimensions are not the contiguous ones"
    added = {op.output.name for op in columns}
    if any(v.name in added for op in segment.ops for v in op.operands):
        return "an op depends on a sum over all rows"
    if not call.decide(sz.lt(0, rows.space.elements)):
        return "it has no elements"
    if machine.has_threads and _lies_across(call, rows):
        return "neighbours in memory are of different rows"
    few = machine.multiprocessors // 2
    if (
        call.decide(sz.both(sz.lt(rows.count, few), sz.lt(LONG_ROW, rows.length)))
        and not choose_row_params(call, segment, machine).cooperative
    ):
        return "its rows are long and too few to keep the machine busy"
    if any(op.combine in MOMENTS for op in columns):
        return "moments of columns are three numbers each, which would not fit into registers"
    if columns:
        params = choose_row_params(call, segment, machine)
        if not fits(rows, params):
            return "a row and its part of the columns do not fit into registers"
        if rows.apart and (reason := _refusal_of_apart(call, rows, params, machine)):
            return reason
    return None


def _refusal_of_apart(call: Call, rows: Rows, params: RowParams, machine: Machine) -> str | None:
    """None, or the reason why columns that not all rows share are not added up in the same pass."""
    if not machine.has_threads:
        return "a host adds up what only some rows share in a pass of its own"
    if params.cooperative or params.prefetched:
        return "several blocks share a row, or shared memory fetches it, and not all rows share the columns"
    _, down = block_shape(rows.length, params, machine)
    if call.decide(sz.lt(rows.count_apart, down)):
        return "too few rows have columns of their own for the threads of a block"
    return None


def _lies_across(call: Call, rows: Rows) -> bool:
    """Whether neighbours in memory of a large tensor, which is read or stored, lie in different rows: each
    element would take a sector of memory. On an H100 the batch norm of [32, 58, 28, 28] bfloat16 in
    channels-last order, with a row-major result, took 50 us in two kernels, and takes 35 in three, of which
    the statistics are 6.
    """
    dims = rows.space.dims
    others = [d for d, dim in enumerate(dims) if dim.name not in rows.along]
    large = (*rows.streamed, *rows.space.stores)
    across = [
        a
        for a in large
        if a.moves(len(dims) - 1) and not a.is_unit(len(dims) - 1) and any(map(a.is_unit, others))
    ]
    sizes = [sz.product([dim.extent for d, dim in enumerate(dims) if a.moves(d)]) for a in across]
    return any(call.decide(sz.le(LARGE, size)) for size in sizes)


def _stages(
    call: Call, segment: Segment, machine: Machine, params: RowParams, allocations: Allocations
) -> list[Stage]:
    """The kernels that compute `segment`."""
    rows, _, columns = rows_of(call, segment)
    cooperative = None
    if params.cluster:
        cooperative = Cooperative("block_set", "part")
    elif params.cooperative:
        words = WORDS * len(segment.reductions)
        room = Axis("slots", sz.const(2 * words * blocks_at_once(params, machine)))
        slots = allocations.new(Value("slots", INT64, (room,))).index
        cooperative = Cooperative("block_set", "part", slots, words)
    if not columns:
        schedule = _with(apply(rows, params, machine), cooperative=cooperative)
        return [Stage(segment, _placed(segment, schedule, rows, params, machine), params)]
    axis = Axis("parts", parts_of_all_rows(rows, params, machine))
    first, second, distance = parted(segment, columns, axis, params.vector, allocations)
    schedule = _with(
        apply(rows_of(call, first, rows.space)[0], params, machine),
        cooperative=cooperative,
        partial=("part" if rows.apart else "block_set" if cooperative else "block", distance),
        apart=bool(rows.apart),
        leads=machine.overlaps_launches,
    )
    schedule = _placed(first, schedule, rows, params, machine)
    return [Stage(first, schedule, params), reduction.finish(call, second, machine)]


def _placed(
    segment: Segment, schedule: Schedule, rows: Rows, params: RowParams, machine: Machine
) -> Schedule:
    """`schedule` with placements: loads of the next row, and values that several sweeps over a row need."""
    if schedule.reduction.cooperative:
        pairs = online_softmax.pairs(sweeps_of(segment, schedule))
        schedule = _with(schedule, cooperative=replace(schedule.reduction.cooperative, online_softmax=pairs))
    if params.prefetched:
        schedule = schedule.with_values_in("held" if params.held else "prefetched", rows.fetchable)
    if params.held:  # no registers are left for values that could be computed again
        return schedule.with_values_in("kept", [a.buffer.value.name for a in rows.shared])
    return with_saved_values(segment, schedule, "register" if machine.has_threads else "scratch")


def _with(schedule: Schedule, **what) -> Schedule:
    return replace(schedule, reduction=replace(schedule.reduction, **what))
