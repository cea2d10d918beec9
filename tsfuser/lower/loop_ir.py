"""Loop IR: the statements of one kernel, target-independent, a step before C++.

In: built by `nest`, rewritten by the passes. Out: the body of a `kernel.Kernel`, which
`codegen.emit` prints as C++. Example, a copy of n elements:

    For("i", Var("args.n"), "serial", (
        Load("x", "float", "args.x0", Var("i")), Store("args.y0", "float", "float", Var("i"), "x")))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, Union

from .index import Const, Expr


@dataclass(frozen=True)
class Let:
    """`ctype name = value`, an index or a condition."""

    name: str
    ctype: str
    value: Expr


@dataclass(frozen=True)
class Load:
    """`name = buffer[offset]`, of memory type `ctype`; 0 where `guard` is false. With `lanes` > 1 a vector;
    only its first `count` elements are in bounds. `shared`: from the tile `buffer` in shared memory;
    `own`: only this thread writes what it reads, and not while it is read; `held`: it does so afterwards, so
    that the loops over its row have to share one such load. `packed`: 16-bit floats share registers;
    `common`: all rows read the same."""

    name: str
    ctype: str
    buffer: str
    offset: Expr
    guard: Expr | None = None
    lanes: int = 1
    count: Expr | None = None
    shared: bool = False
    own: bool = False
    held: bool = False
    packed: bool = False
    common: bool = False


@dataclass(frozen=True)
class Place:
    """`name = index * step`, where `index`, a value, is checked: it has to be at least 0 and less than
    `extent`, a number, or else `name` is `missing` and the call an error, of which `flag` is told. It is
    `missing`, with nothing checked, where `guard` is false."""

    name: str
    ctype: str
    index: str
    step: Expr
    extent: str
    flag: str
    guard: Expr | None = None
    missing: int = -1


@dataclass(frozen=True)
class Uniform:
    """`name` = the random number of `stream` with index `offset`, in [0, 1); with `lanes` > 1 a vector of
    neighbours. `state` names the field that says where the call's numbers begin. With a `walk` (counter,
    threads and width, as text) it is eager's number, by its `law`: `uniform`, in (0, 1], or `normal`."""

    name: str
    ctype: str
    state: str
    stream: int
    offset: Expr
    lanes: int = 1
    law: str = "uniform"
    walk: tuple[str, ...] = ()


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
    """`ctype name = symbol(arguments)` (ir.symbols), computed in a dtype of `kind`. `operands` are the names
    that are read, `vectors` those among them that are vectors to be indexed by the lane; in the arguments,
    which are the operands where there are none, `{0}` stands for the first operand."""

    name: str
    ctype: str
    symbol: str
    operands: tuple[str, ...]
    vectors: tuple[str, ...] = ()
    lane: Expr | str = ""
    arguments: tuple[str, ...] = ()
    kind: str = "f"

    def __hash__(self):
        return hash(self.name)  # which few share


@dataclass(frozen=True)
class Store:
    """`buffer[offset] = value` where `guard` holds; with `lanes` > 1 the first `count` elements of a vector.
    `ctype` is the memory type, `register` that of the value. If it `adds`, the value is added to the element,
    to which other threads may add as well. `exact`: the value is one of `ctype`, so nothing is rounded."""

    buffer: str
    ctype: str
    register: str
    offset: Expr
    value: str
    guard: Expr | None = None
    lanes: int = 1
    count: Expr | None = None
    shared: bool = False
    adds: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Pack:
    """A vector `name` of `lanes` elements of `ctype`, written lane by lane in the next loop."""

    name: str
    ctype: str
    lanes: int


@dataclass(frozen=True)
class SetLane:
    """`name[lane] = value`."""

    name: str
    lane: Expr | str
    value: str


@dataclass(frozen=True)
class Array:
    """Registers `name`: `extent` elements of `ctype` (vectors of `lanes` if more than 1; `packed`: narrow
    elements share registers), one an iteration of an unrolled loop."""

    name: str
    ctype: str
    lanes: int
    extent: int
    packed: bool = False


@dataclass(frozen=True)
class Scratch:
    """An array in the memory of a block of the host, behind `elements` of `bytes` bytes; a kernel's `shared`
    says how long that memory is."""

    name: str
    ctype: str
    elements: Expr
    bytes: int


@dataclass(frozen=True)
class Accumulator:
    """Registers `name` of `ctype`, one for each of `lanes`, initially `identity`, which may depend on `lane`,
    the number of its lane."""

    name: str
    ctype: str
    lanes: int
    identity: str


@dataclass(frozen=True)
class Accumulate:
    """`name[lane] = combine(name[lane], value, *others)` where `guard` holds; `combine` is a symbol.
    With `identity`, that is combined where it does not, without a branch."""

    name: str
    lane: Expr
    combine: str
    value: str
    guard: Expr | None = None
    identity: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Total:
    """Accumulators `name`, combined by functor `combine`, which leaves what is combined with `identity` as it
    is; threads meet in the `bytes` of shared memory at `offset`."""

    name: str
    combine: str
    identity: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Fetch:
    """`prefetched[place]` in shared memory = a vector of `lanes` elements at `buffer[offset]`, zeros where
    `guard` is false; it is there when a later FetchGroup says so, and only for the thread that asked for
    it."""

    prefetched: str
    place: Expr
    buffer: str
    offset: Expr
    lanes: int
    guard: Expr | None = None


