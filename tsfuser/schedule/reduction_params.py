"""The parameters of the reduction schedule: threads, vectors, splits.

In: a segment of reductions, and the machine. Out: `ReductionParams`, and the sizes of the launch as formulas
of the call's sizes. Example: the bias gradient of [65536, 1024] has blocks of 32 threads along columns and 8
along rows, and 66 splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import MOMENTS
from ..ir.size import Size
from ..segment import Segment
from .domain import Dim, Domain, domain
from .machine import Machine
from .pointwise import even_part, host_lanes, is_whole, is_wide, vector_width

MIN_ITERATIONS = 16  # of a thread: with fewer, splits gain less than the second kernel costs
MIN_SPLIT_ITERATIONS = 2  # iterations of a thread in each split
# bytes of input that a thread has in flight: there are fewer blocks than in a pointwise kernel
LOAD_BYTES = 64
HOST_COLUMNS = 128  # columns that the host adds up together: with fewer, the processor would not prefetch
# The host rather adds up a page of each row: with each row of a narrower block a new page begins, for whose
# address the processor waits. In columns; and in all accumulators of a block, which are in its first cache.
PAGE_COLUMNS, CACHED_COLUMNS = 1024, 2048
# threads in a row that may be no power of two: rows do not combine in their warp then, and with shorter ones
# too many would be left for the combination in shared memory
MIN_UNEVEN = 8
MAX_UNROLL = 8  # accesses that a thread has in flight, at most
OTHER_REGISTERS = 16  # registers of a thread for everything but data
BUSY_THREADS_PER_SM = 1024  # threads that keep a multiprocessor busy: with as many columns, none is shared


@dataclass(frozen=True)
class ReductionParams:
    """Decisions of the reduction schedule."""

    inner: bool  # the contiguous dim is reduced
    vector: int  # elements per access
    unroll: int  # accesses in flight
    threads: int  # of a block
    split: bool  # there are two kernels
    whole: bool  # no vector contains the end of a row
    wide: bool  # 64-bit indices
    deep: bool = False  # the unrolled loop is along outer reduced dims, not along the contiguous one
    cut: bool = False  # outer reduced dims are split, not the contiguous one
    #: blocks that share a multiprocessor: a compiler that does not know it saves registers, and waits for
    #: each load before the next
    resident: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of the launch."""

    across: Size  # threads of a block along the contiguous dim
    down: Size  # threads of a block across it
    splits: Size
    chunk: Size  # extent of the reduced loop in each split


@dataclass(frozen=True)
class Sides:
    """A domain whose dims are kept or reduced, each outermost first."""

    space: Domain
    kept: tuple[Dim, ...]
    reduced: tuple[Dim, ...]

    @property
    def columns(self) -> Size:
        """Elements along the contiguous dim."""
        return self.space.dims[-1].extent


def plan(
    call: Call, segment: Segment, machine: Machine, small: bool = False
) -> tuple[Sides, ReductionParams, Shape]:
    """The dims, the parameters and the sizes of the launch. `small`: the data is in the cache, so that blocks
    may be narrow."""
    space = domain(call, segment)
    axes = segment.reductions[0].axes
    reduced = tuple(d for d in space.dims if d.axes and d.axes[0] in axes)
    sides = Sides(space, tuple(d for d in space.dims if d not in reduced), reduced)
    params = _choose_reduction_params(call, segment, sides, machine)
    if params.inner and machine.has_threads and len(reduced) > 1:
        params = _deep(call, sides, params, machine)
    return sides, params, _shape(sides, params, machine, small)


def _deep(call: Call, sides: Sides, params: ReductionParams, machine: Machine) -> ReductionParams:
    """`params` for several reduced dims: a short row leaves nothing to unroll or split, so the outer dims are
    unrolled and split if they are long enough."""
    outer = _extent(sides.reduced[:-1])
    if not call.decide(sz.le(params.unroll, outer)):
        return params
    shape = _shape(sides, replace(params, deep=True), machine, False)
    wanted = _wanted(sides, params, shape.across, machine)
    along = sz.binary("div", outer, params.unroll)
    below = sz.ceildiv(sides.columns, shape.across * params.vector)
    cut = call.decide(sz.le(sz.minimum(wanted, below), sz.minimum(wanted, along)))
    return replace(params, deep=True, cut=bool(cut))


def _extent(dims: Sequence[Dim]) -> Size:
    return sz.product([d.extent for d in dims])


