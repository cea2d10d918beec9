"""The reduction schedule for operands or results that are contiguous along a reduced dim, while others are
contiguous along a dim that is not reduced.

In: a segment of reductions with such tensors. Out: one kernel, or two, as in the outer form of the reduction
schedule. Each block goes over tiles of its columns. The threads read the operand along its own dim
into shared memory, as in the transpose schedule, and add up the columns of the tile. Example: the gradient of
a bias of a layer over the channels of images, as y[N, H, W, C] = x[N, C, H, W].permute(0, 2, 3, 1), which is
also stored. One element at a time, such a sum took four times as long on an H200 as its bytes.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Axis
from ..ir.size import Size
from ..segment import Allocations, Segment
from .domain import Domain, domain
from .loops import Schedule
from .machine import Machine
from .partials import parted
from .proposal import Proposal, Stage
from .reduction import finish
from .reduction_loops import combination
from .transpose import LARGE, TransposeParams, choose_transpose_params, is_whole, tiled, with_innermost

MIN_TILES = 2  # of a split
RESIDENT = 4  # blocks that share a multiprocessor
#: The same if a thread has more accesses in flight, for which 64 registers are too few: sums of products of
#: [32, 58, 28, 28] bfloat16, two elements an access, spilled 232 bytes a thread, and spill 64.
RESIDENT_OF_MANY, MANY = 3, 5


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments of reductions with operands that are contiguous along a reduced dim, if nothing in the
    segment depends on the results."""
    if not segment.reductions:
        return "it has no reduction"
    if segment.uses_reductions:
        return "something depends on its reductions"
    if not machine.has_threads:
        return "blocks have no threads that could fill a tile"
    space = _space(call, segment)
    params = _choose_params(call, segment, space, machine)
    if params is None:
        return "no operand is contiguous along a reduced dim, or its dims are short"
    splits = _splits(space, segment, params, machine)
    if call.decide(sz.lt(1, splits)):
        params = replace(params, split=True)
        return Proposal(
            params, lambda allocations: _split(call, segment, machine, params, space, allocations)
        )
    whole = _apply(space, segment, params, machine, None)
    return Proposal(params, lambda _: [Stage(segment, whole, params)])


def _space(call: Call, segment: Segment) -> Domain:
    """The domain of `segment`. If the innermost dim is reduced, but a large operand is contiguous along
    another one, which is kept, that one is the innermost, and what lies along the other goes through tiles.
    """
    space = domain(call, segment)
    reduced = _reduced(space, segment)
    kept = [d for d in range(len(space.dims)) if d not in reduced]
    inner = next((d for d in kept if any(is_whole(a) and a.is_unit(d) for a in space.loads)), None)
    if len(space.dims) - 1 in kept or inner is None or not call.decide(sz.le(LARGE, space.elements)):
        return space
    return domain(call, segment, with_innermost(space, inner))


def _choose_params(call: Call, segment: Segment, space: Domain, machine: Machine) -> TransposeParams | None:
    """The parameters; None if the schedule does not take the segment."""
    reduced = _reduced(space, segment)
    if not call.decide(sz.lt(0, space.elements)) or len(space.dims) - 1 in reduced:
        return None
    return choose_transpose_params(call, space, machine, reduced)


def _reduced(space: Domain, segment: Segment) -> list[int]:
    """The dims that are reduced."""
    axes = segment.reductions[0].axes
    return [d for d, dim in enumerate(space.dims) if dim.axes and dim.axes[0] in axes]


def _splits(space: Domain, segment: Segment, params: TransposeParams, machine: Machine) -> Size:
    """How many blocks share the columns of one tile."""
    reduced = _reduced(space, segment)
    blocks = sz.ceildiv(space.dims[-1].extent, params.columns)
    for d, dim in enumerate(space.dims[:-1]):
        blocks = blocks if d in reduced else blocks * dim.extent
    wanted = sz.binary("div", machine.multiprocessors * machine.waves, sz.maximum(blocks, 1))
    chunk = sz.ceildiv(_tiles(space, segment, params), sz.maximum(wanted, 1))
    return sz.ceildiv(_tiles(space, segment, params), sz.maximum(chunk, MIN_TILES))


def _tiles(space: Domain, segment: Segment, params: TransposeParams) -> Size:
    """Tiles over which a column goes."""
    extents = {d: space.dims[d].extent for d in _reduced(space, segment)}
    extents[params.row] = sz.ceildiv(extents[params.row], params.rows)
    return sz.product(list(extents.values()))


def _split(
    call: Call,
    segment: Segment,
    machine: Machine,
    params: TransposeParams,
    space: Domain,
    allocations: Allocations,
) -> list[Stage]:
    """Two kernels: the first computes partial results, the second combines them."""
    splits = _splits(space, segment, params, machine)
    first, second, distance = parted(
        segment, segment.reductions, Axis("splits", splits), params.vector, allocations
    )
    inner = domain(call, first, space)
    own = _choose_params(call, first, inner, machine)
    assert own is not None, "partial results lie as the results do"
    own = replace(own, split=True)
    return [
        Stage(first, _apply(inner, first, own, machine, distance, splits), own),
        finish(call, second, machine),
    ]


def _apply(
    space: Domain,
    segment: Segment,
    params: TransposeParams,
    machine: Machine,
    partial: Size | None,
    splits: Size | int = 1,
) -> Schedule:
    """The loops: `block` over columns of tiles and over splits, `r` over the tiles of a split, and those of a
    tile. `partial`: elements between the partial results of two splits; None if the result is final."""
    reduced = _reduced(space, segment)
    names = [d.name for d in space.dims]
    kept = [n for d, n in enumerate(names[:-1]) if d not in reduced]
    outer = [names[d] for d in reduced if d != params.row]
    schedule = Schedule.over(space, params.threads, params.wide)
    schedule = tiled(schedule.reorder(*kept, *outer, names[params.row], names[-1]), params)
    schedule = schedule.reorder(*kept, "col_block", *outer, "row_block", "ty", "tx", "u", "lane")
    schedule = schedule.fuse_all([*outer, "row_block"], "walk")
    chunk = sz.ceildiv(schedule.loop("walk").extent, splits)
    schedule = schedule.split("walk", chunk, ("part", "r"), exact=partial is None)
    schedule = schedule.reorder("part", *kept, "col_block", "ty", "tx", "r", "u", "lane")
    schedule = schedule.fuse_all(["part", *kept, "col_block"], "block")
    schedule = schedule.bind(block="block", tx="thread_x", ty="thread_y", r="rows", u="unroll", lane="vector")
    how = combination(("r", "u"), "y", partial, machine)
    resident = RESIDENT_OF_MANY if MANY <= schedule.loop("u").extent.a else RESIDENT
    return replace(schedule, reduction=how, resident=resident)
