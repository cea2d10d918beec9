"""Chooses the parameters of the row schedule: threads, vectors and blocks of a row.

In: a segment whose reductions run over the contiguous dim, and the machine. Out: `RowParams`. Example:
layer_norm over 1024 floats has 64 threads per row, each with four float4.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call, once_a_call
from ..ir.size import Size
from ..segment import Segment
from . import row_params
from .machine import EXCHANGED, Machine
from .pointwise import is_whole, is_wide, vector_width
from .row_params import DATA_REGISTERS, RowParams, block_shape, fits, registers_held
from .row_space import Rows, rows_of
from .shared_rows import EXCHANGE_BYTES, exchange_bytes, of_several_blocks

MAX_VECTORS = 8  # vectors of each tensor that a thread keeps
MAX_SWEPT_VECTORS = 16  # vectors of each tensor that a thread loads at a time, if it reads them in each sweep
MAX_WARP_VECTORS = 8  # the same, if a row has a warp or less
WARP_BLOCK_THREADS = 128  # threads of a block if a row has a warp or less
# bytes of input that a thread loads before it waits: with more, combining threads costs less per element
LOAD_BYTES = 64
MULTI_ROW_LOAD_BYTES = 32  # the same, if they are of several rows, or a warp has several rows
HALF_WARP_LOAD_BYTES = 64  # the same, if half a warp has a row that a warp would have two vectors of
MIN_ROW_THREADS = 8  # threads of a row that a thread has several vectors of
OTHER_REGISTERS = 24  # registers of a thread for everything but input and columns
COLUMN_BLOCK_THREADS = 256  # threads of a block with columns: with fewer there are too many parts to add up
MAX_FLOAT_ADDITIONS = 16  # additions to one accumulator for which float suffices on the host
MIN_BYTES_PER_SM = 49152  # bytes of rows that the threads of a multiprocessor should hold or load
MIN_FETCH_BYTES = 4  # bytes of the narrowest asynchronous copy to shared memory


@once_a_call
def choose_row_params(call: Call, segment: Segment, machine: Machine) -> RowParams:
    """One warp per row if the row fits its registers: then no thread waits at a barrier. A longer row has one
    thread per vector, up to `MAX_ROW_THREADS`, then more registers per thread. Columns take registers, so
    fewer threads run. If too few loads are in flight then, shared memory holds the row, and fetches the next
    one at the same time."""
    rows, _, columns = rows_of(call, segment)
    vector = vector_width(call, rows.space, machine, over_ends=True)
    whole = machine.has_threads and is_whole(call, rows.space, vector)
    given = RowParams(vector, 1, False, whole=whole, columns=len(columns), wide=is_wide(call, rows.space))
    if not machine.has_threads:
        is_short = call.decide(sz.le(rows.length, machine.lanes * MAX_FLOAT_ADDITIONS))
        return replace(given, in_float=bool(is_short))
    params = _chosen(call, segment, rows, given, machine)
    if not given.columns or params.warp or not whole or _narrowest(rows) * vector < MIN_FETCH_BYTES:
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
    """`choose_row_params`, with the decisions `given`. `resident` is 0 if shared memory has no room for
    what a block has to fetch."""
    vectors = sz.ceildiv(rows.length, given.vector)
    unroll = sz.nextpow2(sz.ceildiv(vectors, row_params.MAX_ROW_THREADS))
    shallow, deep = MAX_WARP_VECTORS, _depth(LOAD_BYTES, given.vector * rows.bytes)
    if given.columns:  # as much as registers hold: the cost to combine threads is shared by more elements
        held = [
            u
            for u in ((4, 3, 2) if given.prefetched else (8, 6, 4, 3, 2))
            if registers_held(rows, replace(given, unroll=u)) <= DATA_REGISTERS
        ] or [1]
        shallow, deep = held[0], next((u for u in held if u & (u - 1) == 0), 1)
    if call.decide(sz.le(vectors, 32 * shallow)):
        params = _of_a_warp(call, rows, given, vectors, shallow)
    else:
        # narrow accesses: more of them, so that as many bytes are in flight
        swept = min(MAX_SWEPT_VECTORS, max(4, LOAD_BYTES // (given.vector * max(rows.bytes, 1))))
        swept = 1 << (swept.bit_length() - 1)
        params = replace(given, unroll=swept, threads=row_params.MAX_ROW_THREADS, prefetched=False)
        unroll = sz.maximum(unroll, deep)
        if call.decide(sz.le(unroll, MAX_VECTORS)):
            params = replace(
                given, unroll=call.decide(unroll), persistent=True, threads=row_params.MAX_ROW_THREADS
            )
        shares = segment.uses_reductions and not given.prefetched and not fits(rows, params)
        if shares and not _is_better_swept(call, rows, given, machine):
            params = of_several_blocks(call, segment, rows, given, machine) or params
    across, _ = block_shape(rows.length, params, machine)
    if params.columns and params.persistent and not params.cooperative:
        params = _over_many_rows(call, segment, rows, params, across, machine)
    if call.varies:
        return params
    if not params.warp and not params.cooperative and not params.held:  # known to the compiler, then
        params = replace(params, across=call.decide(across))
    step = across * (params.vector * (1 if params.multi_row else params.unroll * params.rounds))
    fills = (
        sz.eq(rows.length, step)
        if params.persistent and not params.cooperative
        else sz.eq(rows.length % step, 0)
    )
    return replace(params, exact=bool(call.decide(fills)))


def _is_better_swept(call: Call, rows: Rows, given: RowParams, machine: Machine) -> bool:
    """Whether blocks that read their rows once for each sweep do better than blocks that share rows: where
    shared memory cannot fetch the accesses, as those of rows of 16 bits that begin anywhere, or of rows that
    end within one, and there is a row for each block that runs. On an H200 the softmax statistics of
    [8192, 50257] bfloat16 took 1361 us in shared rows."""
    if given.columns or (given.whole and given.vector * _narrowest(rows) >= MIN_FETCH_BYTES):
        return False
    return bool(call.decide(sz.le(2 * machine.multiprocessors, rows.count)))


def _narrowest(rows: Rows) -> int:
    """Bytes of an element of the narrowest tensor that comes from memory."""
    return min((a.itemsize for a in rows.streamed), default=0)


def _of_a_warp(call: Call, rows: Rows, given: RowParams, vectors: Size, most: int) -> RowParams:
    """For rows of so few `vectors` that a warp, or a part of one, holds a row. A thread holds at most `most`.
    If lengths vary, a kernel serves all lengths between two powers of two: on an H200 it takes up to a third
    longer than a kernel for one length."""

    def held(threads: int) -> int:  # vectors of a thread, if a row has `threads` threads
        each = sz.ceildiv(vectors, threads)
        return call.decide(sz.minimum(sz.nextpow2(each), most) if call.varies else bucket(each))

    warp = call.decide(sz.minimum(sz.nextpow2(vectors), 32))
    unroll = held(warp)
    # Rows of an odd length have narrow accesses: fewer threads of a row have more of them in flight, and
    # combine in fewer steps. On an H200 a softmax of 49 bfloat16 takes 25 us with 8 threads, 53 with 32. With
    # more to load, as a bias and a mask, and two results to store, it takes 52 us on an H100 with 16, 75 with
    # 32 and 100 with 8.
    while (
        warp > MIN_ROW_THREADS
        and 1 < unroll <= most // 2
        and (not given.columns or rows.apart)
        and 2 * unroll * given.vector * rows.bytes
        <= (HALF_WARP_LOAD_BYTES if warp == 32 and unroll == 2 else MULTI_ROW_LOAD_BYTES)
    ):
        warp //= 2
        unroll = held(warp)
    depth = _depth(MULTI_ROW_LOAD_BYTES, given.vector * rows.bytes)
    multi_row = unroll == 1 < depth and len(rows.space.dims) > len(rows.along) and not rows.apart
    return replace(
        given,
        unroll=depth if multi_row else unroll,
        persistent=True,
        warp=warp,
        multi_row=multi_row,
        threads=WARP_BLOCK_THREADS,
        prefetched=given.prefetched and not multi_row,
    )


def _over_many_rows(
    call: Call, segment: Segment, rows: Rows, params: RowParams, across: Size, machine: Machine
) -> RowParams:
    """For blocks that add up columns over many rows: all blocks should run at the same time."""
    threads = params.threads if params.warp else call.decide(sz.nextpow2(across))
    down = 1 if params.warp else max(1, COLUMN_BLOCK_THREADS // threads)
    threads *= down
    most = next(
        (r for r in (64, 80, 96, 128, 168) if r >= registers_held(rows, params) + OTHER_REGISTERS), 168
    )
    resident = max(1, machine.registers // (most * threads))
    if params.prefetched:
        exchanged = exchange_bytes(segment) if down == 1 and not params.warp else EXCHANGED
        shared = 2 * threads * params.vector * params.unroll * rows.bytes + exchanged
        resident = min(resident, _sharing(shared, machine))
    return replace(params, threads=threads, rows=down, resident=resident)


def _sharing(shared: int, machine: Machine) -> int:
    """How many blocks of a multiprocessor can have `shared` bytes of shared memory each."""
    fits = shared + EXCHANGE_BYTES <= machine.shared_per_block
    return machine.shared_per_multiprocessor // shared if fits else 0


def bucket(vectors: Size) -> Size:
    """The smallest of 1, 2, 3, 4, 6, 8, 12... that is at least `vectors`: at most a third of a thread's slots
    are wasted."""
    most = sz.nextpow2(vectors)
    quarter = sz.binary("div", most, 4)
    return most - quarter * sz.le(vectors, most - quarter)


def _depth(flight: int, bytes_each: int) -> int:
    """How many vectors of `bytes_each` bytes make `flight` bytes; at most 4."""
    return 1 << (max(1, min(4, flight // max(bytes_each, 1))).bit_length() - 1)
