"""The parameters of the reduction schedule: threads, vectors, splits.

In: a segment of reductions, and the machine. Out: `ReductionParams`, and the sizes of the launch as formulas
of the call's sizes. Example: the bias gradient of [65536, 1024] has 32 threads along columns, 8 along rows,
and 66 splits.
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
from .pointwise import host_lanes, is_whole, is_wide, vector_width

MIN_ITERATIONS = 16  # of a thread: with fewer, a split costs more than it gains, as it is another kernel
MIN_SPLIT_ITERATIONS = 2  # iterations of a thread in each split
LOAD_BYTES = 64  # bytes of input a thread has in flight: there are fewer blocks than in a pointwise kernel
MAX_HOST_COLUMNS = 128  # columns that the host adds up together: with fewer, the processor would not prefetch
MAX_UNROLL = 8  # accesses a thread has in flight, where they are narrow
OTHER_REGISTERS = 16  # registers of a thread for all but data
BUSY_THREADS_PER_SM = 1024  # enough threads: where there are as many columns, no two threads share one


@dataclass(frozen=True)
class ReductionParams:
    """`inner`: the contiguous dim is reduced; `vector`: elements an access; `unroll`: accesses in flight;
    `threads`: of a block; `split`: two kernels; `deep`: of several reduced dims the unrolled loop is along
    the outer ones, not the contiguous one; `cut`: so are the splits; `whole`: a vector is never cut by the
    end of a row; `wide`: 64-bit indices; `resident`: blocks that share a multiprocessor: a compiler that is
    not told saves registers and waits for each load before the next."""

    inner: bool
    vector: int
    unroll: int
    threads: int
    split: bool
    whole: bool
    wide: bool
    deep: bool = False
    cut: bool = False
    resident: int = 0


@dataclass(frozen=True)
class Shape:
    """Launch sizes: threads along and across the contiguous dim, number of splits and iterations in each."""

    across: Size
    down: Size
    splits: Size
    chunk: Size


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
    """`small`: what is read lies in the cache, so that blocks may be narrow."""
    space = domain(call, segment)
    axes = segment.reductions[0].axes
    reduced = tuple(d for d in space.dims if d.axes and d.axes[0] in axes)
    sides = Sides(space, tuple(d for d in space.dims if d not in reduced), reduced)
    params = _choose(call, segment, sides, machine)
    if params.inner and machine.has_threads and len(reduced) > 1:
        params = _deep(call, sides, params, machine)
    return sides, params, _shape(sides, params, machine, small)


def _deep(call: Call, sides: Sides, params: ReductionParams, machine: Machine) -> ReductionParams:
    """`params` with the way in which several reduced dims are walked: short rows leave nothing to unroll or
    split, so outer dims are where there is enough of them."""
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


def _choose(call: Call, segment: Segment, sides: Sides, machine: Machine) -> ReductionParams:
    space = sides.space
    inner = space.dims[-1] in sides.reduced
    wide = is_wide(call, space)
    vector = vector_width(call, space, machine)
    streamed = [
        a
        for a in space.loads
        if a.moves(len(space.dims) - 1)
        and any(a.moves(d) for d, dim in enumerate(space.dims) if dim in sides.reduced)
    ]
    loaded = vector * sum(a.itemsize for a in streamed)
    unroll = 1 << (min(MAX_UNROLL, max(1, LOAD_BYTES // max(loaded, 1))).bit_length() - 1)
    if machine.vectorises_loops:
        lanes = vector if inner else host_lanes(call, sides.columns, MAX_HOST_COLUMNS)
        return ReductionParams(inner, lanes, 1, 1, False, False, wide)
    threads = 256
    kept = sum(
        (3 if op.combine in MOMENTS else 1 if inner else unroll)
        * max(1, op.output.dtype.register.itemsize // 4)
        for op in segment.reductions
    )
    # what all rows share
    hoisted = [a for a in space.loads if a not in streamed and a.moves(len(space.dims) - 1)]
    registers = vector * (kept + len(hoisted)) + unroll * loaded // 4 + OTHER_REGISTERS
    resident = machine.registers // (threads * max(64, -(-registers // 8) * 8))
    return ReductionParams(
        inner, vector, unroll, threads, False, is_whole(call, space, vector), wide, resident=max(1, resident)
    )


def _shape(sides: Sides, params: ReductionParams, machine: Machine, small: bool) -> Shape:
    """Sizes as formulas: they follow the call, the kernel does not."""
    cells = _cells(sides, params, machine)
    lanes = sz.nextpow2(cells)
    most = sz.const(params.threads if params.inner else min(32, params.threads))
    if small and not params.inner:
        most = sz.minimum(most, sz.nextpow2(sz.ceildiv(cells, machine.multiprocessors)))
    elif not params.inner and machine.has_threads:
        sharing = sz.nextpow2(sz.ceildiv(machine.multiprocessors * BUSY_THREADS_PER_SM, cells))
        most = sz.binary("div", params.threads, sz.minimum(sharing, params.threads // 32))
    across = sz.minimum(lanes, most) if machine.has_threads else sz.const(1)
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


def _cells(sides: Sides, params: ReductionParams, machine: Machine) -> Size:
    """Accesses along the contiguous dim; on a GPU, where that is kept, along all kept dims: threads go on
    from one row of it to the next."""
    if params.inner or not machine.has_threads:
        return sz.ceildiv(sides.columns, params.vector)
    return sz.ceildiv(_extent(sides.kept), params.vector)


def _wanted(sides: Sides, params: ReductionParams, across: Size, machine: Machine) -> Size:
    """How many splits would keep the machine busy."""
    if params.inner:
        blocks = sz.ceildiv(_extent(sides.kept), sz.binary("div", params.threads, across))
    else:
        rest = 1 if machine.has_threads else _extent(sides.kept[:-1])
        blocks = sz.ceildiv(_cells(sides, params, machine), across) * rest
    return sz.binary("div", machine.multiprocessors * machine.waves, sz.maximum(blocks, 1))
