"""The row schedule: normalisations and softmax, every row read once where it fits into registers.

In: a segment whose reductions run over the contiguous dim, and results that depend on them. On a GPU they may
run over outer dims as well (a row then has pieces, as a channel of a batch has), or some over all other dims
instead (*columns*, as the gradients of a normalisation's parameters do). Out: one kernel, or two. The threads
of a row reduce together, get the result back and go over the row again: in registers (*persistent*: a thread
keeps `unroll` vectors of each tensor) or, for rows too long, in memory. Short rows share a block; a long one
is shared by the blocks of a *cooperative* kernel, which combine in memory after each reduction and go over
many rows: all run at the same time, and fetch their part of the next row into shared memory while they work
on this one. With columns, a block goes over many rows too and adds up its part of the columns in registers; a
second kernel adds up the parts. Example: layer_norm over 1024 floats: 64 threads a row, four float4 each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import ops  # noqa: F401  it defines the symbols
from ..ir import size as sz
from ..ir.call import Call, once_a_call
from ..ir.dtypes import INT64
from ..ir.fusion import MOMENTS, Axis, Pointwise, Reduce, Value
from ..ir.size import Size
from ..ir.symbols import find
from ..segment import Allocations, Segment
from . import reduction
from .domain import Access, Domain, domain
from .loops import Cooperative, Reduction, Schedule
from .machine import EXCHANGED, Machine
from .pointwise import is_whole, is_wide, vector_width, with_grain
from .proposal import Proposal, Stage

LARGEST = 512  # threads of a row: more would leave too few registers to each
DEEPEST = 8  # vectors of each tensor that a thread keeps
SHALLOW = 8  # the same in a row that a warp or less has for itself
SMALL = 128  # threads of a block of such rows
# bytes of input that a thread asks for before it waits for any, so that what threads do together costs each
# element less
FLIGHT = 64
FLIGHT_ALONE = 32  # the same where several rows make them up
REGISTERS = 96  # of a thread, that may hold input and columns
TALL = 256  # threads of a block with columns, so that there are not too many parts to add up
OTHERS = 24  # registers for everything else
SHORT = 16  # additions to an accumulator of the host below which it is float
# elements of a row from which several blocks a row are worth two passes and another kernel, where rows are
# few
LONG = 65536
COOPERATIVE_THREADS = 512  # threads of a cooperative block
MIN_BLOCKS_PER_SM = 3  # such blocks that share a multiprocessor, so that one has work while others wait
# sets of cooperative blocks that run at the same time at least, where there are as many rows: blocks that are
# too few for another set would be idle
BLOCK_SETS = 2
SHARE = 48  # registers of a thread of a cooperative block that may hold columns
BEHIND = 49152  # bytes of rows that a multiprocessor should have under way
SPARED = 8  # registers more that may hold columns where nothing is kept but these
FETCHED = 4  # bytes of the narrowest access to memory that shared memory can make by itself
EXCHANGE = 4096  # bytes of shared memory that a cooperative block needs besides its part of rows
WORDS = 8  # 4-byte words of the widest accumulator, moments of double


@dataclass(frozen=True)
class RowParams:
    """`vector`: elements an access; `unroll`: vectors a thread keeps of each tensor, of one row or
    (`multi_row`) of as many; `persistent`: in registers from first to last use; `warp`: threads of a short
    row, several of which share a block, else 0; `exact`: the threads' vectors fill a row exactly, so that
    nothing needs a bound; `whole`: at least, every vector is all inside or all outside the row; `columns`:
    how many reductions run over the other dims; `threads`: of a block at most; `rows`: of a block with
    columns, where a row has more than a warp; `cooperative`: several blocks share a row, of which a thread
    has `rounds` times `unroll` vectors; `prefetched`: shared memory fetches the next row meanwhile;
    `resident`: blocks that share a multiprocessor, where that matters; `wide`: 64-bit indices; `in_float`: a
    thread adds up few elements a row, for which float accumulation suffices."""

    vector: int
    unroll: int
    persistent: bool
    warp: int = 0
    multi_row: bool = False
    exact: bool = False
    whole: bool = False
    columns: int = 0
    threads: int = 1
    rows: int = 1
    cooperative: bool = False
    rounds: int = 1
    prefetched: bool = False
    resident: int = 0
    wide: bool = False
    in_float: bool = False


@dataclass(frozen=True)
class _Rows:
    """A domain as rows of the dims called `along`, of which the last is contiguous."""

    space: Domain
    along: tuple[str, ...]

    @property
    def length(self) -> Size:
        """Elements of a row."""
        return sz.product([d.extent for d in self.space.dims if d.name in self.along])

    @property
    def count(self) -> Size:
        """How many rows there are."""
        return sz.product([d.extent for d in self.space.dims if d.name not in self.along])

    @property
    def streamed(self) -> list[Access]:
        """The tensors that are read from memory, and not again for every row."""
        inner = len(self.space.dims) - 1
        across = [d for d, dim in enumerate(self.space.dims) if dim.name not in self.along]
        return [
            a for a in self.space.loads if a.moves(inner) and (not across or any(a.moves(d) for d in across))
        ]

    @property
    def prefetched(self) -> tuple[str, ...]:
        """Names of those that shared memory can fetch."""
        return tuple(a.buffer.value.name for a in self.streamed if a.is_unit(len(self.space.dims) - 1))

    @property
    def bytes(self) -> int:
        """Bytes an element of these, and of what is looked up."""
        inner = len(self.space.dims) - 1
        looked_up = [a for a in self.space.lookups if a.moves(inner) or inner in a.indexed]
        return sum(a.itemsize for a in (*self.streamed, *looked_up))


def _rows(
    call: Call, segment: Segment, like: Domain | None = None
) -> tuple[_Rows, list[Reduce], list[Reduce]]:
    """The rows of a segment (the same as those of `like`, where given), its reductions along them, and those
    over columns."""
    space = domain(call, segment) if like is None else domain(call, segment, like)
    inner = set(space.dims[-1].axes)
    along = [op for op in segment.reductions if set(op.axes) & inner]
    axes = set(along[0].axes) if along else inner
    return (
        _Rows(space, tuple(d.name for d in space.dims if set(d.axes) & axes)),
        along,
        [op for op in segment.reductions if op not in along],
    )


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments whose reductions run over the contiguous dim; where nothing depends on these, only if a
    row is in one piece."""
    if not segment.reductions:
        return "it has no reduction"
    reason = _refusal(call, segment, machine)
    if reason is not None:
        return reason
    rows, _, columns = _rows(call, segment)
    if len(rows.along) > 1 and not segment.uses_reductions:
        return "its rows are in several pieces, and nothing depends on its reductions"
    params = choose(call, segment, machine)
    return Proposal(
        params,
        lambda allocations: _stages(call, segment, machine, params, allocations),
        rereads_are_free=params.persistent and not params.cooperative,
    )


