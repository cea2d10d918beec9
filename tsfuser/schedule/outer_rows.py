"""The outer row schedule: normalisations over dims that are not contiguous.

In: a segment whose reductions all run over the same dims, without the contiguous one, and results along these
dims that depend on the reductions. Example: a batch norm of a channels-last tensor. Out: one kernel for a
GPU, which reads every element once.

A block owns a *slab* of columns, just wide enough to read memory at full speed. It has `across` threads with
`vector` columns each, and `down` rows of such threads. Each thread keeps `unroll` vectors of each tensor in
registers. The threads along y combine, get the results of their columns, and sweep over their registers
again. If a column does not fit a block, the blocks of a cluster share the slab, and combine in each other's
shared memory. If it does not fit these either, the reduction schedule takes the segment, and everything is
read twice. That reached 0.64 of a copy's bandwidth on an H200; blocks that share a slab, and combine in
memory, reached 0.45.

Example: batch_norm over [1024, 65536] floats has 4 by 64 threads a block, 16 float4 each.

Of columns with a few elements, as of the experts that a token chose, a thread has all: nothing is combined,
and a block is one row of threads with accesses as wide as the machine's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import MOMENTS
from ..ir.size import Size
from ..segment import Segment
from .domain import Access, Domain, domain
from .loops import Cooperative, Reduction, Schedule
from .machine import CLUSTER_BLOCKS, EXCHANGED, MAILBOX_BYTES, Machine, column_bytes
from .placement import costly_terms, with_saved_values
from .pointwise import is_wide, vector_width
from .proposal import Proposal, Stage
from .row_choice import bucket
from .row_params import multiprocessors_of_cluster

MIN_SLAB_BYTES = 64  # bytes of a row of a slab: what memory reads at a time
MAX_LANES = 4  # columns of a thread
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
    cluster: bool = False  # the blocks of a cluster share a slab
    exact: bool = False  # the vectors of all threads fill a column exactly
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

    def parts(self, params: OuterRowParams) -> Size:
        """How many blocks share a slab."""
        return sz.ceildiv(self.length, params.depth) if params.cluster else sz.const(1)

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
    if not _is_busy(call, slabs, params, machine):
        return "the dims that are not reduced have too few elements to keep the machine busy"
    return Proposal(  # another sum costs a cluster another exchange
        params,
        lambda _: [Stage(segment, apply(segment, slabs, params), params)],
        rereads_are_free=not params.cluster,
    )


def choose_outer_row_params(
    call: Call, segment: Segment, slabs: _Slabs, machine: Machine
) -> OuterRowParams | None:
    """The widest slabs that are still enough to keep the machine busy. None if columns are too long, or if
    shared memory has no room for the threads' exchange."""
    vector = vector_width(call, slabs.space, machine)
    # With fewer columns, a thread has more rows of each, and what it does once for a column, such as to
    # combine it with other threads, costs less. Wide vectors may leave too few registers, too.
    if not _are_short(call, slabs):
        vector = min(vector, MAX_LANES)
    halves = [v for v in (vector, vector // 2) if v]
    params = None
    for kept in (_kept_by_block, _kept_by_cluster):
        of_kind = (kept(call, segment, slabs, v, machine) for v in halves)
        found = next((p for p in of_kind if p is not None), None)
        params = found or params
        if found and _is_busy(call, slabs, found, machine):
            break
    if params is None or _exchanged(segment, params) > EXCHANGED:
        return None
    filled = params.depth if not params.cluster else slabs.parts(params) * params.depth
    exact = bool(call.decide(sz.eq(slabs.length, filled)))
    even = bool(call.decide(sz.eq(slabs.space.dims[-1].extent % params.columns, 0)))
    return replace(params, exact=exact, even=even, wide=is_wide(call, slabs.space))


def _is_busy(call: Call, slabs: _Slabs, params: OuterRowParams, machine: Machine) -> bool:
    """Whether there are enough blocks for the multiprocessors."""
    blocks = slabs.count(params.columns) * slabs.parts(params)
    return bool(call.decide(sz.le(machine.multiprocessors // 2, blocks)))


def _kept_by_block(
    call: Call, segment: Segment, slabs: _Slabs, vector: int, machine: Machine
) -> OuterRowParams | None:
    """The parameters for vectors of `vector` columns; None if a block cannot keep such a slab."""
    most = THREADS if _are_short(call, slabs) else MAX_ACROSS
    across = call.decide(sz.minimum(sz.nextpow2(sz.ceildiv(slabs.space.dims[-1].extent, vector)), most))
    least = min(across, _least_across(slabs, vector))
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
            resident = _resident(_held(segment, slabs, vector, unroll), across * down, machine)
            return OuterRowParams(vector, across, down, unroll, resident)
        across //= 2
    return None


def _kept_by_cluster(
    call: Call, segment: Segment, slabs: _Slabs, vector: int, machine: Machine
) -> OuterRowParams | None:
    """The parameters for vectors of `vector` columns, of a slab that several blocks share: as few as can keep
    it, or more if all slabs together would leave multiprocessors idle. None if a cluster cannot keep a
    slab."""
    if not machine.largest_cluster:
        return None
    most_across = sz.nextpow2(sz.ceildiv(slabs.space.dims[-1].extent, vector))
    across = call.decide(sz.minimum(most_across, min(_least_across(slabs, vector), MAX_ACROSS)))
    resident = _resident(REGISTERS, THREADS, machine)
    given = OuterRowParams(vector, across, max(1, THREADS // across), 1, resident, cluster=True)
    params = None
    for unroll in (u for u in VECTORS if _held(segment, slabs, vector, u) <= REGISTERS):
        deep = replace(given, unroll=unroll)
        if not _has_room(call, slabs, deep, machine):
            break
        params = deep
        if call.decide(sz.le(machine.multiprocessors, slabs.count(deep.columns) * slabs.parts(deep))):
            break
    if params is None:
        return None
    if call.varies:
        return params
    # the last block of a slab has as much work as the others
    each = sz.ceildiv(sz.ceildiv(slabs.length, params.down), slabs.parts(params))
    return replace(params, unroll=call.decide(each))


def _has_room(call: Call, slabs: _Slabs, params: OuterRowParams, machine: Machine) -> bool:
    """Whether a cluster may have as many blocks. Larger ones than any device has room for have to run all at
    once. On an H200, where they took turns, they took longer than reading everything twice, as a cluster
    waits until all of its multiprocessors are free: 73 us instead of 64 for [16384, 2048] in bfloat16."""
    blocks = slabs.parts(params)
    most = min(machine.largest_cluster, multiprocessors_of_cluster(machine) * params.resident)
    if call.decide(sz.le(blocks, min(most, machine.cluster_blocks))):
        return True
    at_once = sz.le(slabs.count(params.columns) * blocks, machine.multiprocessors)
    return bool(call.decide(sz.le(blocks, most)) and call.decide(at_once))


def _are_short(call: Call, slabs: _Slabs) -> bool:
    """Whether a thread loads all elements of its columns before it waits."""
    return bool(call.decide(sz.le(slabs.length, MAX_LOADS)))


def _least_across(slabs: _Slabs, vector: int) -> int:
    """Threads along the row of a slab, as few as read memory at full speed."""
    return 1 << (-(-MIN_SLAB_BYTES // (vector * slabs.itemsize)) - 1).bit_length()


def _resident(registers: int, threads: int, machine: Machine) -> int:
    """Blocks of `threads` threads with so many registers that share a multiprocessor."""
    each = max(64, -(-registers // 8) * 8)
    fit = min(machine.registers // each, machine.threads_per_multiprocessor) // threads
    return max(1, min(MAX_RESIDENT, fit))


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


def _exchanged(segment: Segment, params: OuterRowParams) -> int:
    """Bytes of shared memory through which the threads of a block combine, at most, and its cluster."""
    if params.down == 1 and not params.cluster:
        return 0
    each = sum(column_bytes(n, params.columns, params.threads) for n in _numbers(segment))
    numbers = _numbers(segment)
    of_cluster = CLUSTER_BLOCKS * params.columns * sum(numbers) + 2 * MAILBOX_BYTES * len(numbers)
    return each + params.cluster * of_cluster


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
    if params.cluster:
        schedule = schedule.split(
            walk, params.depth, ("part", "share"), exact=params.exact, times=slabs.parts(params)
        )
        schedule = schedule.split("share", params.down, ("u", "ty"), exact=True, times=params.unroll)
    else:
        schedule = schedule.split(walk, params.down, ("u", "ty"), exact=params.exact, times=params.unroll)
    slabs_across = sz.ceildiv(schedule.loop(col).extent, params.columns)
    schedule = schedule.split(
        col, params.columns, ("slab", "chunk"), exact=params.even, times=slabs_across, whole=True
    )
    schedule = schedule.split("chunk", params.vector, ("tx", "lane"), exact=True)
    parts, block = (["part"], "block_set") if params.cluster else ([], "block")
    schedule = schedule.reorder(*outer, "slab", *parts, "ty", "tx", "u", "lane")
    schedule = schedule.fuse_all([*outer, "slab"], block)
    if params.cluster:
        schedule = schedule.fuse("block_set", "part", "block")
    schedule = schedule.bind(block="block", tx="thread_x", ty="thread_y", u="unroll", lane="vector")
    reduction = Reduction(
        ("u",),
        "y",
        "cluster" if params.cluster else "block",
        allreduce=True,
        side_by_side="lane",
        cooperative=Cooperative("block_set", "part") if params.cluster else None,
        columns=params.columns,
    )
    schedule = replace(schedule, resident=params.resident, reduction=reduction)
    return with_saved_values(segment, schedule, "register")
