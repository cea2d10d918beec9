"""The outer row schedule: normalisations over dims that are not contiguous.

In: a segment whose reductions all run over the same dims, without the contiguous one, and results along these
dims that depend on the reductions. Example: a batch norm of a channels-last tensor. Out: one kernel for a
GPU, which reads every element once.

A block owns a *slab* of columns, just wide enough to read memory at full speed. It has `across` threads with
`vector` columns each, and `down` rows of such threads. Each thread keeps `unroll` vectors of each tensor in
registers. The threads along y combine, get the results of their columns, and sweep over their registers
again. If columns do not fit, the reduction schedule takes the segment, and everything is read twice. That
reached 0.64 of a copy's bandwidth on an H200; blocks that share a slab, and combine in memory, reached 0.45.

Example: batch_norm over [1024, 65536] floats has 4 by 64 threads a block, 16 float4 each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import MOMENTS
from ..ir.size import Size
from ..segment import Segment
from .domain import Access, Domain, domain
from .loops import Reduction, Schedule
from .machine import EXCHANGED, Machine, column_bytes
from .placement import costly_terms, with_saved_values
from .pointwise import is_wide, vector_width
from .proposal import Proposal, Stage
from .row_choice import bucket

MIN_SLAB_BYTES = 64  # bytes of a row of a slab: what memory reads at a time
MAX_ACROSS = 32  # threads along a row of a slab
THREADS = 256  # threads of a block
VECTORS = (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)  # vectors of each tensor that a thread keeps
LOAD_BYTES = 64  # bytes of input that a thread loads before it waits, where columns are short
MAX_LOADS = 4  # vectors of each tensor that a thread loads before it waits
REGISTERS = 128  # registers of a thread
OTHER_REGISTERS = 28  # of these, for everything but data
MAX_RESIDENT = 16  # blocks that share a multiprocessor, at most
MIN_BLOCKS_PER_SM = 2  # blocks of a multiprocessor: one has work while another waits


@dataclass(frozen=True)
class OuterRowParams:
    """Decisions of the outer row schedule."""

    vector: int  # columns per access
    across: int  # threads of a block along a row of a slab
    down: int  # threads of a block along a column
    unroll: int  # vectors of each tensor that a thread keeps
    resident: int  # blocks that share a multiprocessor
    exact: bool = False  # the threads' vectors fill a column exactly
    even: bool = False  # slabs fill a row exactly
    wide: bool = False  # 64-bit indices

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.across * self.down

    @property
    def columns(self) -> int:
        """Columns of a slab."""
        return self.across * self.vector

    @property
    def depth(self) -> int:
        """Rows of a slab that a block keeps."""
        return self.down * self.unroll


@dataclass(frozen=True)
class _Slabs:
    """A domain, and the names of its dims that are reduced (`along`)."""

    space: Domain
    along: tuple[str, ...]

    @property
    def length(self) -> Size:
        """Elements of a column."""
        return sz.product([d.extent for d in self.space.dims if d.name in self.along])

    def count(self, columns: int) -> Size:
        """How many slabs of `columns` columns there are."""
        *outer, inner = [d.extent for d in self.space.dims if d.name not in self.along]
        return sz.product([*outer, sz.ceildiv(inner, columns)])

    @property
    def streamed(self) -> list[Access]:
        """The tensors that are read along columns."""
        reduced = [d for d, dim in enumerate(self.space.dims) if dim.name in self.along]
        return [a for a in self.space.reads if any(map(a.moves, reduced))]

    @property
    def itemsize(self) -> int:
        """Bytes of the narrowest tensor that is read along columns."""
        return min((a.itemsize for a in self.streamed), default=4)


def _slabs(call: Call, segment: Segment) -> _Slabs | None:
    """The slabs of a segment; None if its reductions run over different dims, or over the contiguous one."""
    axes = {axis for op in segment.reductions for axis in op.axes}
    if not axes or any(set(op.axes) != axes for op in segment.reductions):
        return None
    space = domain(call, segment)
    if axes & set(space.dims[-1].axes):
        return None
    return _Slabs(space, tuple(d.name for d in space.dims if set(d.axes) & axes))


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments in which results depend on reductions over all but the contiguous dim."""
    if not segment.uses_reductions:
        return "nothing depends on a reduction"
    if not machine.has_threads:
        return "blocks have no threads that could combine"
    slabs = _slabs(call, segment)
    if slabs is None:
        return "its reductions run over the contiguous dim, or over different dims"
    if not call.decide(sz.lt(0, slabs.space.elements)):
        return "it has no elements"
    params = choose_outer_row_params(call, segment, slabs, machine)
    if params is None:
        return "its reduced dims have more elements than a block can keep"
    if call.decide(sz.lt(slabs.count(params.columns), machine.multiprocessors // 2)):
        return "the dims that are not reduced have too few elements to keep the machine busy"
    return Proposal(
        params, lambda _: [Stage(segment, apply(segment, slabs, params), params)], rereads_are_free=True
    )


def choose_outer_row_params(
    call: Call, segment: Segment, slabs: _Slabs, machine: Machine
) -> OuterRowParams | None:
    """The widest slabs that are still enough to keep the machine busy. None if columns are too long, or if
    shared memory has no room for what threads exchange."""
    vector = vector_width(call, slabs.space, machine)
    # wide vectors of narrow dtypes may leave too few registers
    halves = [v for v in (vector, vector // 2) if v]
    params = next(
        (params for v in halves if (params := _kept_by_block(call, segment, slabs, v, machine))), None
    )
    if params is None or _exchanged(segment, params.columns, params.threads) > EXCHANGED:
        return None
    exact = bool(call.decide(sz.eq(slabs.length, params.depth)))
    even = bool(call.decide(sz.eq(slabs.space.dims[-1].extent % params.columns, 0)))
    return replace(params, exact=exact, even=even, wide=is_wide(call, slabs.space))


def _kept_by_block(
    call: Call, segment: Segment, slabs: _Slabs, vector: int, machine: Machine
) -> OuterRowParams | None:
    """The parameters for vectors of `vector` columns; None if a block cannot keep such a slab."""
    across = call.decide(sz.minimum(sz.nextpow2(sz.ceildiv(slabs.space.dims[-1].extent, vector)), MAX_ACROSS))
    least = min(across, 1 << (-(-MIN_SLAB_BYTES // (vector * slabs.itemsize)) - 1).bit_length())
    deepest = next((u for u in VECTORS if _held(segment, slabs, vector, u) <= REGISTERS), 0)
    flight = max(
        1, min(deepest, MAX_LOADS, LOAD_BYTES // (vector * max(1, sum(a.itemsize for a in slabs.streamed))))
    )
    while across >= least:
        down = max(1, THREADS // across)
        narrower = across > least and call.decide(
            sz.lt(slabs.count(across * vector), machine.multiprocessors * MIN_BLOCKS_PER_SM)
        )
        if not narrower and call.decide(sz.le(slabs.length, down * deepest)):
            down = max(
                call.decide(sz.minimum(sz.nextpow2(sz.ceildiv(slabs.length, flight)), down)), 32 // across
            )
            unroll = call.decide(bucket(sz.ceildiv(slabs.length, down)))
            registers = max(64, -(-_held(segment, slabs, vector, unroll) // 8) * 8)
            resident = min(machine.registers // registers, machine.threads_per_multiprocessor) // (
                across * down
            )
            return OuterRowParams(vector, across, down, unroll, max(1, min(MAX_RESIDENT, resident)))
        across //= 2
    return None


def _held(segment: Segment, slabs: _Slabs, vector: int, unroll: int) -> int:
    """Registers of a thread for its part of a slab, for values that are computed from it and saved, and for
    values that a column has one of."""
    inner = len(slabs.space.dims) - 1
    bytes_each = sum(a.itemsize if a.moves(inner) else -(-4 // vector) for a in slabs.streamed)
    bytes_each += (
        sum(a.itemsize for a in slabs.space.lookups)
        + 4 * len(slabs.space.randoms)
        + 4 * costly_terms(segment)
    )
    shared = [a for a in slabs.space.reads if a not in slabs.streamed and a.moves(inner)]
    numbers = (
        1 + len(shared) + sum(max(1, op.output.dtype.register.itemsize // 4) for op in segment.reductions)
    )
    return vector * (unroll * bytes_each // 4 + numbers) + OTHER_REGISTERS


def _exchanged(segment: Segment, columns: int, threads: int) -> int:
    """Bytes of shared memory through which the threads of a block combine, at most."""
    return sum(column_bytes(n, columns, threads) for n in _numbers(segment))


def _numbers(segment: Segment) -> list[int]:
    """The bytes of each accumulator of a column. Moments of the same data share one."""
    sizes = {}
    for op in segment.reductions:
        shared = op.combine in MOMENTS
        sizes[op.operands if shared else op.output] = op.output.dtype.register.itemsize * (4 if shared else 1)
    return list(sizes.values())


def apply(segment: Segment, slabs: _Slabs, params: OuterRowParams) -> Schedule:
    schedule = Schedule.over(slabs.space, params.threads, params.wide)
    *outer, col = [x.name for x in schedule.loops if x.name not in slabs.along]
    schedule, walk = schedule.reorder(*outer, *slabs.along, col), slabs.along[0]
    if len(slabs.along) > 1:
        schedule, walk = schedule.fuse_all(list(slabs.along), "walk"), "walk"
    schedule = schedule.split(walk, params.down, ("u", "ty"), exact=params.exact, times=params.unroll)
    slabs_across = sz.ceildiv(schedule.loop(col).extent, params.columns)
    schedule = schedule.split(
        col, params.columns, ("slab", "chunk"), exact=params.even, times=slabs_across, whole=True
    )
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    schedule = schedule.reorder(*outer, "slab", "ty", "tx", "u", "lane").fuse_all([*outer, "slab"], "block")
    schedule = schedule.bind(block="block", tx="thread_x", ty="thread_y", u="unroll", lane="vector")
    reduction = Reduction(("u",), "y", allreduce=True, side_by_side="lane", columns=params.columns)
    schedule = replace(schedule, resident=params.resident, reduction=reduction)
    return with_saved_values(segment, schedule, "register")
