"""Rows for which a multiprocessor has one block, or that several blocks share: the blocks of a cluster, or
blocks that run at the same time.

In: rows that are too long for a block that has few registers, and what is decided of them. Out: `RowParams`,
or None where such a block does better. Example: the gradient of a softmax over 100,000 floats is a cluster
per row, which holds it in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import MOMENTS
from ..segment import Segment
from .domain import Access
from .machine import CLUSTER_BLOCKS, MAILBOX_BYTES, Machine
from .placement import costly_terms
from .row_params import RowParams, blocks_at_once, blocks_per_row, multiprocessors_of_cluster
from .row_space import Rows

COOPERATIVE_THREADS = 512  # threads of a cooperative block
COLUMN_REGISTERS = 48  # registers of a thread of a cooperative block for columns
COOPERATIVE_BLOCKS_PER_SM = 3  # at most: one has work while others wait
# sets of cooperative blocks that should run at the same time, if there are enough rows: with fewer, more of
# the blocks that make no whole set would be idle
BLOCK_SETS = 2
# of a cluster that holds its row in registers:
CLUSTER_REGISTERS = 32  # registers of a thread for everything but the row
CLUSTER_BLOCKS_PER_SM = (2, 1)  # blocks of a multiprocessor: the first number for which registers hold a row
MAX_CLUSTER_VECTORS = 32  # vectors of each tensor that a thread keeps
CLUSTER_ACCESS = 8  # bytes of each access, at least
HELD_REGISTERS = 64  # registers of a thread for its part of a row, of a block that is alone
# blocks that share such a row, where they exchange moments: with more, blocks that share a multiprocessor do
# better (statistics of 2^20 floats take 134 us on an H100, and 152 as here)
MOST_HELD_MOMENTS = 8
HELD_SETS = 3  # sets of blocks that share such a row, at least: with two, one waits while the other does
EXCHANGE_BYTES = 4096  # shared memory of a cooperative block for its threads' exchange, at least


def of_several_blocks(
    call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine
) -> RowParams | None:
    """By a cluster if that is faster, else by blocks that are alone on their multiprocessors, else by
    cooperative blocks; None if none of these can hold a row."""
    return (
        _clustered(call, segment, rows, given, machine)
        or _held(call, segment, rows, given, machine)
        or _shared(call, segment, rows, given, machine)
    )


def exchange_bytes(segment: Segment) -> int:
    """Bytes of shared memory for the exchange of a block's threads in two iterations, at most, and the
    blocks of its cluster: a total of each warp, and of each block. Moments are sums first."""
    totals = sum(
        op.output.dtype.register.itemsize
        * (3 * 32 + 4 * CLUSTER_BLOCKS if op.combine in MOMENTS else 32 + CLUSTER_BLOCKS)
        for op in segment.reductions
    )
    return max(EXCHANGE_BYTES, 2 * (totals + 2 * MAILBOX_BYTES))


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
    of more than two blocks with rows in shared memory are slower (`_paired`)."""
    if not machine.cluster_blocks:
        return None
    wide = _is_wide(rows.streamed, given) and len(rows.streamed) > 1
    if not given.columns and (machine.any_clusters or wide):
        params = _in_registers(call, segment, rows, given, machine)
        if params is not None:
            return params
    if not machine.any_clusters:
        return None
    return _shared(call, segment, rows, replace(given, cluster=True), machine)


def _is_wide(read: Sequence[Access], given: RowParams) -> bool:
    """Whether accesses to the inputs `read` have several words."""
    return min((a.itemsize for a in read), default=0) * given.vector >= CLUSTER_ACCESS


def _in_registers(
    call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine
) -> RowParams | None:
    common = sum(a.itemsize for a in rows.shared)
    each = given.vector * (rows.bytes + common + 4 * costly_terms(segment))
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
    most = min(machine.cluster_blocks, multiprocessors_of_cluster(machine) * params.resident)
    return bool(
        call.decide(sz.le(blocks, most)) and call.decide(sz.le(machine.multiprocessors, rows.count * blocks))
    )


def _held(call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine) -> RowParams | None:
    """For rows of which one block for each multiprocessor, or a few together, hold one in registers, while
    their shared memory fetches the next one: between them they have twice the room of blocks that work on
    their row in shared memory. So a row takes fewer blocks, which wait for each other less often. Shared
    memory also keeps a block's part of the values that all rows share. None if that is all that is read, if
    registers are wanted for sums over rows, if not all can be fetched, or if a block would have one row
    only."""
    read = [*rows.streamed, *rows.shared]
    if not rows.streamed or given.columns or given.cluster or segment.lookups:
        return None
    if not given.whole or not _is_wide(read, given):
        return None
    room = 4 * HELD_REGISTERS * COOPERATIVE_THREADS  # of a block, in registers and in shared memory
    if not all(map(rows.is_fetchable, read)) or room > 2 * machine.registers:
        return None
    each = given.vector * COOPERATIVE_THREADS
    most = min(
        room // (each * max(rows.bytes, 1)),
        (machine.shared_per_block - exchange_bytes(segment)) // (each * sum(a.itemsize for a in read)),
    )
    if most < 2 or room > machine.shared_per_block - exchange_bytes(segment):
        return None
    vectors = sz.ceildiv(rows.length, COOPERATIVE_THREADS * given.vector)
    blocks = sz.ceildiv(vectors, most)
    # at least two iterations: one hides the fetches of the other, and `flatten` leaves the loop as it is
    if not call.decide(sz.both(sz.lt(machine.multiprocessors, rows.count * blocks), sz.le(2, vectors))):
        return None
    # where lengths vary, bounds and the places of pieces take registers that the row needs: a batch norm of
    # 512 channels of 65,536 floats takes 138 us on an H100 then, and 118 in shared memory
    if call.varies and len(rows.along) > 1 and call.decide(sz.lt(1, blocks)):
        return None
    exchanges = any(op.combine in MOMENTS for op in segment.reductions)
    most_blocks = machine.multiprocessors // HELD_SETS
    if exchanges:  # all blocks of a row run at the same time
        most_blocks = min(MOST_HELD_MOMENTS, machine.multiprocessors)
    if not call.decide(sz.le(blocks, most_blocks)):
        return None
    params = replace(
        given,
        unroll=call.decide(sz.ceildiv(vectors, blocks)),
        persistent=True,
        cooperative=not call.decide(sz.eq(blocks, 1)),
        threads=COOPERATIVE_THREADS,
        prefetched=True,
        held=True,
        resident=1,
    )
    return _paired(call, rows, params, machine)


def _paired(call: Call, rows: Rows, params: RowParams, machine: Machine) -> RowParams:
    """Two blocks that share a row, and go over many, are a cluster. What blocks exchange in memory comes
    behind the part of the next row that they fetch there: half of an iteration passes meanwhile, 2.6 us on an
    H200. Through each other's shared memory rows of two blocks take 0.77 to 0.89 of the time. More than two
    have to lie in one part of the chip (GPC); on an H200, where these differ, 30 clusters of four run at once
    and 15 of eight, and what does not run with the others doubles the time."""
    if not machine.cluster_blocks or not params.cooperative:
        return params
    pair = bool(call.decide(sz.eq(blocks_per_row(rows, params), 2)))
    return replace(params, cluster=pair, pair=pair)


def _shared(call: Call, segment: Segment, rows: Rows, given: RowParams, machine: Machine) -> RowParams | None:
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
            (machine.shared_per_multiprocessor // resident - exchange_bytes(segment))
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
        if not given.columns and rows.shared:
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
            return _paired(call, rows, params, machine)
    return None
