"""The transpose schedule: tiles of shared memory for operands that are contiguous along another axis than the
outputs.

In: a segment whose outputs are contiguous along one axis, and some of whose inputs along another. Out: square
tiles over the two axes. The threads read such an input along its own axis into shared memory, and use it
along the axis of the outputs. Example: x[R, C] + y[C, R].t().
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..segment import Segment
from .domain import Access, Domain, domain
from .loops import Schedule
from .machine import Machine
from .pointwise import is_wide, row_alignment, window_alignment
from .proposal import Proposal, Stage

SHARED_BYTES = 48 * 1024  # what a block gets without asking the driver for more
MIN_SIDE = 16  # rows and columns: with fewer, most of a tile would be empty


@dataclass(frozen=True)
class TransposeParams:
    """Decisions of the transpose schedule."""

    row: int  # the dim along which the inputs `shared` are contiguous
    shared: tuple[str, ...]
    tile: int  # its rows and columns
    vector: int  # elements per access
    threads: int  # of a block
    wide: bool  # 64-bit indices


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments with operands that are contiguous along another dim than the outputs."""
    if segment.reductions:
        return "it has reductions"
    space = domain(call, segment)
    params = choose_transpose_params(call, space, machine)
    if params is None:
        return "no operand is transposed, or its dims are short"
    return Proposal(params, lambda _: [Stage(segment, apply(space, params, machine), params)])


def choose_transpose_params(call: Call, domain: Domain, machine: Machine) -> TransposeParams | None:
    """The parameters; None if no input needs a tile, or if the dims are too short for one."""
    col = len(domain.dims) - 1
    if col < 1:
        return None
    odd = [a for a in domain.loads if a.moves(col) and not a.is_unit(col) and not a.buffer.windows]
    counts = {d: [a for a in odd if a.is_unit(d)] for d in range(col)}
    row = max(counts, key=lambda d: len(counts[d]))
    shared = counts[row]
    if not shared:
        return None
    if not all(call.decide(sz.le(MIN_SIDE, domain.dims[d].extent)) for d in (row, col)):
        return None
    tile = 64 if max(a.itemsize for a in shared) <= 4 else 32
    room = SHARED_BYTES // (tile * (tile + 1) * max(a.itemsize for a in shared) + 16)
    shared = shared[:room]
    if not shared:
        return None
    names = tuple(a.buffer.value.name for a in shared)
    if not machine.has_threads:
        return TransposeParams(row, names, tile, 1, 1, is_wide(call, domain))
    return TransposeParams(row, names, tile, _vector(call, domain, row, shared), 256, is_wide(call, domain))


def _vector(call: Call, domain: Domain, row: int, shared: list[Access]) -> int:
    """Elements of one access, from memory to the tile and from the tile to registers: 4 bytes, so that a warp
    reads 128 bytes of 16-bit elements, too."""
    col = len(domain.dims) - 1
    straight = domain.walking(col)
    widest = max(a.itemsize for a in [*straight, *shared])
    width = sz.minimum(max(1, 4 // widest), window_alignment(domain, col))
    for accesses, along in ((straight, col), (shared, row)):
        for a in accesses:
            width = sz.minimum(width, sz.binary("div", row_alignment(a, along), a.itemsize))
    return call.decide(sz.maximum(width, 1))


def apply(domain: Domain, params: TransposeParams, machine: Machine) -> Schedule:
    """The loops: `block` over tiles, `tx` and `ty` over the columns and rows of a tile, `u` over further
    rows."""
    schedule = Schedule.over(domain, params.threads, params.wide)
    names = [d.name for d in domain.dims]
    row, col = names[params.row], names[-1]
    others = [n for n in names if n not in (row, col)]
    schedule = schedule.reorder(*others, row, col)
    if not machine.has_threads:
        return _host(schedule, others, row, col, params, machine)
    step = params.threads * params.vector // params.tile
    schedule = schedule.split(col, params.tile, ("col_block", "col")).split(
        row, params.tile, ("row_block", "row")
    )
    schedule = schedule.split("col", params.vector, ("tx", "lane"), exact=True)
    schedule = schedule.split("row", step, ("u", "ty"), exact=True)
    schedule = schedule.reorder(*others, "row_block", "col_block", "ty", "tx", "u", "lane")
    schedule = schedule.fuse_all([*others, "row_block", "col_block"], "block")
    schedule = schedule.bind(block="block", tx="thread_x", ty="thread_y", u="unroll", lane="vector")
    schedule = schedule.with_values_in("tile", params.shared)
    return replace(schedule, tile=("row", "col"), tile_size=params.tile)


def _host(
    schedule: Schedule, others: list[str], row: str, col: str, params: TransposeParams, machine: Machine
) -> Schedule:
    """A block is one tile, which stays in the nearest cache. The transposed inputs are read in whole cache
    lines."""
    schedule = schedule.split(col, params.tile, ("col_block", "col")).split(
        row, params.tile, ("row_block", "row")
    )
    schedule = schedule.reorder(*others, "row_block", "col_block", "row", "col")
    schedule = schedule.fuse_all([*others, "row_block", "col_block"], "block").bind(
        block="block", row="serial", col="simd"
    )
    grain = max(1, machine.task // params.tile**2)
    schedule = schedule.with_values_in("tile", params.shared)
    return replace(schedule, tile=("row", "col"), tile_size=params.tile, grain=grain)