def _refusal(call: Call, segment: Segment, machine: Machine) -> str | None:
    """None, or why the segment is not one pass over rows."""
    rows, along, columns = _rows(call, segment)
    if not along or (len(rows.along) > 1 and (not machine.has_threads or columns)):
        return "its reduced dimensions are not the contiguous ones"
    added = {op.output.name for op in columns}
    if any(v.name in added for op in segment.ops for v in op.operands):
        return "something depends on what is added up over all rows"
    if not call.decide(sz.lt(0, rows.space.elements)):
        return "it has no elements"
    few = machine.multiprocessors // 2
    if (
        call.decide(sz.both(sz.lt(rows.count, few), sz.lt(LONG, rows.length)))
        and not choose(call, segment, machine).cooperative
    ):
        return "its rows are long and too few to keep the machine busy"
    if any(op.combine in MOMENTS for op in columns):
        return "moments of columns are three numbers each, which would not fit into registers"
    if columns:
        params = choose(call, segment, machine)
        if not _fits(rows, params):
            return "a row and its part of the columns do not fit into registers"
    return None


def is_costly(op) -> bool:
    """Whether what `op` computes is worth keeping where it is needed again."""
    return isinstance(op, Pointwise) and not find(op.symbol).cheap


def _stages(
    call: Call, segment: Segment, machine: Machine, params: RowParams, allocations: Allocations
) -> list[Stage]:
    """The kernels that compute `segment`."""
    rows, _, columns = _rows(call, segment)
    cooperative, prefetched = None, rows.prefetched if params.prefetched else ()
    if params.cooperative:
        words = WORDS * len(segment.reductions)
        room = Axis("slots", sz.const(2 * words * _blocks(params, machine)))
        cooperative = Cooperative(
            "block_set", "part", allocations.new(Value("slots", INT64, (room,))).index, words
        )
    if not columns:
        return [
            Stage(
                segment,
                _with(apply(rows, params, machine), cooperative=cooperative, prefetched=prefetched),
                params,
            )
        ]
    first, second, distance = reduction.parted(
        segment, columns, Axis("parts", _parts(rows, params, machine)), params.vector, allocations
    )
    schedule = apply(_rows(call, first, rows.space)[0], params, machine)
    schedule = _with(
        schedule,
        cooperative=cooperative,
        prefetched=prefetched,
        partial=("block_set" if cooperative else "block", distance),
        leads=machine.overlaps_launches,
    )
    return [Stage(first, schedule, params), reduction.finish(call, second, machine)]


