"""Loop IR: the statements of one kernel, target-independent, a step before C++.

In: built by `nest`, rewritten by the passes. Out: `Kernel`, which `codegen.emit` prints as C++; `str(kernel)` is indented pseudo-C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Union

from ..ir.size import Size
from .index import Expr, as_expr, names, substitute


@dataclass(frozen=True)
class Param:
    """A field of the kernel's argument struct. `source` tells the plan how to fill it: `("input", i)`, `("update", i)` (an argument that is stored
    to), `("allocation", k)`, `("cleared", k)` (an allocation that is zero when the kernel starts), `("size", Size)`, `("number", i, dtype name)`, `("element", i)`, `("random",)`, `("flag",)` (what a kernel on the host
    sets where it finds an index out of range)."""

    name: str
    ctype: str
    source: tuple

    @property
    def is_pointer(self) -> bool:
        return self.source[0] in ("input", "update", "allocation", "cleared", "flag")


@dataclass(frozen=True)
class Let:
    """`ctype name = value`, an index or a condition."""

    name: str
    ctype: str
    value: Expr


@dataclass(frozen=True)
class Load:
    """`name = buffer[offset]`, of memory type `ctype`; 0 where `guard` is false. With `lanes` > 1 a vector, of which only the first `count` elements
    are in bounds. `shared`: from the tile `buffer` in shared memory; `own`: of which nobody but this thread writes
    what it reads, and not while it is read."""

    name: str
    ctype: str
    buffer: str
    offset: Expr
    guard: "Expr | None" = None
    lanes: int = 1
    count: "Expr | None" = None
    shared: bool = False
    own: bool = False


@dataclass(frozen=True)
class Place:
    """`name = index * step`, where `index`, a value, is checked: it has to be at least 0 and less than `extent`, a number,
    or else `name` is -1 and the call an error, of which `flag` is told. -1, with nothing checked, where `guard` is false."""

    name: str
    ctype: str
    index: str
    step: Expr
    extent: str
    flag: str
    guard: "Expr | None" = None


@dataclass(frozen=True)
class Uniform:
    """`name` = the random number of `stream` with index `offset`, in [0, 1); with `lanes` > 1 a vector of neighbours. `state` names the field
    that says where the call's numbers begin."""

    name: str
    ctype: str
    state: str
    stream: int
    offset: Expr
    lanes: int = 1


@dataclass(frozen=True)
class Draw:
    """A host's array of the random numbers from element `offset` on: `count` of them, at most `most`."""

    name: str
    ctype: str
    state: str
    stream: int
    offset: Expr
    count: Expr
    most: int


@dataclass(frozen=True)
class Compute:
    """`ctype name = template(operands)`; operands are names or literals, `vectors` the names among them that are vectors to be indexed by the lane."""

    name: str
    ctype: str
    template: str
    operands: tuple[str, ...]
    vectors: tuple[str, ...] = ()
    lane: "Expr | str" = ""


@dataclass(frozen=True)
class Store:
    """`buffer[offset] = value` where `guard` holds; with `lanes` > 1 the first `count` elements of a vector. `ctype` is the memory type, `register` that of
    the value."""

    buffer: str
    ctype: str
    register: str
    offset: Expr
    value: str
    guard: "Expr | None" = None
    lanes: int = 1
    count: "Expr | None" = None
    shared: bool = False


@dataclass(frozen=True)
class Pack:
    """A vector `name` of `lanes` elements of `ctype`, written lane by lane inside the next loop over `lane`."""

    name: str
    ctype: str
    lanes: int


@dataclass(frozen=True)
class SetLane:
    """`name[lane] = value`."""

    name: str
    lane: str
    value: str


@dataclass(frozen=True)
class Array:
    """Registers `name`: `extent` elements of `ctype` (vectors of `lanes` if more than 1), one an iteration of an unrolled loop."""

    name: str
    ctype: str
    lanes: int
    extent: int


@dataclass(frozen=True)
class Scratch:
    """An array in the memory of a block of the host, behind `elements` of `bytes` bytes; a kernel's `shared` says how long that memory is."""

    name: str
    ctype: str
    elements: Expr
    bytes: int


@dataclass(frozen=True)
class Accumulator:
    """Registers `name` of `ctype`, one for each of `lanes`, initially `identity`, which may depend on `lane`, the number of its lane."""

    name: str
    ctype: str
    lanes: int
    identity: str


