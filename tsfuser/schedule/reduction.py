"""The reduction schedule: one pass over the data, split over blocks where the outputs alone would leave the
GPU idle.

In: a segment of reductions over the same axes, and of elementwise results that are stored on the way. Out:
one kernel, or two: the first leaves a partial result for each split, the second combines them. Threads walk
along the contiguous dim either way. *Inner*: that dim is reduced, and the threads of a row meet in shared
memory. *Outer*: it is kept, each thread owns `vector` columns, and the rows of the block meet, of which there
are the fewer the more columns there are. Where outer
dims are reduced as well, a thread has several rows of them in flight, and splits are parts of them if there
are enough. Example: the bias gradient of [65536, 1024] is an outer reduction with 66 splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import MOMENTS, PARTIAL_MOMENTS, Axis, Reduce, Value
from ..ir.size import Size
from ..segment import Allocations, Buffer, Segment
from .domain import Dim, Domain, domain
from .loops import Reduction, Schedule
from .machine import Machine
from .pointwise import host_lanes, is_whole, is_wide, vector_width, with_grain
from .proposal import Proposal, Stage

LEAST = 16  # turns of a thread below which a split, which is another kernel, would cost more than it gains
SHORTEST = 2  # turns that a split has
# bytes of input a thread has under way: few blocks are resident, so each thread has more to do than in a
# pointwise kernel
FLIGHT = 64
# columns that the host adds up at the same time: with fewer, the processor would not see a stream to fetch
# ahead
STRIP = 128
DEEPEST = 8  # accesses a thread has under way, where they are narrow
OTHERS = 16  # registers of a thread for all but data
BUSY = 1024  # threads a multiprocessor that do: where there are as many columns, nobody shares one


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
class _Shape:
    """Launch sizes: threads along and across the contiguous dim, number of splits and iterations in each."""

    across: Size
    down: Size
    splits: Size
    chunk: Size


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes every segment of reductions on which nothing in it depends."""
    if not segment.reductions:
        return "it has no reduction"
    if segment.uses_reductions:
        return "something depends on its reductions"
    space, kept, reduced, params, shape = _plan(call, segment, machine)
    if call.decide(sz.lt(1, shape.splits)):
        params = replace(params, split=True)
        return Proposal(
            params, lambda allocations: _split(call, segment, machine, params, shape, allocations)
        )
    return Proposal(
        params, lambda _: [Stage(segment, apply(space, kept, reduced, params, shape, machine, None), params)]
    )


def _split(
    call: Call,
    segment: Segment,
    machine: Machine,
    params: ReductionParams,
    shape: _Shape,
    allocations: Allocations,
) -> list[Stage]:
    """Two kernels: partial results, then their combination."""
    multiple = 1 if params.inner else params.vector  # each split begins at a whole access
    first, second, distance = parted(
        segment, segment.reductions, Axis("splits", shape.splits), multiple, allocations
    )
    space, kept, reduced, _, _ = _plan(call, first, machine)
    return [
        Stage(first, apply(space, kept, reduced, params, shape, machine, distance), params),
        finish(call, second, machine),
    ]


def parted(
    segment: Segment, ops, axis: Axis, multiple: int, allocations: Allocations
) -> tuple[Segment, Segment, Size]:
    """`segment` with the reductions `ops` in two steps: (the segment that leaves one result of each a step of
    `axis`, the one that combines these, elements from one such result to the next, a multiple of `multiple`).
    The first sees its results as tensors without that axis; the schedule tells where each begins."""
    stores = {b.value.name: b for b in segment.stores}
    partials: dict[str, Buffer] = {}
    second, first = [], [op for op in segment.ops if op not in ops]
    for op in ops:
        sources = _partial(op, ops)
        for source in (s for s in sources if s.output.name not in partials):
            dtype = op.output.dtype.register
            partials[source.output.name] = allocations.new(
                Value(f"{source.output.name}_partial", dtype, (axis, *op.output.dims)), multiple
            )
            first.append(replace(source, output=Value(source.output.name, dtype, op.output.dims)))
        second.append(
            replace(op, operands=tuple(partials[s.output.name].value for s in sources), axes=(axis,))
        )
    early = {
        name: replace(b, strides=b.strides[1:], value=replace(b.value, dims=b.value.dims[1:], name=name))
        for name, b in partials.items()
    }
    targets = tuple(stores.pop(op.output.name) for op in second)
    first = replace(segment, ops=tuple(first), stores=(*stores.values(), *early.values()))
    distance = next(iter(partials.values())).strides[0]
    return (
        first,
        Segment(tuple(second), tuple(partials.values()), targets, (axis, *second[0].output.axes)),
        distance,
    )


