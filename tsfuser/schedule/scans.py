"""The schedule for scans: what a running sum needs of the elements before is passed on, and nothing is
read twice.

In: a segment with scans along one dim, in one direction. Out: one kernel, in one of two forms.

rows     the contiguous dim is scanned. A row has a warp, a part of one, or a block, which works on it in
         rounds: each thread combines its own vectors, the threads exchange what they have, and the end of
         a round is where the next one begins. A host has one thread, and rounds of as many elements as
         its compiler makes vectors of around the scan itself. Reductions along the row come before, as in
         the row schedule.
columns  another dim is scanned. Each thread walks along its own columns; where these are too few to keep
         a GPU busy, the threads of a block along y share them, each with its part of a round.

Example: the running sum of rows of 4096 floats has blocks of 512 threads, with two float4 each, in one round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import LONGEST_LONE_SCAN
from ..segment import Allocations, Segment
from . import pointwise
from .domain import Dim, Domain, domain
from .loops import Scanning, Schedule
from .machine import Machine
from .placement import kept_terms, with_saved_values
from .pointwise import host_lanes, is_whole, is_wide, vector_width, with_grain
from .proposal import Proposal, Stage
from .row_choice import bucket
from .row_loops import apply
from .row_params import MAX_ROW_THREADS, RowParams, block_shape
from .row_space import Rows

MAX_WARP_VECTORS = 4  # vectors of a thread, if a row has a warp or less
MAX_VECTORS = 4  # the same, if it has a block: as many are in flight at a time
WARP_BLOCK_THREADS = 128  # threads of a block if a row has a warp or less
COLUMN_THREADS = 128  # threads of a block whose threads have columns of their own
SHARED_COLUMN_THREADS = 512  # threads of a block that share columns, at most
BUSY_THREADS_PER_SM = 1024  # threads with columns of their own that keep a multiprocessor busy
SLAB_BYTES = 64  # bytes of a row of the columns that a block shares: what memory reads at a time
COLUMN_LOADS = 4  # accesses along a column that a thread has in flight
HOST_COLUMNS = 128  # columns of the host that are walked along together


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments with scans."""
    ways = {(op.axes, op.backwards) for op in segment.scans}
    if len(ways) > 1:
        return "its scans go along different dims, or in different directions"
    [(axes, backwards)] = ways
    space = domain(call, segment)
    along = [d for d in space.dims if set(d.axes) & set(axes)]
    if len(along) != 1 or along[0].axes != axes:
        return "the loops along its scans are in another order, or not one behind the other, in memory"
    if not call.decide(sz.lt(0, space.elements)):
        return _of_nothing(call, segment, machine, along[0].name)
    if any(set(op.axes) != set(axes) for op in segment.reductions):
        return "its reductions run over other dims than its scans"
    if along[0] is space.dims[-1]:
        return _by_rows(call, segment, machine, Rows(space, (along[0].name,), kept_terms(segment)), backwards)
    if segment.reductions:
        return "reductions and scans run along a dim that is not the contiguous one"
    columns = choose_column_params(call, space, along[0], machine)
    schedule = _down_columns(space, along[0].name, columns, machine)
    axis = "y" if columns.down > 1 else ""
    schedule = replace(schedule, scanning=Scanning(along[0].name, ("r", "u"), backwards, axis))
    return Proposal(columns, lambda _: [Stage(segment, schedule, columns)])


def _of_nothing(call: Call, segment: Segment, machine: Machine, along: str) -> Proposal | str:
    """Without elements no loop has an iteration, so that any loops will do."""
    found = pointwise.propose(call, segment, machine)
    if not isinstance(found, Proposal):
        return found
    [stage] = found.stages(Allocations(0))
    schedule = replace(stage.schedule, scanning=Scanning(along, ()))
    return replace(found, stages=lambda _: [replace(stage, schedule=schedule)])


# ---- rows


def _by_rows(call: Call, segment: Segment, machine: Machine, rows: Rows, backwards: bool) -> Proposal | str:
    if machine.has_threads:
        if call.decide(sz.both(sz.lt(rows.count, 2), sz.lt(LONGEST_LONE_SCAN, rows.length))):
            return "it is one long row, which torch shares among blocks"
    params = choose_row_params(call, rows, machine)
    schedule = apply(rows, params, machine)
    names = tuple(x.name for x in schedule.loops_of_a_thread)
    schedule = replace(schedule, scanning=Scanning(rows.along[0], names, backwards, "x"))
    schedule = with_saved_values(segment, schedule, "register" if machine.has_threads else "scratch")
    return Proposal(params, lambda _: [Stage(segment, schedule, params)], rereads_are_free=params.persistent)


