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
from .pointwise import is_wide, vector_width

LARGEST = 512  # threads of a row: more would leave too few registers to each
DEEPEST = 8  # vectors of each tensor that a thread keeps
SMALL = 128  # threads of a block of short rows
LONG = 65536  # elements of a row from which several blocks a row are worth two passes and another kernel, where rows are few


@dataclass(frozen=True)
class RowParams:
    """`vector`: elements an access; `unroll`: vectors a thread keeps of each tensor; `persistent`: in registers from first to last use; `several`: short rows
    share a block; `threads`: of a block at most; `wide`: 64-bit indices."""

    vector: int
    unroll: int
    persistent: bool
    several: bool
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
    """Threads first, then registers: a row is spread over as many threads as have a vector to do."""
    wide, vector = is_wide(call, space), vector_width(call, space, machine)
    if machine.kind == "host":
        return RowParams(vector, 1, False, False, 1, wide)
    vectors = sz.ceildiv(space.dims[-1].extent, vector)
    if call.decide(sz.le(vectors, 32)):
        return RowParams(vector, 1, True, True, SMALL, wide)
    unroll = sz.nextpow2(sz.ceildiv(vectors, LARGEST))
    if call.decide(sz.le(unroll, DEEPEST)):
        return RowParams(vector, call.decide(unroll), True, False, LARGEST, wide)
    return RowParams(vector, 4, False, False, LARGEST, wide)


def apply(space: Domain, params: RowParams) -> Schedule:
    schedule = Schedule.over(space, params.threads, params.wide)
    *outer, col = [x.name for x in schedule.loops]
    across, down = _block(schedule.loop(col).extent, params)
    step = across * params.vector
    if params.persistent:
        schedule = schedule.split(col, step, ("u", "spot"), times=params.unroll)
        serial = ["u", "lane"]
    else:
        schedule = schedule.split(col, step * params.unroll, ("r", "round")).split("round", step, ("u", "spot"), exact=True)
        serial = ["r", "u", "lane"]
    schedule = schedule.split("spot", params.vector, ("tx", "lane"), exact=True)
    bound = {"tx": "thread_x", "ty": "thread_y", "r": "serial", "u": "unroll", "lane": "vector", "block": "block"}
    threads = ["tx"]
    if outer:
        schedule = schedule.reorder(*outer, *threads, *serial)
        row = outer[0]
        if len(outer) > 1:
            schedule, row = schedule.fuse_all(outer, "row"), "row"
        schedule = schedule.split(row, down, ("block", "ty"))
        schedule = schedule.reorder("block", "ty", *threads, *serial)
    else:
        schedule = schedule.reorder(*threads, *serial).with_single("block")
    schedule = schedule.bind(**bound)
    return replace(schedule, reduction=Reduction(tuple(serial), "x", phases=True))


def _block(extent: Size, params: RowParams) -> tuple[Size, Size]:
    """Threads along a row, a power of two or a multiple of a warp, and rows of a block."""
    if params.threads == 1:
        return sz.const(1), sz.const(1)
    vectors = sz.ceildiv(extent, params.vector)
    if params.several:
        across = sz.nextpow2(vectors)
        return across, sz.binary("div", params.threads, across)
    across = sz.ceildiv(sz.ceildiv(vectors, params.unroll), 32) * 32
    return sz.minimum(across, LARGEST), sz.const(1)