@dataclass(frozen=True)
class Accumulate:
    """`name[lane] = combine(name[lane], value)` where `guard` holds; `{0}` and `{1}` in `combine` stand for the two. With `identity`, that is combined where it does not,
    without a branch."""

    name: str
    lane: "Expr"
    combine: str
    value: str
    guard: "Expr | None" = None
    identity: str = ""


@dataclass(frozen=True)
class Total:
    """Accumulators `name`, combined by functor `combine`, which leaves what is combined with `identity` as it is; threads meet in the `bytes` of shared memory
    at `offset`."""

    name: str
    combine: str
    identity: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Fetch:
    """`near[place]` in shared memory = a vector of `lanes` elements at `buffer[offset]`, zeros where `guard` is false; it is there when a later FetchGroup says so, and
    only for the thread that asked for it."""

    near: str
    place: Expr
    buffer: str
    offset: Expr
    lanes: int
    guard: "Expr | None" = None


@dataclass(frozen=True)
class FetchGroup:
    """What has been fetched since the last one is a group; with `wait`, all groups but the last are there."""

    wait: bool = False


@dataclass(frozen=True)
class TeamSlots:
    """`name`: where the blocks that share a row meet in memory, in this turn: `parts` blocks, of which this is number `part`, each with room for `words` words."""

    name: str
    memory: str
    team: Expr
    parts: Expr
    part: Expr
    turn: Expr
    words: int


@dataclass(frozen=True)
class TeamReduce:
    """All blocks that meet in `slots` combine the totals that each has, and every thread gets the result. `words`: where those of each total begin; `shared`: the same in
    shared memory, in bytes. `warps`: of a block, who share the totals out."""

    totals: tuple[Total, ...]
    slots: str
    words: tuple[int, ...]
    shared: tuple[int, ...]
    warps: int


@dataclass(frozen=True)
class BlockReduce:
    """The threads along `axis` combine all `totals` at once: along `x` all of them get the result, along `y` the first. All threads of the block take part. `fold`:
    the accumulators of a thread are combined first, into so many results; 0 for none of that. `warp`: how many threads a row has where they are neighbours in a warp, who need neither shared memory nor
    barrier; else 0. `warps`: the most that a row may have, a power of two. `turn`: the loop around it, whose turns use two halves of shared memory, `half` bytes each, by turns: nobody overwrites what others still read."""

    totals: tuple[Total, ...]
    axis: str
    fold: int = 0
    warp: int = 0
    warps: int = 1
    turn: str = ""
    half: int = 0


@dataclass(frozen=True)
class Barrier:
    """All threads of the block wait for each other; shared memory is visible after it."""


@dataclass(frozen=True)
class FillTile:
    """On the host, tile[row * pitch + column] from `columns` lines of `rows` elements at `buffer` + `offset`, `stride` elements apart."""

    tile: str
    pitch: int
    buffer: str
    offset: Expr
    stride: Expr
    rows: Expr
    columns: Expr


@dataclass(frozen=True)
class For:
    """A loop over `var` from 0 to `extent` - 1; `bind` is `rows` (all threads of a block take the same turns), `serial`, `unroll`, `vector` or `simd`."""

    var: str
    extent: Expr
    bind: str
    body: "tuple[Stmt, ...]"


@dataclass(frozen=True)
class If:
    """`yes` where `condition`, which is the same for all threads of a block, holds, else `no`."""

    condition: Expr
    yes: "tuple[Stmt, ...]"
    no: "tuple[Stmt, ...]"


Stmt = Union[Let, Load, Place, Uniform, Draw, Compute, Store, Pack, SetLane, Array, Scratch, Accumulate, Accumulator, BlockReduce, TeamSlots, TeamReduce, Fetch, FetchGroup, Barrier, FillTile, For, If]


@dataclass(frozen=True)
class Tile:
    """A square tile in shared memory at byte `offset`: `rows` rows of `pitch` elements of `ctype`."""

    name: str
    ctype: str
    itemsize: int
    rows: int
    pitch: int
    offset: int

    @property
    def bytes(self) -> int:
        return self.rows * self.pitch * self.itemsize


