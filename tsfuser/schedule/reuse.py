"""Results that may be written over an operand.

In: the kernels of a plan. Out: `Reuse`s: pairs of a result that the plan allocates, and an argument of the
group with the same dtype over which the result may be written, if nobody else needs the argument. Either a
thread stores each element over one that it alone reads, after its last read; or no kernel reads the argument
once the first one begins that stores the result. Example, y = gelu(x) * s, where s is one number per row:

    Reuse(allocation=0, argument=0, alike=())

There is no such pair for x - mean(x), if a sweep before the last one that reads x stores the result; for an
argument that other kernels read later; for a transposed operand of the same kernel. There the load comes
before the store because the result is computed from the operand. Integers are left out, because a compiler
may drop that dependence (x * 0). Zeros behind the parts of a result lie where no element of the argument
does: C++ compares the sizes in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..ir.fusion import Fusion
from ..ir.size import Size
from ..segment import BufferKind, Segment
from .domain import Access, Domain
from .proposal import Stage
from .sweeps import sweeps_of


@dataclass(frozen=True)
class Reuse:
    """Allocation `allocation` may be in the memory of group argument `argument`, if each entry of `alike`
    (the extent of a dim, its stride in the allocation, and that in the argument) has extent 1 or equal
    strides."""

    allocation: int
    argument: int
    alike: tuple[tuple[Size, Size, Size], ...] = ()


def reuses(fusion: Fusion, stages: Sequence[Stage]) -> tuple[Reuse, ...]:
    """The pairs of a plan with these kernels, in the order of their launches."""
    if fusion.lookups:  # a call whose index is out of range is run once more, unfused
        return ()
    wanted = {what for kind, what in fusion.results if kind == "input"}
    found: list[Reuse] = []
    for stage in reversed(stages):
        inside = [r for r in _in_kernel(stage) if r.argument not in wanted]
        wanted |= _read(stage.segment)
        pairs = [*inside, *_of_earlier_kernels(fusion, stage.segment, wanted)]
        found = [r for r in pairs if r.allocation < len(fusion.outputs)] + found
    return tuple(found)


def _of_earlier_kernels(fusion: Fusion, segment: Segment, wanted: Collection[int | str]) -> list[Reuse]:
    """The pairs of one kernel, the only one that stores its results. Only `wanted` arguments are needed from
    then on. Where the elements lie does not matter; C++ compares the sizes in memory."""
    return [
        Reuse(store.index, given.index)
        for store in segment.stores
        for given in fusion.inputs
        if store.kind is BufferKind.ALLOCATION
        and given.index not in wanted
        and given.value.dtype == store.value.dtype
    ]


def _read(segment: Segment) -> set[int]:
    """The arguments that the segment reads."""
    return {b.index for b in segment.loads if b.kind is BufferKind.INPUT} | {
        op.seed for op in segment.randoms if op.seed is not None
    }


def _in_kernel(stage: Stage) -> list[Reuse]:
    """The pairs of one kernel."""
    segment, schedule = stage.segment, stage.schedule
    sweeps = sweeps_of(segment, schedule)
    last = sweeps.last_reads({*schedule.values_in("register"), *schedule.values_in("scratch")})
    fetched = {*schedule.values_in("prefetched"), *schedule.values_in("held")}
    tiled = schedule.values_in("tile")
    found = []
    for store in schedule.domain.stores:
        name = store.buffer.value.name
        if store.buffer.kind is not BufferKind.ALLOCATION or not store.buffer.value.dtype.is_floating:
            continue
        operands = _operands(segment, name)
        for load in schedule.domain.loads:
            read = load.buffer.value.name
            is_last = read in fetched or last.get(read, sweeps.numbers[-1] + 1) <= sweeps.level[name]
            if read not in operands or read in tiled or not is_last or not _is_read_once(segment, load):
                continue
            alike = _alike(schedule.domain, store, load)
            if alike is not None:
                found.append(Reuse(store.buffer.index, load.buffer.index, alike))
    return found


def _operands(segment: Segment, name: str) -> set[str]:
    """The names of all values from which `name` is computed; none if a reduction computes `name`."""
    wanted = {name}
    for op in reversed(segment.ops):
        if op.output.name in wanted:
            if op.output.name == name and op in segment.reductions:
                return set()
            wanted |= {v.name for v in op.operands}
    return wanted - {name}


def _is_read_once(segment: Segment, load: Access) -> bool:
    """Whether the load reads an argument from its first element on, and no other load reads that argument."""
    buffer = load.buffer
    if (
        buffer.kind is not BufferKind.INPUT
        or buffer.by_value
        or buffer.windows
        or not (buffer.offset.is_const)
    ):
        return False
    readers = [b for b in segment.loads if (b.kind, b.index) == (BufferKind.INPUT, buffer.index)]
    seeds = {op.seed for op in segment.randoms}
    return buffer.offset.a == 0 and len(readers) == 1 and buffer.index not in seeds


def _alike(domain: Domain, store: Access, load: Access) -> tuple[tuple[Size, Size, Size], ...] | None:
    """The conditions under which each element is stored over the element that is loaded for it, and only one
    thread reads that; None if that is never so."""
    if store.buffer.value.dtype != load.buffer.value.dtype:
        return None
    conditions = []
    for d, dim in enumerate(domain.dims):
        a, b = store.strides[d], load.strides[d]
        if dim.extent.is_const and dim.extent.a == 1:
            continue
        if not (store.moves(d) and load.moves(d)) or (a.is_const and b.is_const and a.a != b.a):
            return None
        if a is not b:
            conditions.append((dim.extent, a, b))
    return tuple(conditions)
