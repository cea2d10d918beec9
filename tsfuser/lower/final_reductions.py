"""Reductions on which nothing else of their kernel depends: threads combine at its end, and the first ones
store.

In: a draft. Out: the accumulators of a thread, its combination with the others, and the stores of the
results, or of a part of them for the next kernel to combine. These are all reductions of a segment that takes
one sweep; beside reductions along rows, those over columns, which a thread accumulates over all of its rows.
Example:

    sum_2_total[4] := 0.0f
    for r: for u: for lane: sum_2_total[lane] := add(sum_2_total[lane], mul_1)
    sum_2_total := Sum over threads x
    sum_2 = sum_2_total; args.sum_2_out[i0] = sum_2 if tx < 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..ir import size as sz
from ..ir.fusion import Reduce
from ..schedule.loops import Loop
from . import index as ix
from .accumulate import Accumulation, Chains, accumulation
from .combine import COMBINATIONS, accumulator, total_of, totals
from .draft import Draft, numbered
from .exchange import combined
from .index import Var
from .indices import Indices, indices
from .loop_ir import Compute, Stmt

ENOUGH_CHAINS = 8  # of a thread: more cost registers, and gain nothing


class FinalReductions:
    """`ops`: the reductions. A thread has one result for each iteration of the `loops`, and accumulates over
    the others."""

    def __init__(self, draft: Draft):
        self.draft, self.how, self.ops = draft, draft.how, draft.sweeps.final
        if not self.ops:
            self.accumulations: dict[Reduce, Accumulation] = {}
            return
        self.over_columns = bool(draft.sweeps.allreduced)  # and over all rows of the thread
        accumulated = (draft.row_loop,) if self.over_columns else self.how.loops
        self.loops = [x for x in draft.loops if x.name not in accumulated]
        self.axis = "y" if self.over_columns else self.how.axis
        self.dims = draft.dims_of(self.ops[0].axes)
        self.accumulations = {op: self._accumulation(name, op) for name, op in totals(self.ops).items()}

    @property
    def before(self) -> list[Stmt]:
        """The accumulators."""
        return [s for made in self.accumulations.values() for s in made.before]

    def body(self, reductions: Sequence[Reduce]) -> list[Stmt]:
        """Adds the terms of `reductions`, those of them that are final."""
        return [s for op, made in self.accumulations.items() if op in reductions for s in made.body]

    def results(self) -> list[Stmt]:
        """The combination over the block, and the stores of the results."""
        if not self.ops:
            return []
        draft = self.draft
        ends = {x.name for x in draft.loops if x not in self.loops}
        ends |= {x.name for x in draft.schedule.loops if x.bind == "rows"}
        if self.over_columns and not self.how.apart:
            ends |= {x.name for x in draft.schedule.loops if x.bind == "thread.y"}
        done = indices(draft.schedule, draft.params, {x: ix.Const(0) for x in ends}, "_out")
        stores = [s for op in self.ops for s in self._result(op, done)]
        packs = [s for made in self.accumulations.values() for s in made.after]
        met = self._combined()
        return [*packs, *met, *draft.looped([*done.lets_for(stores), *stores], self.loops)]

    def _accumulation(self, name: str, op: Reduce) -> Accumulation:
        wide = accumulator(op, self.how.in_double)
        guard, registers = self.draft.guard_of(self.dims), self.draft.elements.registers
        return accumulation(name, op, registers, wide, self._chains(op), guard)

    def _chains(self, op: Reduce) -> Chains:
        """One for each result, lane and, where there are few results, unrolled iteration: short chains round
        less, and several of them do not wait for each other. Moments share what a chain costs and round
        little: they have one for each lane."""
        results = Chains(self._results(), numbered(self.loops))
        if self.over_columns:
            return results
        lane, unrolled = self.draft.lane, self._unrolled()
        moments = bool(COMBINATIONS[op.combine].part)
        if moments and lane.extent.a == 1 and unrolled is not None:
            return Chains(unrolled.extent.a, Var(unrolled.name), apart=True)
        if moments or not self.loops or unrolled is None:
            return Chains(lane.extent.a, Var(lane.name))
        if results.count >= ENOUGH_CHAINS:
            return results
        # what becomes one result lies side by side
        depth = unrolled.extent.a
        return Chains(results.count * depth, ix.add(ix.mul(results.at, depth), Var(unrolled.name)))

    def _results(self) -> int:
        """Results of a thread."""
        return math.prod(loop.extent.a for loop in self.loops)

    def _unrolled(self) -> Loop | None:
        """The unrolled loop that a thread accumulates over."""
        return next((x for x in self.draft.loops if x.bind == "unroll" and x.name in self.how.loops), None)

    def _combined(self) -> list[Stmt]:
        how = replace(self.how, axis=self.axis, scope="block")
        threads, results = self.draft.schedule.threads, self._results()
        if self.over_columns:
            alone = self.how.apart or self.draft.bound("thread.y").extent == sz.const(1)
            return [] if alone else combined(self.ops, how, threads, results, 0, 2 * self.draft.exchanged)
        lane, unrolled = self.draft.lane, self._unrolled()
        deep = unrolled is not None and (unrolled.extent.a > 1 or lane.extent.a == 1)
        return combined(self.ops, how, threads, results, results if deep or not self.loops else 0)

    def _result(self, op: Reduce, done: Indices) -> list[Stmt]:
        """Its value, and the store, by the first thread along the axis."""
        draft, name = self.draft, total_of(op, self.ops)
        register = op.output.dtype.register.ctype
        symbol = COMBINATIONS[op.combine].result(accumulator(op, self.how.in_double).ctype, register)
        write = draft.elements.store(draft.store_of(op.output.name), done, self.dims)
        if self.how.partial is not None:
            loop, distance = self.how.partial
            start = ix.mul(done.of[loop], draft.params.size(distance, "part_stride"))
            write = replace(write, offset=ix.add(start, write.offset))
        if not self.how.apart:
            first = ix.less(Var(draft.bound(f"thread.{self.axis}").name), 1)
            write = replace(write, guard=ix.both([first, *([write.guard] if write.guard else [])]))
        return [Compute(op.output.name, register, symbol, (name,), (name,), numbered(self.loops)), write]