def choose_row_params(call: Call, rows: Rows, machine: Machine) -> RowParams:
    """A part of a warp for a row that its registers hold, else a block."""
    vector = vector_width(call, rows.space, machine, over_ends=True)
    whole = machine.has_threads and is_whole(call, rows.space, vector)
    given = RowParams(vector, 1, False, whole=whole, wide=is_wide(call, rows.space))
    if not machine.has_threads:
        return given
    vectors = sz.ceildiv(rows.length, vector)
    if call.decide(sz.le(vectors, 32 * MAX_WARP_VECTORS)):
        warp = call.decide(sz.minimum(sz.nextpow2(vectors), 32))
        unroll = call.decide(bucket(sz.ceildiv(vectors, warp)))
        params = replace(given, unroll=unroll, persistent=True, warp=warp, threads=WARP_BLOCK_THREADS)
    else:
        needed = sz.nextpow2(sz.ceildiv(vectors, MAX_ROW_THREADS))
        params = replace(given, unroll=MAX_VECTORS, threads=MAX_ROW_THREADS)
        if call.decide(sz.le(needed, MAX_VECTORS)):
            params = replace(params, unroll=call.decide(needed), persistent=True)
    if call.varies:
        return params
    across, _ = block_shape(rows.length, params, machine)
    params = params if params.warp else replace(params, across=call.decide(across))
    step = across * (vector * params.unroll)
    fills = sz.eq(rows.length, step) if params.persistent else sz.eq(rows.length % step, 0)
    return replace(params, exact=bool(call.decide(fills)))


# ---- columns


@dataclass(frozen=True)
class ColumnParams:
    """Decisions for columns."""

    vector: int  # columns per access, which a thread walks along together
    unroll: int  # elements of a column in flight
    across: int  # threads of a block that have different columns
    down: int  # threads that share each column
    wide: bool  # 64-bit indices

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.across * self.down


def choose_column_params(call: Call, space: Domain, along: Dim, machine: Machine) -> ColumnParams:
    """A column is shared where columns are too few, or too long for how many there are."""
    wide = is_wide(call, space)
    if not machine.has_threads:
        return ColumnParams(host_lanes(call, space.dims[-1].extent, HOST_COLUMNS), 1, 1, 1, wide)
    vector = vector_width(call, space, machine)
    columns = sz.product([d.extent for d in space.dims if d is not along])
    busy = machine.multiprocessors * BUSY_THREADS_PER_SM
    rounds = sz.nextpow2(sz.ceildiv(along.extent, COLUMN_LOADS))
    if call.decide(sz.le(busy * vector, columns)) or call.decide(sz.le(rounds, 1)):
        return ColumnParams(vector, COLUMN_LOADS, COLUMN_THREADS, 1, wide)
    itemsize = min(a.itemsize for a in space.accesses)
    across = max(1, min(32, SLAB_BYTES // (vector * itemsize)))
    while vector > 1 and call.decide(sz.lt(columns, machine.multiprocessors * vector * across)):
        vector //= 2
    down = call.decide(sz.minimum(rounds, SHARED_COLUMN_THREADS // across))
    while across < 32 and across * down < COLUMN_THREADS:
        across *= 2
    return ColumnParams(vector, COLUMN_LOADS, across, down, wide)


def _down_columns(space: Domain, along: str, params: ColumnParams, machine: Machine) -> Schedule:
    """The loops of a thread that walks along `params.vector` columns of dim `along`."""
    schedule = Schedule.over(space, params.threads, params.wide)
    *rows, col = [d.name for d in space.dims if d.name != along]
    if machine.has_threads:  # a vector never crosses from one row to the next
        schedule = schedule.reorder(along, *rows, col).fuse_all([*rows, col], "cell")
        schedule = schedule.split("cell", params.across * params.vector, ("block", "chunk"), whole=True)
        schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
        threads, bound = ["tx"], {"tx": "thread_x", "r": "serial", "u": "unroll", "lane": "vector"}
        if params.down > 1:
            schedule = schedule.split(along, params.down * params.unroll, ("r", "round"))
            schedule = schedule.split("round", params.unroll, ("ty", "u"), exact=True)
            threads, bound["ty"] = ["ty", "tx"], "thread_y"
        else:
            schedule = schedule.split(along, params.unroll, ("r", "u"))
        return schedule.reorder("block", *threads, "r", "u", "lane").bind(block="block", **bound)
    schedule = schedule.reorder(*rows, along, col).split(col, params.vector, ("col_block", "lane"))
    schedule = schedule.split(along, 1, ("r", "u"), exact=True).reorder(*rows, "col_block", "r", "u", "lane")
    schedule = schedule.fuse_all([*rows, "col_block"], "block")
    schedule = schedule.bind(block="block", r="serial", u="unroll", lane="simd")
    return with_grain(schedule, machine)
