"""Where the threads of a block meet to combine what they have accumulated.

In: the reductions of a loop. Out: the statements that combine their accumulators over the block, and the
shared memory that these take. Example: two sums over a row of 256 threads are one BlockReduce, whose totals
lie at bytes 0 and 128; over 16 columns of as many threads one ColumnReduce, at bytes 0 and 576.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.fusion import Reduce
from ..schedule.loops import Reduction
from ..schedule.machine import CLUSTER_BLOCKS, EXCHANGED, MAILBOX_BYTES, column_bytes
from .combine import COMBINATIONS, Combination, accumulator, totals
from .loop_ir import (
    Barrier,
    BlockReduce,
    BlockScan,
    ClusterReduce,
    ColumnReduce,
    CooperativeReduce,
    Stmt,
    Total,
)
from .traverse import statements


def combined(
    ops: Sequence[Reduce],
    how: Reduction,
    threads: int,
    lanes: int,
    fold: int,
    start: int = 0,
    across: int = 0,
) -> list[Stmt]:
    """The combinations of the `lanes` accumulators of each of `ops` over the block, in one exchange where
    they fit."""
    found = [
        (name, COMBINATIONS[op.combine], accumulator(op, how.in_double)) for name, op in totals(ops).items()
    ]
    return combined_by_name(found, how, threads, lanes, fold, start, across)


def combined_by_name(
    found: Sequence[tuple[str, Combination, DType]],
    how: Reduction,
    threads: int,
    lanes: int,
    fold: int,
    start: int = 0,
    across: int = 0,
) -> list[Stmt]:
    """`combined`, of accumulators (name, how they are combined, dtype of their numbers)."""
    if how.columns and how.scope == "block" and threads * lanes == how.columns:
        return []  # each thread has whole columns
    groups: list[list[Total]] = [[]]
    at = start
    for name, how_combined, wide in found:
        if how.columns:
            size = column_bytes(how_combined.bytes(wide), how.columns, threads)
        else:
            size = how_combined.bytes(wide) * lanes * (threads if how.axis == "y" else 32)
        if at + size > EXCHANGED and groups[-1]:
            groups.append([])
            at = start
        groups[-1].append(Total(name, how_combined.functor, how_combined.start(wide), at, size))
        at += size
    made: list[Stmt] = []
    for group in groups:
        made += [Barrier()] if made else []  # what the last group exchanged has been read
        if how.columns:
            made.append(ColumnReduce(tuple(group), how.columns, threads // 32))
        else:
            warp = how.warp if how.scope == "warp" else 0
            warps = 1 << max(0, -(-(across or threads) // 32) - 1).bit_length()
            made.append(BlockReduce(tuple(group), how.axis, fold, warp, warps, across))
    return made


SLOTS = "slots"  # a kernel's name for where its blocks meet


def combined_over_blocks(totals: Sequence[Total], at: int, word: int, threads: int) -> tuple[list[Stmt], int]:
    """The combination over the cooperative blocks of `totals`, which each of them has combined: (statements,
    first word after those that they take, which begin at `word`). Shared memory before byte `at` is in use.
    """
    places, words, at = [], [], -(-at // 16) * 16
    for t in totals:
        size = t.bytes // 32  # of one accumulator
        places.append(at)
        words.append(word)
        at, word = at + -(-size // 16) * 16, word + -(-size // 4)
    return [CooperativeReduce(tuple(totals), SLOTS, tuple(words), tuple(places), threads // 32)], word


def combined_over_cluster(totals: Sequence[Total], at: int, threads: int) -> list[Stmt]:
    """The combination over the blocks of a cluster of `totals`, which each of them has combined. Shared
    memory before byte `at` is in use."""
    places, at = [], -(-at // 16) * 16
    for t in totals:
        places.append(at)
        at += _room_in_cluster(t)
    return [ClusterReduce(tuple(totals), tuple(places), at, threads // 32)]


def columns_over_cluster(block: Sequence[Stmt]) -> list[Stmt]:
    """`block`, the combinations of columns over the threads of a block, with those over its cluster."""
    assert sum(isinstance(s, ColumnReduce) for s in block) == 1, "two exchanges would share a mailbox"
    made: list[Stmt] = []
    for s in block:
        if isinstance(s, ColumnReduce):
            places, at = [], exchanged([s])
            for t in s.totals:
                places.append(at)
                at += _columns_in_cluster(s, t)
            s = replace(s, cluster=tuple(places), mailbox=-(-at // MAILBOX_BYTES) * MAILBOX_BYTES)
        made.append(s)
    return made


def _columns_in_cluster(s: ColumnReduce, total: Total) -> int:
    """Bytes in which the blocks of a cluster exchange an accumulator of each column."""
    return total.bytes // (s.warps + 1) * CLUSTER_BLOCKS


def _room_in_cluster(total: Total) -> int:
    """Bytes in which the blocks of a cluster exchange one accumulator each (runtime/cluster.h)."""
    return -(-total.bytes // 32 // 4) * 4 * CLUSTER_BLOCKS


def exchanged(body: Sequence[Stmt]) -> int:
    """Bytes of shared memory in which threads meet."""
    ends = [0]
    for s in statements(body):
        if isinstance(s, BlockReduce) and not s.warp:
            ends += [(s.half if s.iteration else 0) + t.offset + t.bytes for t in s.totals]
        if isinstance(s, BlockScan):
            ends.append(s.offset + s.bytes * (2 if s.iteration else 1))
        if isinstance(s, ColumnReduce):
            ends += [t.offset + t.bytes for t in s.totals]
            ends += [s.mailbox + MAILBOX_BYTES] if s.cluster else []
        if isinstance(s, CooperativeReduce):
            ends += [at + -(-t.bytes // 512) * 16 for at, t in zip(s.shared, s.totals)]
        if isinstance(s, ClusterReduce):
            ends.append((s.half if s.iteration else 0) + s.mailbox + MAILBOX_BYTES)
    return max(ends)
