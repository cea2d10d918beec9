"""The row schedule: normalisations and softmax, every row read once where it fits into registers.

In: a segment whose reductions all run over the contiguous dim, and results that depend on them. Out: one kernel. The threads of a row reduce together, get the
result back and go over the row again: in registers (*persistent*: a thread keeps `unroll` vectors of each tensor) or, for rows too long, in memory.
Short rows share a block. Example: layer_norm over 1024 floats: 256 threads a row, one float4 each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.size import Size
from ..segment import Segment
from .domain import Domain, domain
from .loops import Reduction, Schedule
from .machine import Machine
from .pointwise import is_whole, is_wide, vector_width

LARGEST = 512  # threads of a row: more would leave too few registers to each
DEEPEST = 8  # vectors of each tensor that a thread keeps
SHALLOW = 8  # the same in a row that a warp or less has for itself
FLIGHT = 32  # bytes of input that a thread asks for before it waits for any
SMALL = 128  # threads of a block of such rows
LONG = 65536  # elements of a row from which several blocks a row are worth two passes and another kernel, where rows are few


@dataclass(frozen=True)
class RowParams:
    """`vector`: elements an access; `unroll`: vectors a thread keeps of each tensor, of one row or (`several`) of as many; `persistent`: in registers from first to last use; `warp`: threads of a short row,
    several of which share a block, else 0; `exact`: the threads' vectors fill a row exactly, so that nothing needs a bound; `whole`: at least, every vector is all inside or all outside
    the row; `threads`: of a block at most; `wide`: 64-bit indices."""

    vector: int
    unroll: int
    persistent: bool
    warp: int
    several: bool
    exact: bool
    whole: bool
    threads: int
    wide: bool


def accepts(call: Call, segment: Segment, machine: Machine) -> "str | None":
    """None, or why the segment is not one pass over rows."""
    space = domain(call, segment)
    axes = set(segment.reductions[0].axes)
    reduced = [d for d in space.dims if set(d.axes) & axes]
    if len(reduced) != 1 or reduced[0] is not space.dims[-1]:
        return "its reduced dimensions are not the contiguous ones"
    if not call.decide(sz.lt(0, space.elements)):
        return "it has no elements"
    few = machine.multiprocessors // 2 if machine.kind == "gpu" else 2
    count = sz.product([d.extent for d in space.dims[:-1]])
    if call.decide(sz.both(sz.lt(count, few), sz.lt(LONG, space.dims[-1].extent))):
        return "its rows are long and too few to keep the machine busy"
    return None


def choose(call: Call, segment: Segment, space: Domain, machine: Machine) -> RowParams:
    """A warp a row while its threads can keep the row, so that nobody waits at a barrier; else threads first, then registers: as many threads as have a
    vector to do."""
    wide = is_wide(call, space)
    vector = vector_width(call, space, machine)
    whole = is_whole(call, space, vector)
    columns = space.dims[-1].extent
    if machine.kind == "host":
        return RowParams(vector, 1, False, 0, False, whole, whole, 1, wide)
    vectors = sz.ceildiv(columns, vector)
    depth = _depth(space, vector)
    unroll = sz.maximum(sz.nextpow2(sz.ceildiv(vectors, LARGEST)), depth)
    if call.decide(sz.le(vectors, 32 * SHALLOW)):
        warp = call.decide(sz.minimum(sz.nextpow2(vectors), 32))
        unroll = call.decide(sz.nextpow2(sz.ceildiv(vectors, 32)))
        several = unroll == 1 < depth and len(space.dims) > 1
        params = RowParams(vector, depth if several else unroll, True, warp, several, False, whole, SMALL, wide)
    elif call.decide(sz.le(unroll, DEEPEST)):
        params = RowParams(vector, call.decide(unroll), True, 0, False, False, whole, LARGEST, wide)
    else:
        params = RowParams(vector, 4, False, 0, False, False, whole, LARGEST, wide)
    across, _ = _block(columns, params)
    step = across * (params.vector * (1 if params.several else params.unroll))
    return replace(params, exact=bool(call.decide(sz.eq(columns, step) if params.persistent else sz.eq(columns % step, 0))))


def _depth(space: Domain, vector: int) -> int:
    """Vectors of each tensor that make `FLIGHT` bytes."""
    columns = len(space.dims) - 1
    streamed = vector * sum(a.itemsize for a in space.loads if a.moves(columns) and (columns == 0 or any(a.moves(d) for d in range(columns))))
    return 1 << (max(1, min(4, FLIGHT // max(streamed, 1))).bit_length() - 1)


def apply(space: Domain, params: RowParams) -> Schedule:
    schedule = Schedule.over(space, params.threads, params.wide)
    *outer, col = [x.name for x in schedule.loops]
    across, down = _block(schedule.loop(col).extent, params)
    step = across * params.vector
    if params.persistent:
        times = 1 if params.several else params.unroll
        schedule = schedule.split(col, step, ("u" if times > 1 else "once", "spot"), exact=params.exact, times=times, whole=params.whole)
        serial = ["u" if times > 1 else "once", "lane"]
    else:
        turn = step * params.unroll
        times = sz.ceildiv(schedule.loop(col).extent, turn)
        schedule = schedule.split(col, turn, ("r", "round"), exact=params.exact, times=times, whole=params.whole)
        schedule = schedule.split("round", step, ("u", "spot"), exact=True)
        serial = ["r", "u", "lane"]
    schedule = schedule.split("spot", params.vector, ("tx", "lane"), exact=True)
    bound = {"tx": "thread_x", "ty": "thread_y", "u": "unroll", "lane": "vector", "block": "block"}
    threads = ["tx"]
    if outer:
        schedule = schedule.reorder(*outer, *threads, *serial)
        row = outer[0]
        if len(outer) > 1:
            schedule, row = schedule.fuse_all(outer, "row"), "row"
        if params.several:
            schedule = schedule.split(row, down * params.unroll, ("block", "rows")).split("rows", down, ("u", "ty"), exact=True)
            serial = ["u", *serial]
        else:
            schedule = schedule.split(row, down, ("block", "ty"))
        schedule = schedule.reorder("block", "ty", *threads, *serial)
    else:
        schedule = schedule.reorder(*threads, *serial).with_single("block")
    schedule = schedule.bind(**bound)
    return replace(schedule, reduction=Reduction(tuple(serial), "x", phases=True, warp=params.warp, each="u" if params.several else ""))


def _block(extent: Size, params: RowParams) -> tuple[Size, Size]:
    """Threads along a row, a power of two or a multiple of a warp, and rows of a block."""
    if params.threads == 1:
        return sz.const(1), sz.const(1)
    vectors = sz.ceildiv(extent, params.vector)
    if params.warp:
        return sz.const(params.warp), sz.const(params.threads // params.warp)
    across = sz.ceildiv(sz.ceildiv(vectors, params.unroll), 32) * 32
    return sz.minimum(across, LARGEST), sz.const(1)
