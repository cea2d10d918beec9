"""The transpose schedule: tiles of shared memory for tensors that are contiguous along another axis than the
others.

In: a segment whose tensors are contiguous along one axis, and some of whose inputs or outputs along another.
Out: tiles over the two axes. The threads read such an input along its own axis into shared memory, and use it
along the axis of the others. They write such an output to shared memory, and store it from there along its
own axis. Examples: x[R, C] + y[C, R].t(); a result that is stored channels-last and row-major.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.size import Size
from ..segment import Segment
from .domain import Access, Domain, domain
from .loops import Schedule, Tiling
from .machine import Machine
from .pointwise import is_wide, row_alignment, window_alignment
from .proposal import Proposal, Stage

SHARED_BYTES = 48 * 1024  # what a block gets without asking the driver for more
MIN_SIDE = 16  # rows and columns: with fewer, most of a tile would be empty
SIDE, NARROW_SIDE = 64, 32  # rows or columns of a tile
THREADS = 256  # of a block
ACCESS = 4  # elements of one access along the columns, at most
FILL_BYTES = 4  # of an access that fills a tile: neighbours in a warp write to different banks
LARGE = 1 << 18  # elements: if there are fewer, a cache gathers what single threads store


@dataclass(frozen=True)
class TransposeParams:
    """Decisions of the schedules that use tiles."""

    row: int  # the dim along which the inputs `shared` and the outputs `stored` are contiguous
    shared: tuple[str, ...]
    rows: int  # of a tile
    columns: int  # of a tile
    vector: int  # elements per access, from and to memory along columns
    fill: int  # elements per access from memory to a tile, or back
    threads: int  # of a block
    wide: bool  # 64-bit indices
    split: bool = False  # there are two kernels; the second one combines partial results
    stored: tuple[str, ...] = ()


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments with operands or results that are contiguous along another dim than the others."""
    if segment.reductions:
        return "it has reductions"
    if any(buffer.at for buffer in segment.stores):
        return "it adds to places that indices name"
    space = _space(call, segment, machine)
    params = choose_transpose_params(call, space, machine, range(len(space.dims) - 1))
    if params is None:
        return "no operand or result is transposed, or its dims are short"
    return Proposal(params, lambda _: [Stage(segment, apply(space, params, machine), params)])


def _space(call: Call, segment: Segment, machine: Machine) -> Domain:
    """The domain of `segment`. If its results lie along several dims, the innermost dim is the one along
    which most bytes lie, so that the fewest go through tiles."""
    space = domain(call, segment)
    *rows, col = range(len(space.dims))
    if not _turned_stores(call, space, machine, rows):
        return space
    whole = [a for a in space.accesses if is_whole(a)]
    inner = max((col, *rows), key=lambda d: sum(a.itemsize for a in whole if a.is_unit(d)))
    if inner == col:
        return space
    return domain(call, segment, with_innermost(space, inner))


def with_innermost(space: Domain, inner: int) -> Domain:
    """`space` with dim `inner` as the last one, for other domains to be like it."""
    dims = (*(dim for d, dim in enumerate(space.dims) if d != inner), space.dims[inner])
    return replace(space, dims=dims)


def _turned_stores(call: Call, domain: Domain, machine: Machine, rows: Iterable[int]) -> list[Access]:
    """The large results that are contiguous along one of the dims `rows`, and not along the innermost one.
    A host needs no tile for them, as its caches gather the lines of a block."""
    found = [a for a in domain.stores if is_whole(a) and any(map(a.is_unit, rows))]
    if not machine.has_threads or not found:
        return []
    return found if call.decide(sz.le(LARGE, domain.elements)) else []


def is_whole(a: Access) -> bool:
    """Whether the tensor has all dims of the domain."""
    return all(map(a.moves, range(len(a.strides))))


