"""The pointwise schedule: every element once, in 16-byte pieces, several of them in flight.

In: a segment without reductions. Out: a two-dimensional tiling: columns are the innermost merged dim, rows
all others; one row only where memory merges entirely. A thread owns `vector` neighbouring columns of `unroll`
rows (or `unroll` pieces of the one row), so that an operand that is broadcast along rows is loaded once, and
no element costs a division. Example: x[B, T, C] + bias[C] -> rows B*T, columns C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.dtypes import FLOAT
from ..ir.fusion import Pointwise
from ..ir.size import Size
from ..ir.symbols import COSTLY, find
from ..segment import Segment
from .domain import Access, Domain, domain
from .loops import Schedule
from .machine import Machine
from .proposal import Proposal, Stage

LEAST_OVER_ENDS = 128  # columns of rows that may end in a vector: of fewer, the last vector is too much
LOOPED_LOAD_BYTES = 64  # bytes of input that a thread has in flight if it loops over rows


@dataclass(frozen=True)
class PointwiseParams:
    """Decisions of the pointwise schedule."""

    vector: int  # elements per access
    unroll: int  # accesses to each tensor that a thread has in flight
    threads: int  # of a block
    wide: bool  # 64-bit indices
    looped: bool = False  # a thread loops over rows, and keeps in registers what all rows share
    over_ends: bool = False  # a vector may contain the end of a row


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes every segment without reductions."""
    if segment.reductions:
        return "it has reductions"
    space = domain(call, segment)
    params = choose_pointwise_params(call, segment, space, machine)
    return Proposal(params, lambda _: [Stage(segment, apply(space, params, machine), params)])


