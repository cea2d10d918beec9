"""Schedules: named loops over a domain, and what each is bound to.

In: a Domain. Out: a `Schedule`. `split`, `fuse`, `reorder` and `bind` build it; each returns a new one. A
schedule says how a segment is computed, never what. Example:

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

#: What a loop may be bound to.
#:   block               blocks of the grid
#:   thread.x, thread.y  threads of a block
#:   rows                a loop with the same number of iterations for all threads of a block
#:   serial              any other loop
#:   unroll              unrolled, with all loads before the rest
#:   vector              one memory access for all lanes
#:   group               around a vector loop: neighbouring vectors that are one memory access together
#:   simd                a loop that the host compiler vectorises
BINDINGS = ("block", "thread.x", "thread.y", "rows", "serial", "unroll", "group", "vector", "simd")


@dataclass(frozen=True)
class Loop:
    """The loop variable `name` counts from 0 to `extent` - 1."""

    name: str
    extent: Size
    bind: str = "serial"


@dataclass(frozen=True)
class Split:
    """`parent = outer * by + inner`, or `parent = inner` if `outer` is empty. `exact`: `by` divides the
    parent's extent, so no bound is checked. `whole`: the vector width divides it, so the lanes of a vector
    are all inside or all outside."""

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


#: Where a value stays until its last use. Any other value is loaded or computed again by each sweep that
#: needs it.
#:   register    in registers of the thread that computed it
#:   scratch     in a buffer of the block with room for one row: shared memory, or the host's cache
#:   tile        a load, in a tile of shared memory (see `tiles`)
#:   store_tile  a result, in a tile of shared memory, from which the threads store it along another dim
#:   prefetched  a load, in shared memory, fetched while the threads work on the previous row
#:   held        a load, fetched in the same way, which the thread moves to registers before it begins its row
#:   kept        a load that all rows share, in shared memory from the first row to the last
PLACES = ("register", "scratch", "tile", "store_tile", "prefetched", "held", "kept")


@dataclass(frozen=True)
class Placement:
    """The value with the name `value` stays in `where`, one of PLACES."""

    value: str
    where: str


@dataclass(frozen=True)
class Tiling:
    """Tiles of shared memory over the loops `row` and `col`. `lanes`: elements of an access that fills a
    tile, or that stores what is in it."""

    row: str
    col: str
    rows: int
    columns: int
    lanes: int = 1


@dataclass(frozen=True)
class Cooperative:
    """How several blocks share a row."""

    block_set: str  # the loop over rows that are worked on at the same time
    part: str  # the loop over the blocks of one row
    slots: int = -1  # number of the zeroed allocation in which blocks combine; -1 for the blocks of a cluster
    words: int = 0  # 4-byte words that a block stores there in an iteration, at most
    #: names of a maximum m of x and of the sum of exp(x - m), which blocks combine together, after the sum
    online_softmax: tuple[tuple[str, str], ...] = ()


#: Who combines what threads have accumulated.
#:   warp         neighbours in a warp, without shared memory or barrier
#:   block        the threads of a block
#:   cluster      neighbouring blocks, through each other's shared memory
#:   cooperative  blocks that run at the same time, through global memory
#:   grid         all blocks: each stores a partial result in memory, and the next kernel combines these
SCOPES = ("warp", "block", "cluster", "cooperative", "grid")


@dataclass(frozen=True)
class Reduction:
    """How the reductions of a kernel are computed. A thread accumulates over `loops`; then the threads of the
    block along `axis` combine."""

    loops: tuple[str, ...]  # outermost first
    axis: str  # "x" or "y"
    #: one of SCOPES. If some reductions run along rows and others over columns, it is the scope of the
    #: rows; the scope of the columns is the grid
    scope: str = "block"
    #: (the loop over splits, elements between the results of two splits); None if the result is final
    partial: tuple[str, Size] | None = None
    allreduce: bool = False  # all threads get the results, and sweep over the data again
    warp: int = 0  # threads of a row, if they are neighbours in a warp; else 0
    side_by_side: str = ""  # the loop over the rows or columns that a thread accumulates at the same time
    in_double: bool = False  # sums of floats are accumulated in double, because a thread adds many terms
    cooperative: Cooperative | None = None  # if several blocks share a row
    columns: int = 0  # of a block, if the threads along y combine and all of them get the results
    combines_partials: bool = False  # it combines the partial results of the kernel before it
    leads: bool = False  # the next kernel combines its partial results, and may be set up while it runs
    apart: bool = False  # the rows of a block have columns of their own, which its threads do not combine


@dataclass(frozen=True)
class Scanning:
    """How the scans of a kernel go along dim `dim`: over the `loops` of a thread, outermost first, and
    over the threads along `axis`, which pass on what they have: `x`, where lanes are among the loops, or
    `y`."""

    dim: str
    loops: tuple[str, ...]
    backwards: bool = False
    axis: str = ""


@dataclass(frozen=True)
class Schedule:
    """Loops over a domain, and where values stay."""

    domain: Domain
    loops: tuple[Loop, ...]  # outermost first
    relations: tuple[Relation, ...] = ()  # in the order in which they were applied
    threads: int = 1  # of a block, at most
    wide: bool = False  # 64-bit indices
    placements: tuple[Placement, ...] = ()  # which values stay where
    tile: Tiling | None = None  # of loads in tiles
    grain: Size | int = 1  # blocks that make one task of the host's thread pool
    resident: int = 0  # blocks for which a multiprocessor must have enough registers; 0: any number
    reduction: Reduction | None = None
    scanning: Scanning | None = None

    @staticmethod
    def over(domain: Domain, threads: int = 1, wide: bool = False) -> Schedule:
        return Schedule(domain, tuple(Loop(d.name, d.extent) for d in domain.dims), (), threads, wide)

    @property
    def is_vectorised(self) -> bool:
        """Whether a compiler makes vectors of its innermost loop; then a block has one thread."""
        return any(x.bind == "simd" for x in self.loops)

    @property
    def loops_of_a_thread(self) -> tuple[Loop, ...]:
        """The loops inside a thread, outermost first, without a loop over rows, which all threads share."""
        return tuple(x for x in self.loops if x.bind in ("serial", "unroll", "group", "vector", "simd"))

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
        """Replaces loop `name` by an outer loop and an inner one of `by` iterations. `times` is the extent of
        the outer loop, if it is not the quotient rounded up: a larger one, or one that a decision makes
        exact."""
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
        """Fuses neighbouring loops, from left to right. A single loop only gets the new name."""
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
        """Puts the loops in the given order, which has to name all of them."""
        assert sorted(names) == sorted(x.name for x in self.loops), names
        return replace(self, loops=tuple(self.loop(n) for n in names))

    def bind(self, **what: str) -> Schedule:
        """Binds loops by name: `bind(row="block")`. Dots are written as underscores (`thread_x`)."""
        bound = {name: value.replace("_", ".") for name, value in what.items()}
        assert all(v in BINDINGS for v in bound.values()), what
        return replace(self, loops=tuple(replace(x, bind=bound.get(x.name, x.bind)) for x in self.loops))

    def with_single(self, name: str) -> Schedule:
        """`self`, with a new outermost loop `name` that runs once."""
        return replace(self, loops=(Loop(name, sz.const(1)), *self.loops))

    def _replaced(self, names: tuple[str, ...], loops: tuple[Loop, ...], relation: Relation) -> Schedule:
        at = self.loops.index(self.loop(names[0]))
        new = self.loops[:at] + loops + self.loops[at + len(names) :]
        return replace(self, loops=new, relations=self.relations + (relation,))

    def __str__(self) -> str:
        """Code that builds the schedule; `verify.read` runs it."""
        return code(self)