def _same(a: Reduce, b: Reduce) -> bool:
    """Whether both are of the same data, in the same dtype."""
    of_data = a.operands == b.operands and set(a.axes) == set(b.axes)
    return of_data and a.output.dtype.register is b.output.dtype.register


def _partial(op: Reduce, ops) -> list[Reduce]:
    """The reductions of a part of the data from which `op`, one of `ops`, is combined: itself, or all that
    moments need, once for those that share it."""
    if op.combine not in MOMENTS:
        return [op]
    first = next(other for other in ops if other.combine in MOMENTS and _same(op, other)).output
    return [
        replace(op, name=part, combine=part, output=replace(first, name=f"{part}_of_{first.name}"))
        for part in PARTIAL_MOMENTS
    ]


def finish(call: Call, segment: Segment, machine: Machine) -> Stage:
    """The kernel that combines partial results."""
    space, kept, reduced, params, shape = _plan(call, segment, machine, small=True)
    schedule = apply(space, kept, reduced, params, shape, machine, None)
    return Stage(
        segment,
        replace(schedule, reduction=replace(schedule.reduction, combines_partials=machine.overlaps_launches)),
        params,
    )


def _plan(
    call: Call, segment: Segment, machine: Machine, small: bool = False
) -> tuple[Domain, list[Dim], list[Dim], ReductionParams, _Shape]:
    space = domain(call, segment)
    kept, reduced = _sides(space, segment.reductions[0])
    params = _choose(call, segment, space, reduced, machine)
    if params.inner and machine.has_threads and len(reduced) > 1:
        params = _deep(call, space, kept, reduced, params, machine)
    return space, kept, reduced, params, _shape(space, kept, reduced, params, machine, small)


def _deep(
    call: Call, space: Domain, kept: list[Dim], reduced: list[Dim], params: ReductionParams, machine: Machine
) -> ReductionParams:
    """`params` with the way in which several reduced dims are walked: short rows leave nothing to unroll or
    split, so outer dims are where there is enough of them."""
    outer = _extent(space, reduced[:-1])
    if not call.decide(sz.le(params.unroll, outer)):
        return params
    shape = _shape(space, kept, reduced, replace(params, deep=True), machine, False)
    wanted = _wanted(space, kept, params, shape.across, machine)
    along, below = (
        sz.binary("div", outer, params.unroll),
        sz.ceildiv(space.dims[-1].extent, shape.across * params.vector),
    )
    return replace(
        params, deep=True, cut=bool(call.decide(sz.le(sz.minimum(wanted, below), sz.minimum(wanted, along))))
    )


def _sides(space: Domain, op: Reduce) -> tuple[list[Dim], list[Dim]]:
    """The kept and the reduced dims."""
    reduced = [d for d in space.dims if d.axes and d.axes[0] in op.axes]
    return [d for d in space.dims if d not in reduced], reduced


def _extent(space: Domain, dims: list[Dim]) -> Size:
    return sz.product([d.extent for d in dims])