@dataclass(frozen=True)
class FetchGroup:
    """What has been fetched since the last one is a group; with `wait`, all groups but the last are there."""

    wait: bool = False


@dataclass(frozen=True)
class Hide:
    """The compiler forgets what it has computed from the packed vector `name`: else it would keep the
    elements, converted, for the loops that follow. `iteration`: the variable of the loop over rows around."""

    name: str
    iteration: str


@dataclass(frozen=True)
class CooperativeSlots:
    """`name`: where the blocks that share a row combine in memory, in this iteration: `parts` blocks, of
    which this is number `part`, each with room for `words` words."""

    name: str
    memory: str
    block_set: Expr
    parts: Expr
    part: Expr
    iteration: Expr
    words: int


@dataclass(frozen=True)
class CooperativeReduce:
    """All blocks that meet in `slots` combine the totals that each has, and every thread gets the result.
    `words`: where those of each total begin; `shared`: the same in shared memory, in bytes. `warps`: of a
    block, who share the totals out."""

    totals: tuple[Total, ...]
    slots: str
    words: tuple[int, ...]
    shared: tuple[int, ...]
    warps: int


@dataclass(frozen=True)
class AwaitCluster:
    """All blocks of the cluster have begun, so that others may write to their shared memory."""


@dataclass(frozen=True)
class ClusterReduce:
    """All blocks of a cluster combine the totals that each has, and every thread gets the result. `shared`:
    where each total begins in shared memory, in bytes; `mailbox`: where a block counts what others have sent.
    `warps`: of a block, who share the totals out. `iteration`, `half`: as of a BlockReduce."""

    totals: tuple[Total, ...]
    shared: tuple[int, ...]
    mailbox: int
    warps: int
    iteration: str = ""
    half: int = 0


@dataclass(frozen=True)
class BlockReduce:
    """The threads along `axis` combine all `totals` at once: along `x` all of them get the result, along `y`
    the first. All threads of the block take part. `fold`: a thread first combines its accumulators into this
    number of results; 0: it does not. `warp`: how many threads a row has where they are neighbours in a warp,
    who need neither shared memory nor barrier; else 0. `warps`: the most that a row may have, a power of two.
    `across`: the threads along x, 0 where only the launch says how many. `iteration`: the loop around it,
    whose iterations alternate between two halves of shared memory, `half` bytes each: nothing overwrites what
    others still read."""

    totals: tuple[Total, ...]
    axis: str
    fold: int = 0
    warp: int = 0
    warps: int = 1
    across: int = 0
    iteration: str = ""
    half: int = 0


@dataclass(frozen=True)
class BlockScan:
    """Vectors `name`, of which each element becomes the combination, by functor `combine`, of those
    before it and itself, from `carry` on, which becomes the last one. Along axis `x` elements lie in the
    order of vectors, threads and lanes, these from the last one on if it goes `backwards`, and `warp` and
    `across` are as of a BlockReduce. Along `y` they lie in the order of threads and vectors, each lane has
    elements of its own, and `across` threads lie along x. Threads meet in the `bytes` of shared memory at
    `offset`; where there is an `iteration`, it alternates between two such."""

    name: str
    carry: str
    combine: str
    axis: str
    backwards: bool
    warp: int
    across: int
    offset: int
    bytes: int
    iteration: str = ""


@dataclass(frozen=True)
class ColumnReduce:
    """The threads along y of a block of `warps` warps combine all `totals` of its `columns` columns, and
    every thread gets the results of its own; the combined values lie behind the exchanged ones.
    `cluster`: the bytes of shared memory from which on the blocks of a cluster then exchange each of
    `totals`; none if a block has whole columns. `mailbox`: as of a ClusterReduce."""

    totals: tuple[Total, ...]
    columns: int
    warps: int
    cluster: tuple[int, ...] = ()
    mailbox: int = 0


@dataclass(frozen=True)
class Barrier:
    """All threads of the block wait for each other; shared memory is visible after it."""


@dataclass(frozen=True)
class FillTile:
    """On the host, tile[row * pitch + column] from `columns` lines of `rows` elements at `buffer` + `offset`,
    `stride` elements apart."""

    tile: str
    pitch: int
    buffer: str
    offset: Expr
    stride: Expr
    rows: Expr
    columns: Expr


@dataclass(frozen=True)
class For:
    """A loop over `var` from 0 to `extent` - 1; `bind` is `rows` (all threads of a block take the same
    iterations), `serial`, `unroll`, `vector` or `simd`. `ctype`: of the variable, where it is said."""

    var: str
    extent: Expr
    bind: str
    body: Body
    ctype: str = ""

    @property
    def trips(self) -> int:
        """The number of iterations, which has to be a constant."""
        assert isinstance(self.extent, Const)
        return self.extent.value


@dataclass(frozen=True)
class If:
    """`yes` where `condition` holds, else `no`. Where there is a barrier in it, the condition is the same for
    all threads of a block."""

    condition: Expr
    yes: Body
    no: Body


Stmt = Union[
    Let, Load, Place, Uniform, Draw, Compute, Store, Pack, SetLane, Array, Scratch, Accumulate, Accumulator,
    BlockReduce, CooperativeSlots, CooperativeReduce, AwaitCluster, ClusterReduce,
    ColumnReduce, BlockScan, Fetch, FetchGroup, Hide, Barrier, FillTile, For, If,
]  # fmt: skip
Body: TypeAlias = tuple[Stmt, ...]