def _with(schedule: Schedule, **what) -> Schedule:
    return replace(schedule, reduction=replace(schedule.reduction, **what))


@once_a_call
def choose(call: Call, segment: Segment, machine: Machine) -> RowParams:
    """A warp a row while its threads can keep the row, so that nobody waits at a barrier; else threads first,
    then registers: as many threads as have a vector to do. With columns, which leave registers for few
    threads, shared memory keeps the row where that brings more of it under way, and fetches the next one
    meanwhile."""
    rows, _, columns = _rows(call, segment)
    vector = vector_width(call, rows.space, machine)
    whole = machine.has_threads and is_whole(call, rows.space, vector)
    given = RowParams(vector, 1, False, whole=whole, columns=len(columns), wide=is_wide(call, rows.space))
    if not machine.has_threads:
        return replace(given, in_float=call.decide(sz.le(rows.length, machine.lanes * SHORT)))
    params = _chosen(call, segment, rows, given, machine)
    if (
        not given.columns
        or params.warp
        or not whole
        or min((a.itemsize for a in rows.streamed), default=0) * vector < FETCHED
    ):
        return params
    if (
        _fits(rows, params)
        and not params.cooperative
        and params.resident * params.threads * params.unroll * vector * rows.bytes >= BEHIND
    ):
        return params
    prefetched = _chosen(call, segment, rows, replace(given, prefetched=True), machine)
    return (
        prefetched
        if prefetched.prefetched and prefetched.resident > 0 and _fits(rows, prefetched)
        else params
    )