def choose_transpose_params(
    call: Call, domain: Domain, machine: Machine, rows: Sequence[int]
) -> TransposeParams | None:
    """The parameters; None if no tensor needs a tile, or if the dims are too short for one. The dim along
    which the tensors in tiles are contiguous is one of `rows`."""
    col = len(domain.dims) - 1
    odd = [a for a in domain.loads if a.moves(col) and not a.is_unit(col) and not a.buffer.windows]
    odd += _turned_stores(call, domain, machine, rows)
    counts = {d: [a for a in odd if a.is_unit(d)] for d in rows}
    row = max(counts, key=lambda d: len(counts[d]), default=col)
    shared = counts.get(row)
    if not shared:
        return None
    if not all(call.decide(sz.le(MIN_SIDE, domain.dims[d].extent)) for d in (row, col)):
        return None
    widest = max(a.itemsize for a in shared)
    height = width = SIDE if widest <= 4 else NARROW_SIDE
    if machine.has_threads and widest <= 4:
        height, width = (_side(call, domain.dims[d].extent) for d in (row, col))
    fill = (
        call.decide(_width(domain, row, shared, max(1, FILL_BYTES // widest))) if machine.has_threads else 1
    )
    shared = shared[: SHARED_BYTES // ((height + fill) * width * widest + 16)]
    names, stored = (
        tuple(a.buffer.value.name for a in shared if a in some) for some in (domain.loads, domain.stores)
    )
    wide = is_wide(call, domain)
    if not machine.has_threads:
        return TransposeParams(row, names, height, width, 1, 1, 1, wide)
    straight = domain.walking(col)
    most = max(1, min(ACCESS, machine.access // max((a.itemsize for a in straight), default=1)))
    vector = call.decide(_width(domain, col, straight, most))
    return TransposeParams(row, names, height, width, vector, fill, THREADS, wide, stored=stored)


def _side(call: Call, extent: Size) -> int:
    """Narrow tiles if wide ones would leave a quarter of their threads without an element, or more: never for
    128 elements or more, so that few sizes differ in this."""
    idle = sz.ceildiv(extent, SIDE) * SIDE - sz.ceildiv(extent, NARROW_SIDE) * NARROW_SIDE
    return NARROW_SIDE if call.decide(sz.lt(extent, idle * 4)) else SIDE


def _width(domain: Domain, along: int, accesses: Iterable[Access], most: int) -> Size:
    """Elements of one access along dim `along`: either all or none of them are inside of the dim and of a
    window."""
    width = sz.minimum(most, window_alignment(domain, along))
    width = sz.minimum(width, sz.pow2(domain.dims[along].extent))
    for a in accesses:
        width = sz.minimum(width, sz.binary("div", row_alignment(a, along), a.itemsize))
    return sz.maximum(width, 1)


def apply(domain: Domain, params: TransposeParams, machine: Machine) -> Schedule:
    """The loops: `block` over tiles, `tx` and `ty` over the columns and rows of a tile, `u` over further
    rows."""
    schedule = Schedule.over(domain, params.threads, params.wide)
    names = [d.name for d in domain.dims]
    others = [n for n in names if n not in (names[params.row], names[-1])]
    schedule = schedule.reorder(*others, names[params.row], names[-1])
    if not machine.has_threads:
        return _host(schedule, others, params, machine)
    schedule = tiled(schedule, params)
    schedule = schedule.reorder(*others, "row_block", "col_block", "ty", "tx", "u", "lane")
    schedule = schedule.fuse_all([*others, "row_block", "col_block"], "block")
    return schedule.bind(block="block", tx="thread_x", ty="thread_y", u="unroll", lane="vector")


def tiled(schedule: Schedule, params: TransposeParams) -> Schedule:
    """`schedule`, whose two dims are split into tiles (loops `row_block` and `col_block`) and the threads and
    accesses of a tile (`u`, `ty`, `tx` and `lane`)."""
    dims = schedule.domain.dims
    schedule = schedule.split(dims[-1].name, params.columns, ("col_block", "col"), whole=True)
    schedule = schedule.split(dims[params.row].name, params.rows, ("row_block", "row"), whole=True)
    schedule = schedule.split("col", params.vector, ("tx", "lane"), exact=True)
    step = params.threads * params.vector // params.columns
    schedule = schedule.split("row", step, ("u", "ty"), exact=True)
    return _with_tiles(schedule, params)


def _with_tiles(schedule: Schedule, params: TransposeParams) -> Schedule:
    tiling = Tiling("row", "col", params.rows, params.columns, params.fill)
    placed = schedule.with_values_in("tile", params.shared).with_values_in("store_tile", params.stored)
    return replace(placed, tile=tiling)


def _host(schedule: Schedule, others: list[str], params: TransposeParams, machine: Machine) -> Schedule:
    """A block is one tile, which stays in the nearest cache. The transposed inputs are read in whole cache
    lines."""
    dims = schedule.domain.dims
    schedule = schedule.split(dims[-1].name, params.columns, ("col_block", "col"))
    schedule = schedule.split(dims[params.row].name, params.rows, ("row_block", "row"))
    schedule = schedule.reorder(*others, "row_block", "col_block", "row", "col")
    schedule = schedule.fuse_all([*others, "row_block", "col_block"], "block").bind(
        block="block", row="serial", col="simd"
    )
    grain = max(1, machine.task // (params.rows * params.columns))
    return replace(_with_tiles(schedule, params), grain=grain)
