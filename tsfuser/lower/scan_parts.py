"""Scans along threads, which pass on what they have.

In: the statements of a sweep, some of them scans. Out: its loops, cut in parts at each scan. In between,
the threads combine what they have put into an array; a host has one thread, which goes over it. Example,
of `exp(cumsum(x))`:

    cumsum_1_carry[1] := 0.0f
    for r:
      for u, lane: { x0 = ...; cumsum_1_scan[u][lane] = x0 }
      cumsum_1_scan := Sum up to each element, from cumsum_1_carry on
      for u, lane: { cumsum_1 = cumsum_1_scan[u][lane]; exp_2 = exp(cumsum_1); store }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir import size as sz
from ..ir.fusion import Scan
from ..ir.symbols import find
from ..schedule.loops import Loop
from . import index as ix
from .combine import COMBINATIONS
from .draft import Draft
from .index import Expr, Var
from .loop_ir import (
    Accumulate,
    Accumulator,
    Array,
    BlockScan,
    Compute,
    For,
    Let,
    Place,
    SetLane,
    Stmt,
    Uniform,
)
from .scans import accumulator, symbol_of
from .traverse import defined, once, rewrite_indices, used

COSTLY = 8  # instructions of an element: with more it is kept from one part of a sweep to the next


def looped(draft: Draft, number: int, statements: Sequence[Stmt]) -> tuple[list[Stmt], list[Stmt]]:
    """The running values of the scans among the `statements` of sweep `number`, as they begin, and its
    loops, cut in parts at the scans along threads."""
    known = {defined(s) for s in draft.inlined} & {op.output.name for op in draft.segment.scans}
    statements = [s for s in statements if defined(s) not in known]
    computed = {defined(s) for s in statements}
    # what an earlier sweep has saved is read, and has no term
    ops = {op.output.name: op for op in draft.segment.scans if f"{op.output.name}_term" in computed}
    axis = draft.schedule.scanning.axis if ops else ""
    suffix = f"_{number + 1}" if number and axis else ""
    before: list[Stmt] = []
    for name, op in ops.items():
        wide, lanes = accumulator(op, draft.schedule), 1 if axis == "x" else draft.lane.extent.a
        identity = COMBINATIONS[op.combine].start(wide)
        before.append(Accumulator(f"{name}_carry{suffix}", wide.ctype, lanes, identity))
    if not axis:
        return before, draft.looped(list(statements), draft.loops)
    rounds = _rounds(draft)
    inner = [x for x in draft.loops if x is not rounds]
    body = _Parts(draft, ops, suffix, inner, statements).looped()
    if rounds is not None:
        extent = draft.params.size(rounds.extent, f"{rounds.name}_size")
        bind = rounds.bind if draft.schedule.is_vectorised else "rows"  # there are barriers in it
        body = [For(rounds.name, extent, bind, tuple(body))]
    return before, body


def _rounds(draft: Draft) -> Loop | None:
    """The loop over the rounds of a row that registers do not hold."""
    return next((x for x in draft.loops if x.bind == "serial" and x.extent is not sz.const(1)), None)


@dataclass
class _Part:
    """The statements of a part, and the scans at its end."""

    body: list[Stmt] = field(default_factory=list)
    scans: list[str] = field(default_factory=list)


class _Parts:
    """The statements of a sweep in the parts before, between and behind its scans."""

    def __init__(
        self,
        draft: Draft,
        ops: Mapping[str, Scan],
        suffix: str,
        inner: Sequence[Loop],
        statements: Sequence[Stmt],
    ):
        """`suffix`: of names, which an earlier sweep may have used."""
        self.draft, self.ops, self.inner, self.scanning = draft, ops, inner, draft.schedule.scanning
        self.suffix = suffix
        self.by_one = draft.schedule.is_vectorised
        unrolled = next((x for x in inner if x.bind == "unroll" and x.extent.a > 1), None)
        self.at = unrolled.name if unrolled else "0"
        self.vectors: int = unrolled.extent.a if unrolled else 1
        # then no loop is made, and what a part has computed the next ones can read
        self.is_flat = all(x.extent is sz.const(1) and x.bind != "simd" for x in inner)
        self.parts: dict[int, _Part] = {}
        self.number: dict[str, int] = {}  # by the name of a value, the part that it is computed in
        self.made: dict[str, Any] = {}
        for s in statements:
            self._put(s)

    def _put(self, s: Stmt) -> None:
        number = max((self.number.get(name, 0) for name in used(s)), default=0)
        if isinstance(s, Compute) and s.name in self.ops:
            number = self.number[f"{s.name}_term"]
            self._part(number).scans.append(s.name)
            self._part(number).body += self._terms(s.name)
            array = f"{s.name}_scan{self.suffix}[{self.at}]"
            s = replace(s, operands=(array,), vectors=(array,), lane=self._lane)
            number += 1
        if (name := defined(s)) is not None:
            self.number[name], self.made[name] = number, s
        self._part(number).body.append(s)

    def _part(self, number: int) -> _Part:
        return self.parts.setdefault(number, _Part())

    def looped(self) -> list[Stmt]:
        """The loops over the parts, and the scans between them."""
        kept = self._kept()
        result: list[Stmt] = []
        for number, part in sorted(self.parts.items()):
            body = [*self._known(number, kept), *part.body]
            saved = [name for name in kept if self.number[name] == number]
            body += [SetLane(f"{name}_past{self.suffix}[{self.at}]", self._lane, name) for name in saved]
            result += [self._array(f"{name}_past{self.suffix}", self.made[name].ctype) for name in saved]
            result += [
                self._array(f"{name}_scan{self.suffix}", self._term(name).ctype) for name in part.scans
            ]
            result += self._looped(once(body))
            for name in part.scans:
                result += self._scanned(name)
        return result

    def _looped(self, body: Sequence[Stmt]) -> list[Stmt]:
        if self.is_flat:
            only = [rewrite_indices(s, {x.name: ix.Const(0) for x in self.inner}) for s in body]
            fresh = [s for s in only if not (defined(s) and s in self.draft.inlined)]
            self.draft.inlined += fresh
            return fresh
        return self.draft.looped(list(body), self.inner)

    def _term(self, name: str) -> Compute:
        return self.made[f"{name}_term"]

    @property
    def _lane(self) -> Expr:
        """The lane, where there are several."""
        return Var(self.draft.lane.name) if self.draft.lane.extent.a > 1 else ix.Const(0)

    def _array(self, name: str, ctype: str) -> Array:
        return Array(name, f"vec<{ctype}, {self.draft.lane.extent.a}>", 1, self.vectors)

    def _terms(self, name: str) -> list[Stmt]:
        """The term of an element into the array of scan `name`; the identity where there is none and others
        follow."""
        op, term = self.ops[name], f"{name}_term"
        guard = self.draft.guard_of({self.scanning.dim})
        if guard is None or self.by_one or not self.scanning.backwards:
            return [SetLane(f"{name}_scan{self.suffix}[{self.at}]", self._lane, term)]
        wide = accumulator(op, self.draft.schedule)
        inside, chosen = f"{name}_in", f"{name}_own"
        given = (*(f"{{{k}}}" for k in range(2)), COMBINATIONS[op.combine].start(wide))
        return [
            Let(inside, "bool", guard),
            Compute(chosen, wide.ctype, "or_else", (inside, term), arguments=given),
            SetLane(f"{name}_scan{self.suffix}[{self.at}]", self._lane, chosen),
        ]

    def _scanned(self, name: str) -> list[Stmt]:
        """The scan itself, of what its array holds: by one thread of the host, or by those of a row."""
        if not self.by_one:
            return [self._exchange(name)]
        carry, place = f"{name}_carry{self.suffix}", f"{name}_scan{self.suffix}[0]"
        lane: Expr = self._lane
        guard = self.draft.guard_of({self.scanning.dim})
        if self.scanning.backwards:
            lane = ix.sub(self.draft.lane.extent.a - 1, Var(self.draft.lane.name))
            guard = ix.substitute(guard, {self.draft.lane.name: lane})
        read = Compute(f"{name}_next", self._term(name).ctype, "copy", (place,), (place,), lane)
        add = Accumulate(carry, ix.Const(0), symbol_of(self.ops[name]), read.name, guard)
        lets = self.draft.at.lets_for([add])
        made: list[Stmt] = [*lets, read, add, SetLane(place, lane, f"{carry}[0]")]
        rest = [x for x in self.inner if x.name != self.draft.lane.name]
        return self.draft.looped(made, [*rest, replace(self.draft.lane, bind="serial")])

    def _exchange(self, name: str) -> BlockScan:
        """The threads of a row pass on what they have in the array of scan `name`."""
        draft, op, rounds = self.draft, self.ops[name], _rounds(self.draft)
        wide, across = accumulator(op, draft.schedule), 0
        if self.scanning.axis == "y":
            warp, across = 0, draft.bound("thread.x").extent.a
            size = draft.schedule.threads // 32 * across * draft.lane.extent.a * wide.itemsize
        else:
            warp, across = draft.how.warp if draft.how.scope == "warp" else 0, draft.across
            size = 0 if warp else 32 * wide.itemsize * self.vectors
        start = -(-draft.exchanged // 16) * 16
        draft.exchanged = start + size * (2 if rounds else 1)
        functor, iteration = COMBINATIONS[op.combine].functor, rounds.name if rounds and size else ""
        return BlockScan(
            f"{name}_scan{self.suffix}",
            f"{name}_carry{self.suffix}",
            functor,
            self.scanning.axis,
            self.scanning.backwards,
            warp,
            across,
            start,
            size,
            iteration,
        )

    def _needed(self, number: int, kept: Mapping[str, None]) -> list[str]:
        """The names of what part `number` reads of earlier ones, in their order."""
        if self.is_flat:
            return []
        own = {defined(s) for s in self.parts[number].body}
        wanted = {n for s in self.parts[number].body for n in used(s) if n in self.made and n not in own}
        for name in reversed(list(self.made)):
            if name in wanted and name not in kept:
                wanted |= {n for n in used(self.made[name]) if n in self.made and n not in own}
        return [name for name in self.made if name in wanted]

    def _known(self, number: int, kept: Mapping[str, None]) -> list[Stmt]:
        """What part `number` reads of earlier ones: computed once more, or read where it is kept."""
        found: list[Stmt] = []
        for name in self._needed(number, kept):
            s = self.made[name]
            if name in kept:
                place = f"{name}_past{self.suffix}[{self.at}]"
                s = Compute(name, s.ctype, "copy", (place,), (place,), self._lane)
            found.append(s)
        return found

    def _kept(self) -> dict[str, None]:
        """The names of costly values that a later part reads."""
        kept: dict[str, None] = {}
        for number in sorted(self.parts):
            kept |= dict.fromkeys(n for n in self._needed(number, kept) if self._is_costly(self.made[n]))
        return kept

    def _is_costly(self, s: Stmt) -> bool:
        if not isinstance(s, Compute) or s.name in self.ops:
            return False
        drawn = [self.made.get(n) for n in s.operands]
        return find(s.symbol).cost >= COSTLY or any(isinstance(x, (Uniform, Place)) for x in drawn)