def _choose_reduction_params(call: Call, segment: Segment, sides: Sides, machine: Machine) -> ReductionParams:
    space = sides.space
    inner = space.dims[-1] in sides.reduced
    wide = is_wide(call, space)
    # columns that are fused with other dims go on in the next row, in the middle of a vector
    vector = vector_width(call, space, machine, over_ends=not inner and len(sides.kept) == 1)
    streamed = [
        a
        for a in space.reads
        if a.moves(len(space.dims) - 1)
        and any(a.moves(d) for d, dim in enumerate(space.dims) if dim in sides.reduced)
    ]
    loaded = vector * sum(a.itemsize for a in streamed)
    unroll = 1 << (min(MAX_UNROLL, max(1, LOAD_BYTES // max(loaded, 1))).bit_length() - 1)
    if machine.vectorises_loops:
        lanes = vector if inner else _host_columns(call, segment, sides.columns)
        return ReductionParams(inner, lanes, 1, 1, False, False, wide)
    threads = 256
    kept = sum(
        (3 if op.combine in MOMENTS else 1 if inner else unroll)
        * max(1, op.output.dtype.register.itemsize // 4)
        for op in segment.reductions
    )
    # tensors that all rows share: they stay in registers
    hoisted = [a for a in space.reads if a not in streamed and a.moves(len(space.dims) - 1)]
    registers = vector * (kept + len(hoisted)) + unroll * loaded // 4 + OTHER_REGISTERS
    resident = machine.registers // (threads * max(64, -(-registers // 8) * 8))
    return ReductionParams(
        inner, vector, unroll, threads, False, is_whole(call, space, vector), wide, resident=max(1, resident)
    )


def _host_columns(call: Call, segment: Segment, columns: Size) -> int:
    """How many columns a block of the host adds up."""
    sums = sum(3 if op.combine in MOMENTS else 1 for op in segment.reductions)
    most = PAGE_COLUMNS
    while most > HOST_COLUMNS and most * sums > CACHED_COLUMNS:
        most //= 2
    return host_lanes(call, columns, most)


def _shape(sides: Sides, params: ReductionParams, machine: Machine, small: bool) -> Shape:
    """The sizes of the launch as formulas: they depend on the call, the kernel does not."""
    cells = _cells(sides, params, machine)
    most = sz.const(params.threads if params.inner else min(32, params.threads))
    if small and not params.inner:
        most = sz.minimum(most, sz.nextpow2(sz.ceildiv(cells, machine.multiprocessors)))
    elif not params.inner and machine.has_threads:
        sharing = sz.nextpow2(sz.ceildiv(machine.multiprocessors * BUSY_THREADS_PER_SM, cells))
        most = sz.binary("div", params.threads, sz.minimum(sharing, params.threads // 32))
    across = _across(cells, most, params) if machine.has_threads else sz.const(1)
    down = sz.binary("div", params.threads, across)
    wanted = _wanted(sides, params, across, machine)
    col, outer = sides.columns, sz.const(1)
    if params.inner:
        step, walk, outer = across * params.vector, col, _extent(sides.reduced[:-1])
    else:
        step, walk = down, _extent(sides.reduced)
    if params.deep:
        iterations = sz.ceildiv(col, step) * sz.binary("div", outer, params.unroll)
        most = sz.ceildiv(walk, step)
    else:
        iterations = most = sz.binary("div", walk, step * params.unroll)
        iterations = iterations * outer
    if params.cut:
        walk, step, most = outer, sz.const(params.unroll), sz.binary("div", outer, params.unroll)
    splits = sz.minimum(wanted, sz.minimum(most, sz.binary("div", iterations, MIN_SPLIT_ITERATIONS))) * sz.le(
        MIN_ITERATIONS, iterations
    )
    if machine.task:
        splits = sz.minimum(wanted, sz.binary("div", sides.space.elements, machine.task))
    chunk = sz.ceildiv(sz.ceildiv(walk, sz.maximum(splits, 1)), step) * step
    return Shape(across, down, sz.maximum(sz.ceildiv(walk, chunk), 1), chunk)


def _across(cells: Size, most: Size, params: ReductionParams) -> Size:
    """Threads along `cells` accesses, at most `most`. A power of two where threads along x combine, or rows
    are short, so that the rows of a warp combine in it; else the number that leaves the fewest idle."""
    lanes = sz.minimum(sz.nextpow2(cells), most)
    if params.inner:
        return lanes
    is_wide = sz.le(MIN_UNEVEN, lanes)
    return even_part(cells, most) * is_wide + lanes * (1 - is_wide)


def _cells(sides: Sides, params: ReductionParams, machine: Machine) -> Size:
    """Accesses along the contiguous dim. On a GPU, if that dim is not reduced: along all dims that are not,
    as neighbouring threads continue in the next row."""
    if params.inner or not machine.has_threads:
        return sz.ceildiv(sides.columns, params.vector)
    return sz.ceildiv(_extent(sides.kept), params.vector)


def _wanted(sides: Sides, params: ReductionParams, across: Size, machine: Machine) -> Size:
    """How many splits would keep the machine busy: all blocks run at the same time."""
    waves = min(machine.waves, params.resident or machine.waves)
    if params.inner:
        blocks = sz.ceildiv(_extent(sides.kept), sz.binary("div", params.threads, across))
    else:
        rest = 1 if machine.has_threads else _extent(sides.kept[:-1])
        blocks = sz.ceildiv(_cells(sides, params, machine), across) * rest
    return sz.binary("div", machine.multiprocessors * waves, sz.maximum(blocks, 1))
