"""Blocks that share a row, and combine in memory, or as a cluster in each other's shared memory.

In: a draft whose blocks share rows, and what the threads of each block have combined. Out: the
combination over the blocks; for a maximum and a sum of exponentials one combination after the sum, of
(maximum, sum). Example, of softmax:

    sum_5_online_softmax[1] := online_softmax_of<float>(amax_2_total[0], sum_5_total[0])
    sum_5_online_softmax := OnlineSoftmax over blocks at slots
    amax_2 = largest_of(sum_5_online_softmax); sum_5 = sum_of(sum_5_online_softmax)
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.fusion import Reduce
from ..ir.size import Size
from ..schedule.loops import Fuse
from .draft import Draft
from .exchange import SLOTS, combined_over_blocks, combined_over_cluster, exchanged
from .index import Var
from .loop_ir import (
    Accumulator,
    AwaitCluster,
    BlockReduce,
    ClusterReduce,
    ColumnReduce,
    Compute,
    CooperativeSlots,
    Stmt,
    Total,
)  # fmt: skip
from .traverse import statements


def combined(draft: Draft, number: int, of_block: Sequence[Stmt]) -> list[Stmt]:
    """What follows `of_block`, the combination over the threads of a block after sweep `number`."""
    if number in draft.online_softmax:
        return []
    pair = draft.online_softmax.get(number - 1)
    made = [_accumulator(*pair)] if pair else []
    totals = (
        [_total(pair[1])] if pair else [t for s in of_block if isinstance(s, BlockReduce) for t in s.totals]
    )
    return [*made, *of_all_blocks(draft, totals, exchanged(of_block))]


def of_all_blocks(draft: Draft, totals: Sequence[Total], at: int) -> list[Stmt]:
    """The combination over the blocks of a row of `totals`, which each of them has. Shared memory before byte
    `at` is in use."""
    threads = draft.schedule.threads
    if draft.how.scope == "cluster":
        return combined_over_cluster(totals, max(at, draft.exchanged), threads)
    met, draft.words = combined_over_blocks(totals, at, draft.words, threads)
    return met


def results(draft: Draft, number: int, op: Reduce, symbol: str) -> list[Stmt]:
    """The maximum and the sum `op`, which sweep `number` has accumulated; `symbol` would convert the sum."""
    largest, _ = draft.online_softmax[number - 1]
    name, row = _name(op), draft.row_loop or "0"
    registers = draft.elements.registers
    of_sum = {"copy": "sum_of", "convert": "sum_of_converted"}[symbol]
    return [
        Compute(largest.output.name, registers[largest.output.name], "largest_of", (name,), (name,), "0"),
        Compute(op.output.name, op.output.dtype.register.ctype, of_sum, (name,), (name,), row),
    ]


def with_slots(draft: Draft, body: list[Stmt]) -> list[Stmt]:
    """`body`, after the slots in which the blocks of a row combine in this iteration, and what says which."""
    how = draft.cooperative
    made = CooperativeSlots(
        SLOTS,
        draft.params.field(SLOTS, "uint64_t*", ("cleared", how.slots)),
        draft.at.of[how.block_set],
        draft.params.size(parts(draft), "parts"),
        draft.at.of[how.part],
        Var(draft.iteration.name),
        how.words,
    )
    first: list[Stmt] = [*draft.at.lets_for([made]), made]
    return [*first, *(s for s in body if s not in first)]


def parts(draft: Draft) -> Size:
    """Blocks that share a row."""
    return next(
        r.by for r in draft.schedule.relations if isinstance(r, Fuse) and r.inner == draft.cooperative.part
    )


def with_cluster(body: list[Stmt]) -> list[Stmt]:
    """`body`, in which nobody writes to other blocks before they have begun."""
    writes = lambda s: isinstance(s, ClusterReduce) or (isinstance(s, ColumnReduce) and s.cluster)
    at = next(k for k, s in enumerate(body) if any(map(writes, statements((s,)))))
    return [*body[:at], AwaitCluster(), *body[at:]]


def _name(summed: Reduce) -> str:
    return f"{summed.output.name}_online_softmax"


def _accumulator(largest: Reduce, summed: Reduce) -> Accumulator:
    """What a block makes of its largest x and its sum of exp(x - largest)."""
    ctype = summed.output.dtype.register.ctype
    parts = f"{largest.output.name}_total[0], {summed.output.name}_total[0]"
    return Accumulator(_name(summed), f"online_softmax<{ctype}>", 1, f"online_softmax_of<{ctype}>({parts})")


def _total(summed: Reduce) -> Total:
    """What blocks exchange of it."""
    number = summed.output.dtype.register
    identity = f"online_softmax_of<{number.ctype}>(-infinity<{number.ctype}>(), 0)"
    return Total(_name(summed), "OnlineSoftmax", identity, 0, 32 * 2 * number.itemsize)