@dataclass(frozen=True)
class Kernel:
    """One kernel: launch sizes are symbolic. `index` is the C type of indices; `shared` in bytes; `grain` is how many blocks make a task of
    the host's thread pool; `resident`: how many blocks registers must leave room for on a multiprocessor, 0 for any number; `teams`: all blocks run at the same time; `leads`: the next kernel finishes what this one begins, and may be set up
    while it runs; `follows`: it is such a next one."""

    name: str
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    index: str
    grid: Size
    block_x: Size
    block_y: Size
    threads: int
    tiles: tuple[Tile, ...] = ()
    shared: "Size | int" = 0
    grain: int = 1
    resident: int = 0
    teams: bool = False
    leads: bool = False
    follows: bool = False

    def __str__(self) -> str:
        """Indented pseudo-C, one line a statement."""
        return _kernel_text(self)


def defined(s: Stmt) -> "str | None":
    """The name that a statement defines."""
    return None if isinstance(s, (Store, SetLane, Barrier, FillTile, For, If, Accumulate, BlockReduce, TeamReduce, Fetch, FetchGroup)) else s.name


def used(s: Stmt) -> frozenset[str]:
    """The names that a statement reads."""
    if isinstance(s, Let):
        return names(s.value)
    if isinstance(s, Scratch):
        return names(s.elements)
    if isinstance(s, FillTile):
        return names(s.offset) | names(s.stride) | names(s.rows) | names(s.columns)
    if isinstance(s, Load):
        return names(s.offset) | names(s.guard) | names(s.count)
    if isinstance(s, Place):
        return names(s.step) | names(s.guard) | {s.index, s.flag}
    if isinstance(s, Uniform):
        return names(s.offset) | {s.state}
    if isinstance(s, Draw):
        return names(s.offset) | names(s.count) | {s.state}
    if isinstance(s, Compute):
        return frozenset(s.operands) | (names(as_expr(s.lane)) if s.vectors else frozenset())
    if isinstance(s, Store):
        return names(s.offset) | names(s.guard) | names(s.count) | {s.value}
    if isinstance(s, SetLane):
        return frozenset((s.name, s.lane, s.value))
    if isinstance(s, Accumulate):
        return names(s.guard) | names(s.lane) | {s.name, s.value}
    if isinstance(s, Fetch):
        return names(s.place) | names(s.offset) | names(s.guard) | {s.near}
    if isinstance(s, TeamSlots):
        return names(s.team) | names(s.parts) | names(s.part) | names(s.turn)
    if isinstance(s, (BlockReduce, TeamReduce)):
        return frozenset(t.name for t in s.totals) | (frozenset((s.slots,)) if isinstance(s, TeamReduce) else frozenset())
    if isinstance(s, For):
        inner = frozenset().union(*map(used, s.body)) if s.body else frozenset()
        return (inner | names(s.extent)) - {s.var}
    if isinstance(s, If):
        return names(s.condition).union(*map(used, s.yes + s.no))
    return frozenset()


def statements(body: "tuple[Stmt, ...]"):
    """All statements of `body`, also those inside others."""
    for s in body:
        yield s
        if isinstance(s, For):
            yield from statements(s.body)
        elif isinstance(s, If):
            yield from statements(s.yes + s.no)


def with_bodies(s: Stmt, f) -> Stmt:
    """`s` with `f` applied to the bodies it holds."""
    if isinstance(s, For):
        return replace(s, body=f(s.body))
    if isinstance(s, If):
        return replace(s, yes=f(s.yes), no=f(s.no))
    return s


def rewrite_indices(s: Stmt, table: dict[str, Expr]) -> Stmt:
    """`s` with index variables substituted."""
    if isinstance(s, Let):
        return replace(s, value=substitute(s.value, table))
    if isinstance(s, (Load, Store)):
        offset, guard, count = (substitute(e, table) for e in (s.offset, s.guard, s.count))
        return replace(s, offset=offset, guard=guard, count=count)
    if isinstance(s, Place):
        return replace(s, guard=substitute(s.guard, table))
    if isinstance(s, Uniform):
        return replace(s, offset=substitute(s.offset, table))
    if isinstance(s, Draw):
        return replace(s, offset=substitute(s.offset, table), count=substitute(s.count, table))
    if isinstance(s, Fetch):
        place, offset, guard = (substitute(e, table) for e in (s.place, s.offset, s.guard))
        return replace(s, place=place, offset=offset, guard=guard)
    if isinstance(s, TeamSlots):
        team, parts, part, turn = (substitute(e, table) for e in (s.team, s.parts, s.part, s.turn))
        return replace(s, team=team, parts=parts, part=part, turn=turn)
    if isinstance(s, For):
        return replace(s, extent=substitute(s.extent, table), body=tuple(rewrite_indices(x, table) for x in s.body))
    if isinstance(s, Accumulate):
        return replace(s, guard=substitute(s.guard, table), lane=substitute(s.lane, table))
    if isinstance(s, Compute) and s.vectors:
        return replace(s, lane=substitute(as_expr(s.lane), table))
    return s


