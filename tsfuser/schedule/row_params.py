"""The parameters of the row schedule: threads, vectors and blocks of a row.

In: a segment whose reductions run over the contiguous dim, and the machine. Out: `RowParams`. Sizes of the
launch are formulas of the call's sizes, so that one kernel serves many calls. Example: layer_norm over 1024
floats has 64 threads per row, each with four float4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call, once_a_call
from ..ir.size import Size
from ..segment import Segment
from .machine import EXCHANGED, Machine
from .placement import costly_terms
from .pointwise import is_whole, is_wide, vector_width
from .row_space import Rows, rows_of

MAX_ROW_THREADS = 512  # threads of a row: with more, each would have too few registers
MAX_VECTORS = 8  # vectors of each tensor that a thread keeps
MAX_WARP_VECTORS = 8  # the same, if a row has a warp or less
WARP_BLOCK_THREADS = 128  # threads of a block if a row has a warp or less
# bytes of input that a thread loads before it waits: with more, combining threads costs less per element
LOAD_BYTES = 64
MULTI_ROW_LOAD_BYTES = 32  # the same, if they are of several rows
DATA_REGISTERS = 96  # registers of a thread for input and columns
OTHER_REGISTERS = 24  # registers of a thread for everything else
PREFETCH_REGISTERS = 8  # more registers for columns, where shared memory holds the input
COLUMN_BLOCK_THREADS = 256  # threads of a block with columns: with fewer there are too many parts to add up
MAX_FLOAT_ADDITIONS = 16  # additions to one accumulator for which float suffices on the host
COOPERATIVE_THREADS = 512  # threads of a cooperative block
COLUMN_REGISTERS = 48  # registers of a thread of a cooperative block for columns
COOPERATIVE_BLOCKS_PER_SM = 3  # at most: one has work while others wait
# sets of cooperative blocks that should run at the same time, if there are enough rows: with fewer, more of
# the blocks that make no whole set would be idle
BLOCK_SETS = 2
MIN_BYTES_PER_SM = 49152  # bytes of rows that the threads of a multiprocessor should hold or load
MIN_FETCH_BYTES = 4  # bytes of the narrowest asynchronous copy to shared memory
# of a cluster that holds its row in registers:
CLUSTER_REGISTERS = 32  # registers of a thread for everything but the row
CLUSTER_BLOCKS_PER_SM = (2, 1)  # blocks of a multiprocessor: the first number for which registers hold a row
MAX_CLUSTER_VECTORS = 32  # vectors of each tensor that a thread keeps
CLUSTER_ACCESS = 8  # bytes of each access, at least
GPC = 16  # multiprocessors over which a cluster may extend, on any device that has clusters
EXCHANGE_BYTES = 4096  # shared memory of a cooperative block for what its threads exchange


@dataclass(frozen=True)
class RowParams:
    """Decisions of the row schedule."""

    vector: int  # elements per access
    unroll: int  # vectors of each tensor that a thread keeps, all of one row or (`multi_row`) one per row
    persistent: bool  # a row stays in registers from its first to its last use
    warp: int = 0  # threads of a short row, several of which share a block; 0 for longer rows
    multi_row: bool = False  # a thread works on several rows at the same time
    exact: bool = False  # the threads' vectors fill a row exactly, so that no bound is checked
    whole: bool = False  # every vector is all inside or all outside the row
    columns: int = 0  # how many reductions run over the other dims
    threads: int = 1  # of a block, at most
    rows: int = 1  # of a block with columns, if a row has more than a warp
    cooperative: bool = False  # several blocks share a row; a thread has `rounds` * `unroll` vectors of it
    cluster: bool = False  # these blocks are a cluster
    rounds: int = 1
    prefetched: bool = False  # shared memory fetches the next row while the threads work on one
    resident: int = 0  # blocks that share a multiprocessor, if that matters
    wide: bool = False  # 64-bit indices
    in_float: bool = False  # a thread adds few elements per row, so float accumulation suffices

    @property
    def in_registers(self) -> bool:
        """Whether each cluster works on one row only, and keeps it in registers."""
        return self.cluster and not self.prefetched


@once_a_call
def choose(call: Call, segment: Segment, machine: Machine) -> RowParams:
    """One warp per row if the row fits its registers: then no thread waits at a barrier. A longer row has one
    thread per vector, up to `MAX_ROW_THREADS`, then more registers per thread. Columns take registers, so
    fewer threads run. If too few loads are in flight then, shared memory holds the row, and fetches the next
    one at the same time."""
    rows, _, columns = rows_of(call, segment)
    vector = vector_width(call, rows.space, machine)
    whole = machine.has_threads and is_whole(call, rows.space, vector)
    given = RowParams(vector, 1, False, whole=whole, columns=len(columns), wide=is_wide(call, rows.space))
    if not machine.has_threads:
        return replace(given, in_float=call.decide(sz.le(rows.length, machine.lanes * MAX_FLOAT_ADDITIONS)))
    params = _chosen(call, segment, rows, given, machine)
    if (
        not given.columns
        or params.warp
        or not whole
        or min((a.itemsize for a in rows.streamed), default=0) * vector < MIN_FETCH_BYTES
    ):
        return params
    if (
        fits(rows, params)
        and not params.cooperative
        and params.resident * params.threads * params.unroll * vector * rows.bytes >= MIN_BYTES_PER_SM
    ):
        return params
    prefetched = _chosen(call, segment, rows, replace(given, prefetched=True), machine)
    return (
        prefetched if prefetched.prefetched and prefetched.resident > 0 and fits(rows, prefetched) else params
    )


def _chosen(call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine) -> RowParams:
    """`choose`, with the decisions `given`. `resident` is 0 if shared memory has no room for what a block has
    to fetch."""
    vectors = sz.ceildiv(rows.length, given.vector)
    unroll = sz.nextpow2(sz.ceildiv(vectors, MAX_ROW_THREADS))
    shallow, deep = MAX_WARP_VECTORS, _depth(LOAD_BYTES, given.vector * rows.bytes)
    if given.columns:  # as much as registers hold: the cost to combine threads is shared by more elements
        held = [
            u
            for u in ((4, 3, 2) if given.prefetched else (8, 6, 4, 3, 2))
            if _held(rows, replace(given, unroll=u)) <= DATA_REGISTERS
        ] or [1]
        shallow, deep = held[0], next((u for u in held if u & (u - 1) == 0), 1)
    if call.decide(sz.le(vectors, 32 * shallow)):
        params = _of_a_warp(call, rows, given, vectors, shallow)
    else:
        params = replace(given, unroll=4, threads=MAX_ROW_THREADS, prefetched=False)
        unroll = sz.maximum(unroll, deep)
        if call.decide(sz.le(unroll, MAX_VECTORS)):
            params = replace(given, unroll=call.decide(unroll), persistent=True, threads=MAX_ROW_THREADS)
        if not fits(rows, params) and not given.prefetched and segment.uses_reductions:
            params = (
                _clustered(call, segment, rows, given, machine)
                or _shared(call, rows, given, machine)
                or params
            )
    across, _ = block_shape(rows.length, params, machine)
    if params.columns and params.persistent and not params.cooperative:
        params = _over_many_rows(call, rows, params, across, machine)
    if call.varies:
        return params
    step = across * (params.vector * (1 if params.multi_row else params.unroll * params.rounds))
    fills = (
        sz.eq(rows.length, step)
        if params.persistent and not params.cooperative
        else sz.eq(rows.length % step, 0)
    )
    return replace(params, exact=bool(call.decide(fills)))


def _of_a_warp(call: Call, rows: Rows, given: RowParams, vectors: Size, most: int) -> RowParams:
    """For rows of so few `vectors` that a warp, or a part of one, holds a row. A thread holds at most `most`.
    If lengths vary, a kernel serves all lengths between two powers of two: on an H200 it takes up to a third
    longer than a kernel for one length."""
    warp = call.decide(sz.minimum(sz.nextpow2(vectors), 32))
    each = sz.ceildiv(vectors, 32)
    unroll = call.decide(sz.minimum(sz.nextpow2(each), most) if call.varies else bucket(each))
    depth = _depth(MULTI_ROW_LOAD_BYTES, given.vector * rows.bytes)
    multi_row = unroll == 1 < depth and len(rows.space.dims) > len(rows.along)
    return replace(
        given,
        unroll=depth if multi_row else unroll,
        persistent=True,
        warp=warp,
        multi_row=multi_row,
        threads=WARP_BLOCK_THREADS,
        prefetched=given.prefetched and not multi_row,
    )


def _over_many_rows(call: Call, rows: Rows, params: RowParams, across: Size, machine: Machine) -> RowParams:
    """For blocks that add up columns over many rows: all blocks should run at the same time."""
    threads = params.threads if params.warp else call.decide(sz.nextpow2(across))
    down = 1 if params.warp else max(1, COLUMN_BLOCK_THREADS // threads)
    threads *= down
    most = next((r for r in (64, 80, 96, 128, 168) if r >= _held(rows, params) + OTHER_REGISTERS), 168)
    resident = max(1, machine.registers // (most * threads))
    if params.prefetched:
        exchanged = EXCHANGE_BYTES if down == 1 and not params.warp else EXCHANGED
        shared = 2 * threads * params.vector * params.unroll * rows.bytes + exchanged
        resident = min(resident, _sharing(shared, machine))
    return replace(params, threads=threads, rows=down, resident=resident)


def _clustered(
    call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine
) -> RowParams | None:
    """For rows that the blocks of a cluster can hold, if there are enough rows to keep all multiprocessors
    busy; else None. Registers hold a row if they have room and nothing is added up over rows. Then several
    clusters share the multiprocessors, and one loads while another combines or stores. Else shared memory
    holds it.

    On an H200, clusters with rows in registers take 0.69 to 0.92 of the time of cooperative blocks if two
    tensors are read (gradients of softmax and batch norm). If one tensor is read, or accesses are narrow,
    they take up to 1.5 times as long: there it is better to fetch the next row at the same time. Clusters
    with rows in shared memory are slower."""
    if not machine.cluster_blocks:
        return None
    wide = min((a.itemsize for a in rows.streamed), default=0) * given.vector >= CLUSTER_ACCESS
    if not given.columns and (machine.any_clusters or (wide and len(rows.streamed) > 1)):
        params = _in_registers(call, segment, rows, given, machine)
        if params is not None:
            return params
    return _shared(call, rows, replace(given, cluster=True), machine) if machine.any_clusters else None


def _in_registers(
    call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine
) -> RowParams | None:
    inner = len(rows.space.dims) - 1
    common = [a.itemsize for a in rows.space.loads if a not in rows.streamed and a.moves(inner)]
    each = given.vector * (rows.bytes + sum(common) + 4 * costly_terms(segment))
    for resident in CLUSTER_BLOCKS_PER_SM:
        room = machine.registers // (resident * COOPERATIVE_THREADS) - CLUSTER_REGISTERS
        most = min(MAX_CLUSTER_VECTORS, 4 * room // max(each, 1))
        if most < 1 or resident * COOPERATIVE_THREADS > machine.threads_per_multiprocessor:
            continue
        params = replace(
            given,
            unroll=most,
            persistent=True,
            cooperative=True,
            cluster=True,
            threads=COOPERATIVE_THREADS,
            resident=resident,
        )
        if not _fits_cluster(call, rows, params, machine):
            continue
        if call.varies:
            return params
        vectors = sz.ceildiv(rows.length, COOPERATIVE_THREADS * given.vector)
        # the last block of a row has as much work as the others
        return replace(params, unroll=call.decide(sz.ceildiv(vectors, blocks_per_row(rows, params))))
    return None


def _fits_cluster(call: Call, rows: Rows, params: RowParams, machine: Machine) -> bool:
    """Whether a row has no more blocks than a cluster may have, and all rows together have at least as many
    as the device has multiprocessors."""
    blocks = blocks_per_row(rows, params)
    most = min(machine.cluster_blocks, _of_gpc(machine) * params.resident)
    return bool(
        call.decide(sz.le(blocks, most)) and call.decide(sz.le(machine.multiprocessors, rows.count * blocks))
    )


def _of_gpc(machine: Machine) -> int:
    """Multiprocessors over which a cluster may extend."""
    return min(GPC, machine.multiprocessors)


def _shared(call: Call, rows: Rows, given: RowParams, machine: Machine) -> RowParams | None:
    """For rows that need several blocks. None if a row needs more blocks than run at the same time, or, if
    `given` says `cluster`, more than a cluster has. A multiprocessor has as many blocks as possible with at
    least two vectors for each thread; but only one block with columns, which take registers."""
    if not given.whole:  # a whole vector is fetched, or nothing
        given = replace(given, vector=1, whole=True)
    for resident in range(
        1
        if given.columns
        else min(COOPERATIVE_BLOCKS_PER_SM, machine.threads_per_multiprocessor // COOPERATIVE_THREADS),
        0,
        -1,
    ):
        vectors = min(
            8,
            (machine.shared_per_multiprocessor // resident - EXCHANGE_BYTES)
            // (2 * COOPERATIVE_THREADS * given.vector * max(rows.bytes, 1)),
        )
        if given.columns:
            vectors = min(vectors, COLUMN_REGISTERS // (given.vector * given.columns))
        if vectors < 1 or (vectors < 2 and resident > 1):
            continue
        all_vectors = sz.ceildiv(rows.length, COOPERATIVE_THREADS * given.vector)
        # the last block of a row has as much work as the others
        vectors = call.decide(sz.ceildiv(all_vectors, sz.ceildiv(all_vectors, vectors)))
        unroll = vectors  # columns can stay in registers only if the loop over them is unrolled
        if not given.columns and any(
            a.moves(len(rows.space.dims) - 1) and a not in rows.streamed for a in rows.space.loads
        ):
            # an unrolled loop has its loads first: tensors that all rows share would take too many registers
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
        if given.cluster:
            if _fits_cluster(call, rows, params, machine):
                return params
        elif call.decide(
            sz.le(
                blocks_per_row(rows, params) * sz.minimum(rows.count, BLOCK_SETS),
                blocks_at_once(params, machine),
            )
        ):
            return params
    return None


def _sharing(shared: int, machine: Machine) -> int:
    """How many blocks of a multiprocessor can have `shared` bytes of shared memory each."""
    fits = shared + EXCHANGE_BYTES <= machine.shared_per_block
    return machine.shared_per_multiprocessor // shared if fits else 0


def blocks_at_once(params: RowParams, machine: Machine) -> int:
    """Blocks that run at the same time."""
    return machine.multiprocessors * params.resident


def blocks_per_row(rows: Rows, params: RowParams) -> Size:
    """Blocks that share a row."""
    return sz.ceildiv(rows.length, COOPERATIVE_THREADS * params.vector * params.unroll * params.rounds)


def fits(rows: Rows, params: RowParams) -> bool:
    """Whether registers and shared memory hold a row, and the sums of columns."""
    return params.persistent and (
        not params.columns
        or params.cooperative
        or _held(rows, params) <= DATA_REGISTERS + PREFETCH_REGISTERS * params.prefetched
    )


def _held(rows: Rows, params: RowParams) -> int:
    """Registers of a thread for its part of its rows and what it keeps of them, for the sums of columns, and
    for tensors that all rows share."""
    deep, along = (params.unroll, 1) if params.multi_row else (1, params.unroll)
    kept, common = 4 * rows.kept, 4 * params.columns + 4
    if params.prefetched:  # vectors are taken from shared memory one after the other
        return params.vector * (along * (kept + common) + rows.bytes) // 4
    return params.vector * along * (deep * (rows.bytes + kept) + common) // 4


def bucket(vectors: Size) -> Size:
    """The smallest of 1, 2, 3, 4, 6, 8, 12... that is at least `vectors`: at most a third of a thread's slots
    are wasted."""
    most = sz.nextpow2(vectors)
    quarter = sz.binary("div", most, 4)
    return most - quarter * sz.le(vectors, most - quarter)


def _depth(flight: int, bytes_each: int) -> int:
    """How many vectors of `bytes_each` bytes make `flight` bytes; at most 4."""
    return 1 << (max(1, min(4, flight // max(bytes_each, 1))).bit_length() - 1)


def parts_of_all_rows(rows: Rows, params: RowParams, machine: Machine) -> Size:
    """Blocks (or sets of cooperative blocks) over which all rows are distributed: as many as run at the same
    time, if each gets at least two iterations."""
    if params.cluster:
        own = _of_gpc(machine)
        clusters = sz.binary("div", own * params.resident, blocks_per_row(rows, params))
        return sz.minimum(rows.count, clusters * (machine.multiprocessors // own))
    if params.cooperative:
        return sz.minimum(
            rows.count, sz.binary("div", blocks_at_once(params, machine), blocks_per_row(rows, params))
        )
    _, down = block_shape(rows.length, params, machine)
    each = down * params.unroll if params.multi_row else down
    return sz.minimum(sz.ceildiv(rows.count, each * 2), blocks_at_once(params, machine))


def block_shape(extent: Size, params: RowParams, machine: Machine) -> tuple[Size, Size]:
    """Threads along a row, a power of two or a multiple of a warp, and rows of a block."""
    if not machine.has_threads:
        return sz.const(1), sz.const(1)
    vectors = sz.ceildiv(extent, params.vector)
    if params.cooperative:
        return sz.const(COOPERATIVE_THREADS), sz.const(1)
    if params.warp:
        return sz.const(params.warp), sz.const(params.threads // params.warp)
    across = sz.ceildiv(sz.ceildiv(vectors, 1 if params.multi_row else params.unroll), 32) * 32
    return sz.minimum(across, MAX_ROW_THREADS), sz.const(params.rows)
