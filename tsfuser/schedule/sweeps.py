"""The sweeps of a segment over its data.

In: a Segment, and those of its reductions whose results all threads get. Out: `Sweeps`: what each sweep
accumulates and stores, and the ops that it needs. Example, softmax over rows: sweep 0 accumulates the
maximum, sweep 1 the sum of the exponentials, and sweep 2 stores. A segment without such reductions takes one
sweep.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ..ir.fusion import Axis, Op, Reduce, Value
from ..segment import Segment
from .loops import Schedule


@dataclass(frozen=True)
class Sweeps:
    """`allreduced`: the reductions whose results all threads get. They run over the axes of a *row*. `final`:
    the other reductions; nothing depends on them. `level`: for each value, the number of reductions over a
    row that must be done before it."""

    segment: Segment
    allreduced: tuple[Reduce, ...]
    level: dict[str, int]

    @cached_property
    def final(self) -> tuple[Reduce, ...]:
        return tuple(op for op in self.segment.reductions if op not in self.allreduced)

    @cached_property
    def row(self) -> frozenset[Axis]:
        """The axes of a row; none if the whole segment is one sweep."""
        return frozenset(self.allreduced[0].axes) if self.allreduced else frozenset()

    @cached_property
    def numbers(self) -> range:
        """The numbers of the sweeps. The last sweep may have nothing to do."""
        return range(max(self.level.values(), default=0) + 1)

    def varies(self, value: Value) -> bool:
        """Whether the value differs along a row."""
        return not self.allreduced or bool(set(value.axes) & self.row)

    def reductions(self, number: int) -> list[Reduce]:
        """The reductions that sweep `number` accumulates."""
        return [op for op in self.segment.reductions if self.level[op.operands[0].name] == number]

    def stores(self, number: int) -> list[str]:
        """Names of the results along a row that sweep `number` stores."""
        final = {op.output.name for op in self.final}
        values = [b.value for b in self.segment.stores if b.value.name not in final]
        return [v.name for v in values if self.varies(v) and self.level[v.name] == number]

    def goals(self, number: int) -> set[str]:
        """Names of the values that sweep `number` accumulates or stores."""
        accumulated = {v.name for op in self.reductions(number) for v in op.operands}
        stored = {*self.stores(number)}
        places = {v.name for b in self.segment.stores if b.value.name in stored for v in b.at}
        return accumulated | stored | places

    def ops_for(self, names: Collection[str], known: Collection[str] = frozenset()) -> list[Op]:
        """The ops along a row between loads, or values in `known`, and `names`, in order."""
        wanted = set(names)
        ops: list[Op] = []
        for op in reversed(self.segment.ops):
            needed = op.output.name in wanted and op.output.name not in known
            if needed and not isinstance(op, Reduce) and self.varies(op.output):
                ops.insert(0, op)
                wanted |= {v.name for v in op.operands}
        return ops

    def needs(self, number: int, known: Collection[str] = frozenset()) -> tuple[list[Op], set[str]]:
        """The ops of sweep `number`, in order, and the names of all values that they read, also those that
        are loaded or in `known`."""
        goals = self.goals(number)
        ops = self.ops_for(goals, known)
        return ops, goals | {v.name for op in ops for v in op.operands}

    def last_reads(self, saved: Collection[str]) -> dict[str, int]:
        """Name of a value that is loaded along a row -> the last sweep that loads it. `saved`: the values
        that the first sweep that computes them saves."""
        loaded = {b.value.name for b in self.segment.loads}
        found: dict[str, int] = {}
        known: set[str] = set()
        for number in self.numbers:
            ops, names = self.needs(number, known)
            found.update((name, number) for name in names & loaded)
            known.update(op.output.name for op in ops if op.output.name in saved)
        return found

    def row_ops(self, number: int) -> list[Op]:
        """The ops with one value per row that can be computed just before sweep `number`, and not earlier."""
        return [
            op
            for op in self.segment.ops
            if not isinstance(op, Reduce)
            and not self.varies(op.output)
            and self.level[op.output.name] == number
        ]


def sweeps_of(segment: Segment, schedule: Schedule) -> Sweeps:
    """The sweeps of `segment` under `schedule`. If its `allreduce` is set, all threads get the results of the
    reductions over the contiguous dim; or, if the threads along `y` combine, of those over other dims."""
    how, inner = schedule.reduction, set(schedule.domain.dims[-1].axes)
    allreduced: tuple[Reduce, ...] = ()
    if how is not None and how.allreduce:
        allreduced = tuple(op for op in segment.reductions if bool(set(op.axes) & inner) == (how.axis == "x"))
    level = {b.value.name: 0 for b in segment.loads}
    for op in segment.ops:
        before = max((level.get(v.name, 0) for v in op.operands), default=0)
        level[op.output.name] = before + (op in allreduced)
    return Sweeps(segment, allreduced, level)