def choose_pointwise_params(
    call: Call, segment: Segment, domain: Domain, machine: Machine
) -> PointwiseParams:
    """The vector width follows from the alignment. A thread unrolls until `machine.flight` bytes of input are
    in flight, or registers would run out. If instructions take longer than memory, more threads hide that
    better: there is no unrolling, and no vector if the device has room for one thread per element."""
    wide = is_wide(call, domain)
    if machine.vectorises_loops:
        return PointwiseParams(1, 1, 1, wide)
    vector = vector_width(call, domain, machine, by_lane=True, over_ends=True)
    costly = any(isinstance(op, Pointwise) and find(op.symbol).cost >= COSTLY for op in segment.ops)
    room = machine.multiprocessors * machine.threads_per_multiprocessor
    if costly and vector > 1 and call.decide(sz.le(domain.elements, room)):
        vector = 1
    inner = len(domain.dims) - 1
    over_ends = inner > 0 and not is_whole(call, domain, vector)
    reads = domain.reads
    streamed = [
        a
        for a in reads + domain.stores
        if a.moves(inner) and (inner == 0 or any(a.moves(d) for d in range(inner)))
    ]
    bytes_each = vector * max(sum(a.itemsize for a in streamed if a in reads), 1)
    if sum(a.itemsize for a in reads if a.moves(inner) and a not in streamed) > sum(
        a.itemsize for a in streamed
    ):
        return PointwiseParams(
            vector,
            1 << (max(1, min(4, LOOPED_LOAD_BYTES // bytes_each)).bit_length() - 1),
            machine.threads,
            wide,
            looped=True,
            over_ends=over_ends,
        )
    # roughly, the registers that an access needs
    ops = len(segment.ops) - 2 * len(domain.spare)
    live = vector * (len(reads) + len(domain.stores) + max(ops, 0) // 8)
    unroll = min(4, max(1, machine.flight // bytes_each), max(1, 96 // live))
    unroll = 1 if costly else unroll
    return PointwiseParams(vector, 1 << (unroll.bit_length() - 1), machine.threads, wide, over_ends=over_ends)


def apply(domain: Domain, params: PointwiseParams, machine: Machine) -> Schedule:
    schedule = Schedule.over(domain, params.threads, params.wide)
    return _host(schedule, machine) if machine.vectorises_loops else _gpu(schedule, params, machine)


def _rows(schedule: Schedule) -> tuple[Schedule, str | None, str]:
    """The schedule with all outer loops fused, and the names of its loops over rows (None if there are no
    outer loops) and over columns."""
    *outer, col = [x.name for x in schedule.loops]
    if len(outer) > 1:
        schedule = schedule.fuse_all(outer, "row")
        return schedule, "row", col
    return schedule, (outer[0] if outer else None), col


def _gpu(schedule: Schedule, params: PointwiseParams, machine: Machine) -> Schedule:
    schedule, row, col = _rows(schedule)
    v, u = params.vector, params.unroll
    if row is None:
        schedule = schedule.split(col, params.threads * v * u, ("block", "piece"))
        schedule = schedule.split("piece", params.threads * v, ("u", "chunk"), exact=True).split(
            "chunk", v, ("tx", "lane"), exact=True
        )
        return schedule.reorder("block", "tx", "u", "lane").bind(
            block="block", tx="thread_x", u="unroll", lane="vector"
        )
    columns = schedule.loop(col).extent
    across = even_part(sz.ceildiv(columns, v), 32)
    down = sz.binary("div", params.threads, across)
    schedule = schedule.split(col, across * v, ("col_block", "chunk"), whole=not params.over_ends).split(
        "chunk", v, ("tx", "lane"), exact=True
    )
    bound, iterations = (
        {"tx": "thread_x", "ty": "thread_y", "u": "unroll", "lane": "vector", "block": "block"},
        [],
    )
    if params.looped:
        wanted = sz.maximum(
            sz.binary(
                "div",
                machine.multiprocessors * machine.threads_per_multiprocessor // params.threads,
                schedule.loop("col_block").extent,
            ),
            1,
        )
        blocks = sz.minimum(wanted, sz.ceildiv(schedule.loop(row).extent, down * u))
        schedule, row, iterations, bound["r"] = (
            schedule.split(row, blocks * (down * u), ("r", "group")),
            "group",
            ["r"],
            "serial",
        )
    schedule = schedule.split(row, down * u, ("row_block", "rows"), exact=params.looped).split(
        "rows", down, ("u", "ty"), exact=True
    )
    schedule = schedule.reorder("row_block", "col_block", "ty", "tx", *iterations, "u", "lane").fuse(
        "row_block", "col_block", "block"
    )
    return schedule.bind(**bound)


def even_part(count: Size, most: Size | int) -> Size:
    """Splits `count` into the fewest parts of at most `most`, as equal as possible: the size of a part."""
    return sz.ceildiv(count, sz.ceildiv(count, most))


def _host(schedule: Schedule, machine: Machine) -> Schedule:
    """A block is a part of a row, or several short rows. The compiler vectorises along columns."""
    schedule, row, col = _rows(schedule)
    columns = schedule.loop(col).extent
    if row is None:
        schedule = schedule.split(col, machine.chunk, ("block", "lane")).bind(block="block", lane="simd")
        return replace(schedule, grain=machine.task // machine.chunk)
    # a square of cache lines where an operand is transposed
    side = machine.chunk if not _strided(schedule.domain) else 64
    rows = sz.maximum(
        1, sz.binary("div", side * side if side == 64 else side, sz.maximum(sz.minimum(columns, side), 1))
    )
    schedule = schedule.split(col, side, ("col_block", "lane")).split(row, rows, ("row_block", "u"))
    schedule = schedule.reorder("row_block", "col_block", "u", "lane").fuse("row_block", "col_block", "block")
    return replace(schedule.bind(block="block", u="serial", lane="simd"), grain=machine.task // machine.chunk)


def _strided(domain: Domain) -> bool:
    inner = len(domain.dims) - 1
    return any(a.moves(inner) and not a.is_unit(inner) for a in domain.accesses)


def is_wide(call: Call, domain: Domain) -> bool:
    """Whether some offset, or an index rounded up to a whole tile, may exceed 2**31."""
    last: Size = domain.elements
    for a in domain.accesses + domain.lookups:
        reach = sum(
            (step * size for step, size in zip(a.steps, a.extents)), sz.maximum(a.buffer.offset, 0) + 1
        )
        for d, dim in enumerate(domain.dims):
            if a.moves(d):
                reach = reach + dim.extent * a.strides[d]
        last = sz.maximum(last, reach)
    return bool(call.decide(sz.lt((1 << 31) - (1 << 20), last)))


def _lie_apart(call: Call, columns: sz.Size, width: sz.Size) -> bool:
    """Whether rows begin at wider accesses than they hold, which dense ones never do, and are long."""
    apart = call.decide(sz.lt(sz.pow2(columns), width))
    return bool(apart and call.decide(sz.le(LEAST_OVER_ENDS, columns)))


def vector_width(
    call: Call, domain: Domain, machine: Machine, by_lane: bool = False, over_ends: bool = False
) -> int:
    """Elements of one access, as many as every address allows, and at most `machine.access` bytes of the
    widest dtype. The dtype counts only for tensors with all elements, since others are read from a cache; and
    tensors whose stride along the inner dim is not 1 do not count at all.

    On a GPU a vector contains the end of a row only if the schedule can go `over_ends`: it computes the lanes
    before it alone. The addresses of such rows allow a wide access where rows lie apart, with gaps between
    them. A vector does not contain the end of a window, with one exception if the schedule can choose
    `by_lane`: a vector may be a whole row whose lanes are computed differently, such as two numbers that are
    computed for each of the other dims and stored side by side."""
    inner = len(domain.dims) - 1
    if machine.vectorises_loops:
        return host_lanes(call, domain.dims[-1].extent, machine.lanes)
    if any(a.buffer.at and not _adds_vectors(a, machine) for a in domain.stores):
        return 1
    walking = domain.walking(inner)
    if not walking:
        return 1
    full = [a for a in walking if all(map(a.moves, range(inner)))]
    width: Size = sz.const(max(1, machine.access // max(a.itemsize for a in full or walking)))
    for a in walking:
        width = sz.minimum(width, sz.binary("div", row_alignment(a, inner), a.itemsize))
    columns = domain.dims[-1].extent
    if len(domain.dims) > 1 and not (over_ends and _lie_apart(call, columns, width)):
        width = sz.minimum(width, sz.pow2(columns))
    if by_lane and columns.is_const and _chooses_only(domain, inner) and call.decide(sz.eq(width, columns)):
        return columns.a
    return call.decide(sz.maximum(sz.minimum(width, window_alignment(domain, inner)), 1))


def _chooses_only(domain: Domain, along: int) -> bool:
    """Whether there are windows along dim `along`, and none is of a load: they only choose between values."""
    windows = [w for w in domain.windows if domain.numbered(w)[0][along] is not sz.const(0)]
    return bool(windows) and not any(w in a.buffer.windows for a in domain.loads for w in windows)


def _adds_vectors(access: Access, machine: Machine) -> bool:
    """Whether the device adds several elements at once; else neighbours should be of neighbouring threads."""
    return machine.capability >= 90 and access.buffer.value.dtype is FLOAT


def host_lanes(call: Call, extent: Size, most: int) -> int:
    """How many of `extent` elements a loop of the host takes side by side. The compiler makes vectors of
    them, which need no alignment."""
    return call.decide(sz.maximum(sz.minimum(sz.nextpow2(extent), most), 1))


def with_grain(schedule: Schedule, machine: Machine) -> Schedule:
    """The `schedule` of a reduction, with enough blocks in each task of the thread pool to pay for it."""
    if not machine.task:
        return schedule
    each = sz.maximum(
        sz.binary("div", schedule.domain.elements, sz.maximum(schedule.loop("block").extent, 1)), 1
    )
    return replace(schedule, grain=sz.maximum(sz.binary("div", machine.task, each), 1))


def is_whole(call: Call, domain: Domain, vector: int) -> bool:
    """Whether `vector` divides the inner dim."""
    return bool(call.decide(sz.eq(domain.dims[-1].extent % vector, 0)))


def row_alignment(a: Access, *along: int) -> Size:
    """The largest power of two, in bytes, that divides the address of the first element of every row along
    the dims `along`."""
    alignment = a.buffer.alignment
    for d in range(len(a.strides)):
        if d not in along and a.moves(d):
            alignment = sz.minimum(alignment, sz.pow2(a.strides[d] * a.itemsize))
    for step in a.steps:
        alignment = sz.minimum(alignment, sz.pow2(step * a.itemsize))
    return alignment


def window_alignment(domain: Domain, along: int) -> Size:
    """The largest power of two by which elements along dim `along` can be grouped so that no window begins or
    ends inside a group."""
    alignment = sz.pow2(0)
    for window in domain.windows:
        steps, scale = domain.numbered(window)
        if steps[along] is sz.const(0):
            continue
        if steps[along] is not sz.const(1):
            return sz.const(1)
        for size in (*(end * scale for end in window.ends), *(s for d, s in enumerate(steps) if d != along)):
            alignment = sz.minimum(alignment, sz.pow2(size))
    return alignment
