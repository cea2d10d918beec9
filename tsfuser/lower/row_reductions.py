"""Reductions whose results all threads of a row get.

In: a draft, and the reductions that a sweep accumulates. Out: their accumulators and the combination over the
threads of the row, or over its cooperative blocks; the values that the next sweeps know of the row; the
stores of values that a row has one of. Example, of softmax's maximum:

    amax_2_total[4] := -infinity
    for u, lane: amax_2_total[lane] := maximum(amax_2_total[lane], mul_1)
    amax_2_total := Largest over threads x
    amax_2 = amax_2_total
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ir.fusion import Reduce
from . import block_moments, cooperative
from . import index as ix
from .accumulate import Accumulation, Chains, accumulation
from .combine import COMBINATIONS, accumulator, total_of, totals
from .draft import Draft
from .exchange import columns_over_cluster, combined, exchanged
from .index import Expr, Var
from .indices import indices
from .loop_ir import Compute, If, Stmt
from .traverse import read_by


def reduced(draft: Draft, number: int, ops: Sequence[Reduce], known: Collection[str]) -> list[Accumulation]:
    """Before, in and after the loops of sweep `number`, which accumulates `ops`: of one pass over the row, or
    two. `known`: values that need not be computed again. `draft` gets to know the results."""
    if not ops:
        return [Accumulation([], [], [])]
    if block_moments.applies(draft, number, ops, known):
        passes = block_moments.passes(draft, ops)
        draft.row_values += [s for op in ops for s in _result(draft, number, op, total_of(op, ops))]
        return passes
    after = _combined(draft, number, ops)
    whole = Accumulation([], [], [])
    for name, op in totals(ops).items():
        made = accumulation(
            name,
            op,
            draft.elements.registers,
            accumulator(op, draft.how.in_double),
            _chains(draft),
            draft.row_guard,
            masked=not draft.schedule.is_vectorised,
        )
        whole.before.extend(made.before)
        whole.body.extend(made.body)
        whole.after.extend(made.after)
    for op in ops:
        draft.row_values += _result(draft, number, op, total_of(op, ops))
    whole.after.extend(after)
    return [whole]


def _chains(draft: Draft) -> Chains:
    """One for each lane of each row that a thread has."""
    lanes, lane = draft.lane.extent.a, Var(draft.lane.name)
    if draft.row_loop in ("", draft.lane.name):
        return Chains(lanes, lane)
    return Chains(lanes * draft.rows, ix.add(ix.mul(Var(draft.row_loop), lanes), lane), apart=True)


def _combined(draft: Draft, number: int, ops: Sequence[Reduce]) -> list[Stmt]:
    """The combination over the threads of a row, and over its blocks."""
    threads, rows = draft.schedule.threads, draft.rows
    made = combined(ops, draft.how, threads, rows, rows, draft.exchanged, draft.across)
    if draft.cooperative and draft.how.columns:
        made = columns_over_cluster(made)
    elif draft.cooperative:
        made += cooperative.combined(draft, number, made)
    draft.exchanged = max(draft.exchanged, exchanged(made))
    return made


def _result(draft: Draft, number: int, op: Reduce, total: str) -> list[Stmt]:
    """What threads know from accumulator `total`: the result of `op`."""
    register = op.output.dtype.register.ctype
    symbol = COMBINATIONS[op.combine].result(accumulator(op, draft.how.in_double).ctype, register)
    at = draft.row_loop or "0"
    if number - 1 in draft.online_softmax:
        return cooperative.results(draft, number, op, symbol)
    name = draft.parts(number).get(op.output.name, op.output.name)
    return [Compute(name, register, symbol, (total,), (total,), at)]


def row_values(draft: Draft, number: int) -> list[Stmt]:
    """Loads (before the first sweep) and ops with one value per row that can be computed before sweep
    `number`."""
    found: list[Stmt] = []
    if number == 0:
        for b in draft.segment.loads:
            if not draft.sweeps.varies(b.value):
                found += draft.loads[b.value.name]
    for op in draft.sweeps.row_ops(number):
        found += draft.computed[op.output.name]
    # a loop over rows begins with the known values of its row, and with its index
    return found if draft.row_loop else [*draft.at.lets_for(found), *found]


def stores(draft: Draft) -> list[Stmt]:
    """Stores of results with one element per row, by the first thread of the row."""
    found = [a for a in draft.schedule.domain.stores if not draft.sweeps.varies(a.buffer.value)]
    if not found:
        return []
    gone = {x.name: ix.Const(0) for x in draft.loops if x.name != draft.row_loop}
    done = indices(draft.schedule, draft.params, gone, "_out")
    firsts: list[Expr] = [Var(draft.bound(f"thread.{draft.how.axis}").name)]
    if draft.cooperative:
        firsts.append(done.of[draft.cooperative.part])
    first = ix.both([ix.less(x, 1) for x in firsts])
    made = [draft.elements.store(access, done, draft.row_dims) for access in found]
    body = [*read_by(made, draft.row_values), *done.lets_for(made), *made]
    if draft.row_loop:
        lets = draft.at.lets_for(body)
        body = draft.looped([*lets, *body], [x for x in draft.loops if x.name == draft.row_loop])
    return [*done.lets_of(ix.names(first)), If(first, tuple(body), ())]
