"""Schedules: named loops over a domain, and what each is bound to.

In: a Domain. Out: a `Schedule`, built by `split`, `fuse`, `reorder` and `bind`, each of which returns a new
one. A schedule never says what is computed. Example:

    s = Schedule.over(domain).split("i0", by=128, into=("block", "thread"))
    s = s.bind(block="block", thread="thread.x")
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Union

from ..ir import size as sz
from ..ir.code import code
from ..ir.size import Size
from .domain import Domain

#: block: grid; thread.*: threads of a block; rows: a loop of as many iterations for all threads of a block;
#: serial: a loop; unroll: unrolled, loads first; vector: one memory access of all lanes; simd: a loop that
#: the host compiler vectorises
BINDINGS = ("block", "thread.x", "thread.y", "rows", "serial", "unroll", "vector", "simd")


@dataclass(frozen=True)
class Loop:
    """`name` counts from 0 to `extent` - 1."""

    name: str
    extent: Size
    bind: str = "serial"


@dataclass(frozen=True)
class Split:
    """`parent = outer * by + inner`, or just `inner` where `outer` is empty. `exact`: `by` divides the
    parent's extent, so that no guard is needed. `whole`: the vector does, so that the lanes of one are all
    inside or all outside."""

    parent: str
    outer: str
    inner: str
    by: Size
    extent: Size
    exact: bool
    whole: bool = False


@dataclass(frozen=True)
class Fuse:
    """`into = outer * by + inner`, read backwards: `outer = into / by`, `inner = into % by`."""

    into: str
    outer: str
    inner: str
    by: Size


Relation = Union[Split, Fuse]


#: Where a value stays until its last use. register: with the thread that computed it; scratch: in memory of
#: the block's own, as long as a row, near its processor; tile: a load, in a square tile of shared memory (see
#: `transpose`); prefetched: a load, in shared memory, fetched while the threads work on the row before. Any
#: other value is loaded or computed again by each sweep over the data that needs it
PLACES = ("register", "scratch", "tile", "prefetched")


@dataclass(frozen=True)
class Placement:
    """The value called `value` stays in `where`, one of PLACES."""

    value: str
    where: str


@dataclass(frozen=True)
class Cooperative:
    """Blocks that share a row: loop `block_set` numbers the rows that are worked on at the same time, `part`
    the blocks of one. `slots`: the plan's allocation, zeroed, through which the blocks combine, -1 for those
    of a cluster; `words`: 4-byte words that a block stores there in an iteration, at most. `online_softmax`:
    names of a maximum m of x and of the sum of exp(x - m), which they combine at once, after the sum."""

    block_set: str
    part: str
    slots: int = -1
    words: int = 0
    online_softmax: tuple[tuple[str, str], ...] = ()


#: Who combines what threads have accumulated. warp: neighbours in a warp, without shared memory or barrier;
#: block: the threads of a block; cluster: neighbouring blocks, through each other's shared memory;
#: cooperative: blocks that run at the same time, which combine in memory; grid: each block leaves a partial
#: result in memory, and the next kernel combines these
SCOPES = ("warp", "block", "cluster", "cooperative", "grid")


@dataclass(frozen=True)
class Reduction:
    """`loops` are those that a thread accumulates over, outermost first; the threads along `axis` (`x` or
    `y`) of the block then combine. `scope`: one of SCOPES; it is that of the reductions along rows where
    others run over columns, whose scope is the grid. `partial`: the loop that numbers the splits and the
    elements between their results, None where the result is final. `allreduce`: all threads get the results,
    and walk over the data again for what follows from them. `warp`: how many threads a row has where they are
    neighbours in a warp, else 0. `side_by_side`: the loop over the results that a thread accumulates at the
    same time, rows or columns, if there are several. `in_double`: sums of floats are accumulated in double,
    since a thread adds up long chains. `cooperative`: where several blocks share a row; `columns`: of a
    block, where the threads along `y` combine and all of them get the results; `combines_partials`: it
    combines the partial results of the kernel before it; `leads`: the next kernel does so with its own, and
    may be set up while it runs."""

    loops: tuple[str, ...]
    axis: str
    scope: str = "block"
    partial: tuple[str, Size] | None = None
    allreduce: bool = False
    warp: int = 0
    side_by_side: str = ""
    in_double: bool = False
    cooperative: Cooperative | None = None
    columns: int = 0
    combines_partials: bool = False
    leads: bool = False


@dataclass(frozen=True)
class Schedule:
    """`loops` outermost first; `relations` in the order they were applied. `threads` is the largest block;
    `wide` asks for 64-bit indices. `placements` say what stays where; loads in tiles, of `tile_size` in both
    directions, have the row and column loops `tile`. `grain`: how many blocks make one task of the host's
    thread pool. `resident`: how many blocks registers must leave room for on a multiprocessor, 0 for any
    number."""

    domain: Domain
    loops: tuple[Loop, ...]
    relations: tuple[Relation, ...] = ()
    threads: int = 1
    wide: bool = False
    placements: tuple[Placement, ...] = ()
    tile: tuple[str, str] | None = None
    tile_size: int = 0
    grain: Size | int = 1
    resident: int = 0
    reduction: Reduction | None = None

    @staticmethod
    def over(domain: Domain, threads: int = 1, wide: bool = False) -> Schedule:
        return Schedule(domain, tuple(Loop(d.name, d.extent) for d in domain.dims), (), threads, wide)

    @property
    def is_vectorised(self) -> bool:
        """Whether a compiler makes vectors of its innermost loop; then a block has one thread."""
        return any(x.bind == "simd" for x in self.loops)

    @property
    def loops_of_a_thread(self) -> tuple[Loop, ...]:
        """The loops inside of a thread, outermost first, but for that over rows, which its block shares."""
        return tuple(x for x in self.loops if x.bind in ("serial", "unroll", "vector", "simd"))

    def values_in(self, where: str) -> tuple[str, ...]:
        """Names of the values that stay in `where`."""
        return tuple(p.value for p in self.placements if p.where == where)

    def with_values_in(self, where: str, names: Iterable[str]) -> Schedule:
        """`self`, with the values of `names` placed in `where`."""
        return replace(self, placements=(*self.placements, *(Placement(name, where) for name in names)))

    def loop(self, name: str) -> Loop:
        return next(x for x in self.loops if x.name == name)

    def split(
        self,
        name: str,
        by: Size | int,
        into: tuple[str, str],
        exact: bool = False,
        times: Size | int | None = None,
        whole: bool = False,
    ) -> Schedule:
        """Replaces loop `name` by an outer and an inner one of `by` iterations. `times` is the trip count of
        the outer one where the caller knows it better: more than enough, or exact by a decision."""
        by = sz.as_size(by)
        old = self.loop(name)
        outer = sz.quotient(old.extent, by) if exact else sz.ceildiv(old.extent, by)
        outer = outer if times is None else sz.as_size(times)
        assert outer is not None, f"{by} is no factor of {old.extent}"
        pair = (Loop(into[0], outer), Loop(into[1], by))
        relation = Split(name, *into, by, old.extent, exact, whole)
        return self._replaced((name,), pair, relation)

    def fuse(self, outer: str, inner: str, into: str) -> Schedule:
        """Replaces two neighbouring loops by one."""
        a, b = self.loop(outer), self.loop(inner)
        assert self.loops.index(b) == self.loops.index(a) + 1, f"{outer} and {inner} are not neighbours"
        return self._replaced(
            (outer, inner), (Loop(into, a.extent * b.extent),), Fuse(into, outer, inner, b.extent)
        )

    def fuse_all(self, names: list[str], into: str) -> Schedule:
        """Fuses neighbouring loops, left to right; a single one gets a new name only."""
        s = self
        if len(names) == 1:
            old = self.loop(names[0])
            return s._replaced(
                (old.name,),
                (replace(old, name=into),),
                Split(old.name, "", into, old.extent, old.extent, exact=True),
            )
        current = names[0]
        for k, name in enumerate(names[1:], 1):
            target = into if k == len(names) - 1 else f"{into}_{k}"
            s = s.fuse(current, name, target)
            current = target
        return s

    def reorder(self, *names: str) -> Schedule:
        """Puts the loops in the given order (all of them)."""
        assert sorted(names) == sorted(x.name for x in self.loops), names
        return replace(self, loops=tuple(self.loop(n) for n in names))

    def bind(self, **what: str) -> Schedule:
        """`bind(row="block")`: what each loop becomes; dots are written as underscores (`thread_x`)."""
        bound = {name: value.replace("_", ".") for name, value in what.items()}
        assert all(v in BINDINGS for v in bound.values()), what
        return replace(self, loops=tuple(replace(x, bind=bound.get(x.name, x.bind)) for x in self.loops))

    def with_single(self, name: str) -> Schedule:
        """With an outermost loop `name` that runs once."""
        return replace(self, loops=(Loop(name, sz.const(1)), *self.loops))

    def _replaced(self, names: tuple[str, ...], loops: tuple[Loop, ...], relation: Relation) -> Schedule:
        at = self.loops.index(self.loop(names[0]))
        new = self.loops[:at] + loops + self.loops[at + len(names) :]
        return replace(self, loops=new, relations=self.relations + (relation,))

    def __str__(self) -> str:
        """Code that builds the schedule; `verify.read` runs it."""
        return code(self)