def _choose(
    call: Call, segment: Segment, space: Domain, reduced: list[Dim], machine: Machine
) -> ReductionParams:
    inner = space.dims[-1] in reduced
    wide = is_wide(call, space)
    vector = vector_width(call, space, machine)
    streamed = [
        a
        for a in space.loads
        if a.moves(len(space.dims) - 1)
        and any(a.moves(d) for d, dim in enumerate(space.dims) if dim in reduced)
    ]
    loaded = vector * sum(a.itemsize for a in streamed)
    unroll = 1 << (min(DEEPEST, max(1, FLIGHT // max(loaded, 1))).bit_length() - 1)
    if machine.vectorises_loops:
        lanes = vector if inner else host_lanes(call, space.dims[-1].extent, STRIP)
        return ReductionParams(inner, lanes, 1, 1, False, False, wide)
    threads = 256
    kept = sum(
        (3 if op.combine in MOMENTS else 1 if inner else unroll)
        * max(1, op.output.dtype.register.itemsize // 4)
        for op in segment.reductions
    )
    # what all rows share
    hoisted = [a for a in space.loads if a not in streamed and a.moves(len(space.dims) - 1)]
    registers = vector * (kept + len(hoisted)) + unroll * loaded // 4 + OTHERS
    resident = machine.registers // (threads * max(64, -(-registers // 8) * 8))
    return ReductionParams(
        inner, vector, unroll, threads, False, is_whole(call, space, vector), wide, resident=max(1, resident)
    )


def _shape(
    space: Domain, kept: list[Dim], reduced: list[Dim], params: ReductionParams, machine: Machine, small: bool
) -> _Shape:
    """Sizes as programs: they follow the call, the kernel does not. `small`: what is read lies in the cache,
    so that blocks may be narrow."""
    cells = _cells(space, kept, params, machine)
    lanes = sz.nextpow2(cells)
    most = sz.const(params.threads if params.inner else min(32, params.threads))
    if small and not params.inner:
        most = sz.minimum(most, sz.nextpow2(sz.ceildiv(cells, machine.multiprocessors)))
    elif not params.inner and machine.has_threads:
        sharing = sz.nextpow2(sz.ceildiv(machine.multiprocessors * BUSY, cells))
        most = sz.binary("div", params.threads, sz.minimum(sharing, params.threads // 32))
    across = sz.minimum(lanes, most) if machine.has_threads else sz.const(1)
    down = sz.binary("div", params.threads, across)
    wanted = _wanted(space, kept, params, across, machine)
    col, outer = space.dims[-1].extent, sz.const(1)
    if params.inner:
        step, walk, outer = across * params.vector, col, _extent(space, reduced[:-1])
    else:
        step, walk = down, _extent(space, reduced)
    if params.deep:
        iterations, most = (
            sz.ceildiv(col, step) * sz.binary("div", outer, params.unroll),
            sz.ceildiv(walk, step),
        )
    else:
        iterations = most = sz.binary("div", walk, step * params.unroll)
        iterations = iterations * outer
    if params.cut:
        walk, step, most = outer, sz.const(params.unroll), sz.binary("div", outer, params.unroll)
    splits = sz.minimum(wanted, sz.minimum(most, sz.binary("div", iterations, SHORTEST))) * sz.le(
        LEAST, iterations
    )
    if machine.task:
        splits = sz.minimum(wanted, sz.binary("div", space.elements, machine.task))
    chunk = sz.ceildiv(sz.ceildiv(walk, sz.maximum(splits, 1)), step) * step
    return _Shape(across, down, sz.maximum(sz.ceildiv(walk, chunk), 1), chunk)


def _cells(space: Domain, kept: list[Dim], params: ReductionParams, machine: Machine) -> Size:
    """Accesses along the contiguous dim; on a GPU, where that is kept, along all kept dims: threads go on
    from one row of it to the next."""
    if params.inner or not machine.has_threads:
        return sz.ceildiv(space.dims[-1].extent, params.vector)
    return sz.ceildiv(_extent(space, kept), params.vector)


def _wanted(space: Domain, kept: list[Dim], params: ReductionParams, across: Size, machine: Machine) -> Size:
    """How many splits would keep the machine busy."""
    if params.inner:
        blocks = sz.ceildiv(_extent(space, kept), sz.binary("div", params.threads, across))
    else:
        rest = 1 if machine.has_threads else _extent(space, [d for d in kept if d is not space.dims[-1]])
        blocks = sz.ceildiv(_cells(space, kept, params, machine), across) * rest
    return sz.binary("div", machine.multiprocessors * machine.waves, sz.maximum(blocks, 1))


def apply(
    space: Domain,
    kept: list[Dim],
    reduced: list[Dim],
    params: ReductionParams,
    shape: _Shape,
    machine: Machine,
    partial: Size | None,
) -> Schedule:
    """`partial`: elements between the partial results of two splits, None where the result is final."""
    schedule = Schedule.over(space, params.threads, params.wide)
    build = _inner if params.inner else _outer
    return with_grain(
        replace(
            build(
                schedule, [d.name for d in kept], [d.name for d in reduced], params, shape, machine, partial
            ),
            resident=params.resident,
        ),
        machine,
    )


def _combined(loops: tuple[str, ...], axis: str, partial: Size | None, machine: Machine) -> Reduction:
    """How results are combined; `partial` as for `apply`."""
    leads = partial is not None and machine.overlaps_launches
    part = None if partial is None else ("part", partial)
    scope = "block" if partial is None else "grid"
    return Reduction(loops, axis, scope, part, in_double=not machine.has_threads, leads=leads)


def _lanes(machine: Machine) -> str:
    """What the loop over lanes becomes: one access, or a loop of which the compiler makes vectors."""
    return "simd" if machine.vectorises_loops else "vector"


def _fused(schedule: Schedule, names: list[str], into: str) -> tuple[Schedule, str]:
    return (schedule.fuse_all(names, into), into) if len(names) > 1 else (schedule, names[0])


def _outer(
    schedule: Schedule, kept, reduced, params: ReductionParams, shape: _Shape, machine: Machine, partial
) -> Schedule:
    *rows, col = kept
    if rows and machine.has_threads:  # a vector never crosses from one row to the next
        schedule = schedule.reorder(*reduced, *kept).fuse_all(kept, "cell")
        rows, col = [], "cell"
    schedule = schedule.reorder(*rows, *reduced, col)
    schedule, walk = _fused(schedule, reduced, "walk")
    schedule, walk, parts = _parted(schedule, walk, shape, partial, False)
    schedule = schedule.split(col, shape.across * params.vector, ("col_block", "chunk"), whole=params.whole)
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    schedule = schedule.split(
        walk, shape.down * params.unroll, ("r", "round"), exact=not machine.has_threads
    ).split("round", shape.down, ("u", "ty"), exact=True)
    schedule = schedule.reorder(*rows, *parts, "col_block", "ty", "tx", "r", "u", "lane")
    schedule = schedule.fuse_all([*rows, *parts, "col_block"], "block")
    schedule = schedule.bind(
        block="block", tx="thread_x", ty="thread_y", r="serial", u="unroll", lane=_lanes(machine)
    )
    return replace(schedule, reduction=_combined(("r", "u"), "y", partial, machine))


def _parted(
    schedule: Schedule, walk: str, shape: _Shape, partial, whole: bool
) -> tuple[Schedule, str, list[str]]:
    """The reduced loop cut into chunks, one a split, if there are several: (schedule, loop over a chunk,
    loops over chunks)."""
    if partial is None:
        return schedule, walk, []
    return schedule.split(walk, shape.chunk, ("part", "step"), whole=whole), "step", ["part"]


def _inner(
    schedule: Schedule, kept, reduced, params: ReductionParams, shape: _Shape, machine: Machine, partial
) -> Schedule:
    *outer, col = reduced
    schedule = schedule.reorder(*kept, *outer, col)
    serial = ["r", "u", "lane"]
    bound = {"tx": "thread_x", "r": "serial", "u": "unroll", "lane": _lanes(machine), "block": "block"}
    blocks: list[str] = []
    if outer:
        schedule, walk = _fused(schedule, outer, "walk")
        if params.cut:
            schedule, walk, blocks = _parted(schedule, walk, shape, partial, False)
        if params.deep:
            schedule, walk = schedule.split(walk, params.unroll, ("w", "u")), "w"
        serial.insert(0, walk)
    step = col
    if not params.cut:
        schedule, step, blocks = _parted(schedule, col, shape, partial, params.whole)
    if params.deep:
        schedule = schedule.split(step, shape.across * params.vector, ("r", "chunk"), whole=params.whole)
    else:
        schedule = schedule.split(
            step, shape.across * (params.vector * params.unroll), ("r", "round"), whole=params.whole
        )
        schedule = schedule.split("round", shape.across * params.vector, ("u", "chunk"), exact=True)
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    threads = ["tx"]
    if kept:
        schedule, row = _fused(schedule, kept, "row")
        schedule = schedule.split(row, shape.down, ("row_block", "ty"), exact=not machine.has_threads)
        blocks, threads, bound["ty"] = ["row_block", *blocks], ["ty", "tx"], "thread_y"
    schedule = schedule.reorder(*blocks, *threads, *serial)
    schedule = schedule.fuse_all(blocks, "block") if blocks else schedule.with_single("block")
    schedule = schedule.bind(**bound)
    return replace(schedule, reduction=_combined(tuple(serial), "x", partial, machine))