def _chosen(call: Call, segment: Segment, rows: _Rows, given: RowParams, machine: Machine) -> RowParams:
    """`choose` with what is `given`; no block is resident where shared memory has no room for what one is to
    fetch."""
    vector = given.vector
    vectors = sz.ceildiv(rows.length, vector)
    bytes_each = vector * rows.bytes
    unroll, shallow = (
        sz.maximum(sz.nextpow2(sz.ceildiv(vectors, LARGEST)), _depth(FLIGHT, bytes_each)),
        SHALLOW,
    )
    if given.columns:  # as much as registers hold, so that what threads do together costs each element less
        held = [
            u
            for u in ((4, 3, 2) if given.prefetched else (8, 6, 4, 3, 2))
            if _held(rows, replace(given, unroll=u)) <= REGISTERS
        ] or [1]
        shallow, deep = held[0], next((u for u in held if u & (u - 1) == 0), 1)
        unroll = sz.maximum(sz.nextpow2(sz.ceildiv(vectors, LARGEST)), deep)
    if call.decide(sz.le(vectors, 32 * shallow)):
        warp = call.decide(sz.minimum(sz.nextpow2(vectors), 32))
        unroll, depth = call.decide(bucket(sz.ceildiv(vectors, 32))), _depth(FLIGHT_ALONE, bytes_each)
        multi_row = unroll == 1 < depth and len(rows.space.dims) > len(rows.along)
        prefetched = given.prefetched and not multi_row
        params = replace(
            given,
            unroll=depth if multi_row else unroll,
            persistent=True,
            warp=warp,
            multi_row=multi_row,
            threads=SMALL,
            prefetched=prefetched,
        )
    else:
        params = replace(given, unroll=4, threads=LARGEST, prefetched=False)
        if call.decide(sz.le(unroll, DEEPEST)):
            params = replace(given, unroll=call.decide(unroll), persistent=True, threads=LARGEST)
        if not _fits(rows, params) and not given.prefetched and segment.uses_reductions:
            params = _shared(call, rows, given, machine) or params
    across, _ = _block(rows.length, params, machine)
    # a turn of all blocks should find room at once
    if params.columns and params.persistent and not params.cooperative:
        threads = params.threads if params.warp else call.decide(sz.nextpow2(across))
        down = 1 if params.warp else max(1, TALL // threads)
        threads *= down
        most = next((r for r in (64, 80, 96, 128, 168) if r >= _held(rows, params) + OTHERS), 168)
        resident = max(1, machine.registers // (most * threads))
        if params.prefetched:
            meeting = EXCHANGE if down == 1 and not params.warp else EXCHANGED
            shared = 2 * threads * params.vector * params.unroll * rows.bytes + meeting
            resident = min(resident, _sharing(shared, machine))
        params = replace(params, threads=threads, rows=down, resident=resident)
    step = across * (params.vector * (1 if params.multi_row else params.unroll * params.rounds))
    fills = (
        sz.eq(rows.length, step)
        if params.persistent and not params.cooperative
        else sz.eq(rows.length % step, 0)
    )
    return replace(params, exact=bool(call.decide(fills)))


def _shared(call: Call, rows: _Rows, given: RowParams, machine: Machine) -> RowParams | None:
    """For rows that need several blocks; None where all blocks together are too few for one. As many blocks
    share a multiprocessor as leave each two vectors a thread; with columns, which take registers, there is
    one."""
    if not given.whole:  # what is fetched is a vector or nothing
        given = replace(given, vector=1, whole=True)
    for resident in range(
        1
        if given.columns
        else min(MIN_BLOCKS_PER_SM, machine.threads_per_multiprocessor // COOPERATIVE_THREADS),
        0,
        -1,
    ):
        vectors = min(
            8,
            (machine.shared_per_multiprocessor // resident - EXCHANGE)
            // (2 * COOPERATIVE_THREADS * given.vector * max(rows.bytes, 1)),
        )
        if given.columns:
            vectors = min(vectors, SHARE // (given.vector * given.columns))
        if vectors < 1 or (vectors < 2 and resident > 1):
            continue
        all_vectors = sz.ceildiv(rows.length, COOPERATIVE_THREADS * given.vector)
        # as much for the last block as for the others
        vectors = call.decide(sz.ceildiv(all_vectors, sz.ceildiv(all_vectors, vectors)))
        unroll = vectors  # columns are kept in registers, which a loop would not do
        if not given.columns and any(
            a.moves(len(rows.space.dims) - 1) and a not in rows.streamed for a in rows.space.loads
        ):
            # else what all rows share would take registers, since loads come first
            unroll = next((u for u in (3, 2) if vectors % u == 0), 1)
        params = replace(
            given,
            unroll=unroll,
            rounds=vectors // unroll,
            persistent=True,
            cooperative=True,
            threads=COOPERATIVE_THREADS,
            prefetched=True,
            resident=resident,
        )
        if call.decide(
            sz.le(_sharers(rows, params) * sz.minimum(rows.count, BLOCK_SETS), _blocks(params, machine))
        ):
            return params
    return None


def _sharing(shared: int, machine: Machine) -> int:
    """How many blocks with so many bytes of shared memory, but for what the threads of a row exchange, a
    multiprocessor has room for."""
    fits = shared + EXCHANGE <= machine.shared_per_block
    return machine.shared_per_multiprocessor // shared if fits else 0


def _blocks(params: RowParams, machine: Machine) -> int:
    """Blocks that run at the same time."""
    return machine.multiprocessors * params.resident


def _sharers(rows: _Rows, params: RowParams) -> Size:
    """Blocks that share a row."""
    return sz.ceildiv(rows.length, COOPERATIVE_THREADS * params.vector * params.unroll * params.rounds)


def _fits(rows: _Rows, params: RowParams) -> bool:
    """Whether the chip keeps a row, and what is added up over rows."""
    return params.persistent and (
        not params.columns
        or params.cooperative
        or _held(rows, params) <= REGISTERS + SPARED * params.prefetched
    )


def _held(rows: _Rows, params: RowParams) -> int:
    """Registers of a thread for its part of a row, or of several, for what it adds up over rows, and for what
    all rows share."""
    deep, along = (params.unroll, 1) if params.multi_row else (1, params.unroll)
    if params.prefetched:  # one vector after the other is taken from shared memory
        return params.vector * (along * (4 * params.columns + 4) + rows.bytes) // 4
    return params.vector * along * (deep * rows.bytes + 4 * params.columns + 4) // 4


def bucket(vectors: Size) -> Size:
    """The smallest of 1, 2, 3, 4, 6, 8, 12... that is not below `vectors`: of a thread's places a third are
    empty at most."""
    most = sz.nextpow2(vectors)
    quarter = sz.binary("div", most, 4)
    return most - quarter * sz.le(vectors, most - quarter)


def _depth(flight: int, bytes_each: int) -> int:
    """Vectors of `bytes_each` that make `flight` bytes; at most 4."""
    return 1 << (max(1, min(4, flight // max(bytes_each, 1))).bit_length() - 1)


def _parts(rows: _Rows, params: RowParams, machine: Machine) -> Size:
    """Blocks that go over all rows together, as many as run at the same time, with two turns each at least;
    or sets of cooperative blocks."""
    if params.cooperative:
        return sz.minimum(rows.count, sz.binary("div", _blocks(params, machine), _sharers(rows, params)))
    _, down = _block(rows.length, params, machine)
    each = down * params.unroll if params.multi_row else down
    return sz.minimum(sz.ceildiv(rows.count, each * 2), _blocks(params, machine))


def apply(rows: _Rows, params: RowParams, machine: Machine) -> Schedule:
    schedule = Schedule.over(rows.space, params.threads, params.wide)
    outer, along = [x.name for x in schedule.loops if x.name not in rows.along], list(rows.along)
    if len(along) > 1:  # a vector never crosses from one piece of a row to the next
        schedule, along = schedule.reorder(*outer, *along).fuse_all(along, "col"), ["col"]
    [col] = along
    across, down = _block(rows.length, params, machine)
    step = across * params.vector
    if params.cooperative:
        schedule = schedule.split(
            col,
            step * (params.unroll * params.rounds),
            ("part", "share"),
            exact=params.exact,
            times=_sharers(rows, params),
            whole=params.whole,
        )
        schedule = schedule.split("share", step * params.unroll, ("r", "round"), exact=True).split(
            "round", step, ("u", "chunk"), exact=True
        )
        serial = ["r", "u", "lane"]
    elif params.persistent:
        times = 1 if params.multi_row else params.unroll
        schedule = schedule.split(
            col,
            step,
            ("u" if times > 1 else "once", "chunk"),
            exact=params.exact,
            times=times,
            whole=params.whole,
        )
        serial = ["u" if times > 1 else "once", "lane"]
    else:
        turn = step * params.unroll
        times = sz.ceildiv(schedule.loop(col).extent, turn)
        schedule = schedule.split(
            col, turn, ("r", "round"), exact=params.exact, times=times, whole=params.whole
        )
        schedule = schedule.split("round", step, ("u", "chunk"), exact=True)
        serial = ["r", "u", "lane"]
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    bound = {
        "tx": "thread_x",
        "ty": "thread_y",
        "u": "unroll",
        "lane": "simd" if machine.vectorises_loops else "vector",
        "block": "block",
    }
    blocks, threads = ["block"], ["tx"]
    if params.cooperative:
        schedule = (
            _block_sets(schedule, outer, _parts(rows, params, machine))
            .reorder("block_set", "part", "iteration", "ty", "tx", *serial)
            .fuse("block_set", "part", "block")
        )
        bound["iteration"] = "rows"
    elif outer:
        schedule = schedule.reorder(*outer, *threads, *serial)
        row = outer[0]
        if len(outer) > 1:
            schedule, row = schedule.fuse_all(outer, "row"), "row"
        each, own = (down * params.unroll, "rows") if params.multi_row else (down, "ty")
        if params.columns:
            parts = _parts(rows, params, machine)
            schedule = schedule.split(row, parts * each, ("iteration", "group")).split(
                "group", each, ("block", own), exact=True
            )
            blocks, bound["iteration"] = ["block", "iteration"], "rows"
        else:
            schedule = schedule.split(row, each, ("block", own), exact=not machine.has_threads)
        if params.multi_row:
            schedule = schedule.split("rows", down, ("u", "ty"), exact=True)
            serial = ["u", *serial]
        schedule = schedule.reorder(*blocks, "ty", *threads, *serial)
    else:
        schedule = schedule.reorder(*threads, *serial).with_single("block")
    schedule = schedule.bind(**bound)
    each = "u" if params.multi_row else ""
    schedule = replace(
        schedule,
        resident=params.resident,
        reduction=Reduction(
            tuple(serial),
            "x",
            "cooperative" if params.cooperative else "warp" if params.warp else "block",
            phases=True,
            warp=params.warp,
            each=each,
            in_double=not machine.has_threads and not params.in_float,
            keep=_keep(machine),
        ),
    )
    return with_grain(schedule, machine)


def _keep(machine: Machine) -> str:
    """Where a row's values stay: in registers of its threads, or in the nearest cache."""
    return "register" if machine.has_threads else "memory"


def _block_sets(schedule: Schedule, outer: list[str], block_sets: Size) -> Schedule:
    """With loops `iteration`, `block_set` and `ty` over the rows."""
    if not outer:
        return schedule.with_single("ty").with_single("block_set").with_single("iteration")
    rest = [x.name for x in schedule.loops if x.name not in outer]
    schedule = schedule.reorder(*outer, *rest).fuse_all(outer, "row")
    return schedule.split("row", block_sets, ("iteration", "group")).split(
        "group", 1, ("block_set", "ty"), exact=True
    )


def _block(extent: Size, params: RowParams, machine: Machine) -> tuple[Size, Size]:
    """Threads along a row, a power of two or a multiple of a warp, and rows of a block."""
    if not machine.has_threads:
        return sz.const(1), sz.const(1)
    vectors = sz.ceildiv(extent, params.vector)
    if params.cooperative:
        return sz.const(COOPERATIVE_THREADS), sz.const(1)
    if params.warp:
        return sz.const(params.warp), sz.const(params.threads // params.warp)
    across = sz.ceildiv(sz.ceildiv(vectors, 1 if params.multi_row else params.unroll), 32) * 32
    return sz.minimum(across, LARGEST), sz.const(params.rows)