def _kernel_text(kernel: Kernel) -> str:
    params = ", ".join(f"{p.ctype} {p.name}" for p in kernel.params)
    head = [f"kernel {kernel.name}({params})", f"  grid {kernel.grid}, block {kernel.block_x} x {kernel.block_y}, shared {kernel.shared} bytes"]
    return "\n".join(head + _lines(kernel.body, 1))


def _lines(body: tuple[Stmt, ...], depth: int) -> list[str]:
    result = []
    for s in body:
        result.append("  " * depth + _line(s))
        if isinstance(s, For):
            result += _lines(s.body, depth + 1)
        elif isinstance(s, If):
            result += _lines(s.yes, depth + 1) + ["  " * depth + "else:"] + _lines(s.no, depth + 1)
    return result


def _line(s: Stmt) -> str:
    if isinstance(s, Let):
        return f"{s.name} = {s.value}"
    if isinstance(s, (Load, Store)):
        place = f"{s.buffer}[{s.offset}{f' .. +{s.lanes}' if s.lanes > 1 else ''}]"
        when = "".join(f" {word} {e}" for word, e in (("if", s.guard), ("first", s.count)) if e is not None)
        return f"{s.name} = {place}{when}" if isinstance(s, Load) else f"{place} = {s.value}{when}"
    if isinstance(s, Place):
        return f"{s.name} = {s.index} * {s.step} if {'' if s.guard is None else f'{s.guard} and '}{s.index} in {s.extent}"
    if isinstance(s, Uniform):
        return f"{s.name} = uniform {s.stream} at {s.offset}{f' .. +{s.lanes}' if s.lanes > 1 else ''}"
    if isinstance(s, Draw):
        return f"{s.name}[] = {s.count} of uniform {s.stream} at {s.offset}"
    if isinstance(s, Compute):
        return f"{s.name} = {s.template.format(*s.operands) if s.operands else s.template}"
    if isinstance(s, For):
        return f"for {s.var} in {s.extent} ({s.bind}):"
    if isinstance(s, If):
        return f"if {s.condition}:"
    if isinstance(s, (Pack, Array)):
        return f"{s.ctype} {s.name}[{getattr(s, 'extent', s.lanes)}]"
    if isinstance(s, Scratch):
        return f"{s.ctype} {s.name}[] at {s.elements} * {s.bytes}"
    if isinstance(s, SetLane):
        return f"{s.name}[{s.lane}] = {s.value}"
    if isinstance(s, Barrier):
        return "barrier"
    if isinstance(s, FillTile):
        return f"{s.tile} = {s.columns} lines of {s.rows} at {s.buffer}[{s.offset}], {s.stride} apart"
    if isinstance(s, Accumulator):
        return f"{s.name}[{s.lanes}] := {s.identity}"
    if isinstance(s, Accumulate):
        now = f"{s.name}[{s.lane}]"
        return f"{now} := {s.combine.replace('{0}', now).replace('{1}', s.value)}" + (f" if {s.guard}" if s.guard is not None else "")
    if isinstance(s, Fetch):
        when = f" if {s.guard}" if s.guard is not None else ""
        return f"fetch {s.near}[{s.place}] = {s.buffer}[{s.offset} .. +{s.lanes}]{when}"
    if isinstance(s, FetchGroup):
        return "wait for all but the last group" if s.wait else "end of a group"
    if isinstance(s, TeamSlots):
        return f"{s.name} = {s.words} words of {s.memory} for part {s.part} of {s.parts}, team {s.team}, turn {s.turn}"
    if isinstance(s, (BlockReduce, TeamReduce)):
        over = f"threads {s.axis}" if isinstance(s, BlockReduce) else f"blocks at {s.slots}"
        return ", ".join(f"{t.name} := {t.combine}" for t in s.totals) + f" over {over}"
    raise TypeError(s)
