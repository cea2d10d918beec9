"""The schedule for rows that are shorter than a memory access: several of them are one access.

In: a segment without reductions, whose innermost dim has 2, 4 or 8 elements. They lie behind one another with
those of the dim before, but are computed in different ways. Out: a thread has a *group* of neighbouring rows,
and computes once for each row what all its elements share. Example, of a rotary embedding, with x[N, 32, 2]
and cosines and sines of [32]:

    a, b = x.unbind(-1);  y = stack((a * cos - b * sin, a * sin + b * cos), -1)

In bfloat16 a thread stores 4 rows of y in one access of 16 bytes. It reads a and b, every other element of
memory each, in one access, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Pointwise
from ..ir.symbols import COSTLY, find
from ..segment import Segment
from .domain import Access, Domain, domain
from .loops import Schedule
from .machine import Machine
from .pointwise import is_wide, row_alignment, window_alignment
from .proposal import Proposal, Stage

LONGEST = 8  # elements of a short row
BUSY = 2  # a device has enough threads if they fill 1 / BUSY of its places


@dataclass(frozen=True)
class ShortRowsParams:
    """Decisions of the schedule for short rows."""

    row: int  # elements of a row
    group: int  # rows of one access
    unroll: int  # accesses to each tensor that a thread has in flight
    along: str  # the dim of these accesses: what does not vary along it is loaded once; empty for any
    threads: int  # of a block
    wide: bool  # 64-bit indices
    #: loads that read parts of the same rows: the name of each, that of the first of them, and which of the
    #: elements of a row it reads
    parts: tuple[tuple[str, str, int], ...] = ()


def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """Takes segments with short rows, where wider accesses are possible with several of them."""
    if segment.reductions:
        return "it has reductions"
    if machine.vectorises_loops:
        return "a compiler makes the vectors"
    space = domain(call, segment)
    if segment.lookups or not _is_short(call, space, machine):
        return "its rows are not short, or not one behind the other"
    costly = any(isinstance(op, Pointwise) and find(op.symbol).cost >= COSTLY for op in segment.ops)
    room = machine.multiprocessors * machine.threads_per_multiprocessor
    if costly and call.decide(sz.le(space.elements, room)):
        return "its instructions take longer than memory, and the device has room for a thread per element"
    group = _group(call, space, machine)
    if group == 1:
        return "its addresses allow no access to several rows"
    space = _linear(call, space)
    along, unroll = ("", 1) if costly else _unroll(call, space, group, machine)
    params = ShortRowsParams(
        space.dims[-1].extent.a,
        group,
        unroll,
        along,
        machine.threads,
        is_wide(call, space),
        tuple(_parts(call, space, group)),
    )
    return Proposal(params, lambda _: [Stage(segment, apply(space, params), params)])


def _is_short(call: Call, space: Domain, machine: Machine) -> bool:
    """Whether rows are of so few elements that an access has room for several, and every store has them one
    behind the other."""
    if len(space.dims) < 2 or not space.dims[-1].extent.is_const:
        return False
    row = space.dims[-1].extent.a
    if not 1 < row <= LONGEST or row & (row - 1) or _most(space, machine) < 2:
        return False
    windows = [w for w in space.windows if space.numbered(w)[0][-1] is not sz.const(0)]
    if any(w in a.buffer.windows for a in space.loads for w in windows):
        return False
    return all(_is_linear(call, a, row) for a in space.stores)


def _most(space: Domain, machine: Machine) -> int:
    """Rows of the widest access."""
    widest = max(a.itemsize for a in space.stores)
    return machine.access // (widest * space.dims[-1].extent.a)


def _is_linear(call: Call, a: Access, row: int) -> bool:
    """Whether rows along the dim before the last lie one behind the other."""
    return a.is_unit(-1) and a.moves(len(a.strides) - 2) and bool(call.decide(sz.eq(a.strides[-2], row)))


def _linear(call: Call, space: Domain) -> Domain:
    """`space` with the stride from row to row as a number in the accesses to whole rows."""
    row = space.dims[-1].extent

    def known(a: Access) -> Access:
        linear = _is_linear(call, a, row.a)
        return replace(a, strides=(*a.strides[:-2], row, a.strides[-1])) if linear else a

    return replace(space, loads=tuple(map(known, space.loads)), stores=tuple(map(known, space.stores)))


def _group(call: Call, space: Domain, machine: Machine) -> int:
    """Rows of one access: as many as addresses allow, those of whole rows and those of tensors that have one
    element for each row."""
    inner, row = len(space.dims) - 1, space.dims[-1].extent.a
    group = sz.minimum(_most(space, machine), sz.pow2(space.dims[-2].extent))
    group = sz.minimum(group, window_alignment(space, inner - 1))
    for a in space.accesses:
        if a.is_unit(inner - 1) and not a.moves(inner):
            group = sz.minimum(group, sz.binary("div", row_alignment(a, inner - 1), a.itemsize))
        elif _is_linear(call, a, row):
            bytes_each = a.itemsize * row
            group = sz.minimum(group, sz.binary("div", row_alignment(a, inner - 1, inner), bytes_each))
    return call.decide(sz.maximum(group, 1))


def _parts(call: Call, space: Domain, group: int) -> Iterable[tuple[str, str, int]]:
    """The loads that together read whole rows of one tensor, as `ShortRowsParams.parts` says."""
    row = space.dims[-1].extent.a
    families: dict[tuple, list[Access]] = {}
    for a in space.loads:
        if not a.buffer.windows and not a.buffer.by_value and a.moves(len(space.dims) - 2):
            key = (a.buffer.kind, a.buffer.index, a.strides, a.buffer.value.dtype)
            families.setdefault(key, []).append(a)
    for family in families.values():
        if len(family) != row or not call.decide(sz.eq(family[0].strides[-2], row)):
            continue
        if family[0].moves(len(space.dims) - 1):
            continue
        places = [_distance(call, a, family[0], row) for a in family]
        if None in places or sorted(p - min(places) for p in places) != list(range(row)):
            continue
        first = family[places.index(min(places))]
        wanted = group * row * first.itemsize
        aligned = row_alignment(first, len(space.dims) - 2)
        if call.decide(sz.le(min(wanted, 16), aligned)):
            yield from (
                (a.buffer.value.name, first.buffer.value.name, p - min(places))
                for a, p in zip(family, places)
            )


def _distance(call: Call, a: Access, other: Access, most: int) -> int | None:
    """How many elements behind `other` `a` begins; None if they are `most` apart, or further."""
    distance = a.buffer.offset - other.buffer.offset
    near = call.decide(sz.lt(distance, most)) and call.decide(sz.lt(0 - distance, most))
    return call.decide(distance) if near else None


def _unroll(call: Call, space: Domain, group: int, machine: Machine) -> tuple[str, int]:
    """Along which dim a thread has how many accesses to each tensor. It is one that operands lack, such as
    the heads that a rotary embedding turns by the same angles, if enough threads are left; else any, where
    few loads of its own are not enough in flight."""
    row, rows = space.dims[-1].extent.a, len(space.dims) - 2

    def read(loads: Iterable[Access]) -> int:
        """Bytes of an access to each of `loads`."""
        widths = [(a, row if a.moves(rows + 1) else 1) for a in loads if a.moves(rows) or a.moves(rows + 1)]
        return sum(a.itemsize * group * width for a, width in widths)

    stored = [d for d in reversed(range(rows)) if all(a.moves(d) for a in space.stores)]
    along = max(stored, key=lambda d: read(a for a in space.reads if not a.moves(d)), default=-1)
    threads = machine.multiprocessors * machine.threads_per_multiprocessor // BUSY
    if along >= 0 and read(a for a in space.reads if not a.moves(along)):
        for unroll in (4, 2):
            whole = call.decide(sz.eq(space.dims[along].extent % unroll, 0))
            if whole and call.decide(sz.le(threads * group * row * unroll, space.elements)):
                return space.dims[along].name, unroll
    live = group * row * (len(space.stores) + len(space.reads))  # roughly, the registers that an access needs
    unroll = min(4, max(1, machine.flight // max(read(space.reads), 1)), max(1, 96 // live))
    return "", 1 << (unroll.bit_length() - 1)


def _shared(space: Domain, params: ShortRowsParams) -> Domain:
    """`space`, where loads of parts of rows know with which they share accesses."""
    parts = {name: (first, place) for name, first, place in params.parts}

    def shared(a: Access) -> Access:
        if a.buffer.value.name not in parts:
            return a
        first, place = parts[a.buffer.value.name]
        strides = (*a.strides[:-2], sz.const(params.row), a.strides[-1])
        return replace(a, part_of=first, place=place, strides=strides)

    return replace(space, loads=tuple(map(shared, space.loads)))


def apply(space: Domain, params: ShortRowsParams) -> Schedule:
    """The loops: a thread has `group` neighbours of the dim before the last (one of `across` threads along
    it), of `u` others."""
    schedule = Schedule.over(_shared(space, params), params.threads, params.wide)
    *others, rows, lane = (x.name for x in schedule.loops)
    g, u = params.group, params.unroll
    bound = {"block": "block", "tx": "thread_x", "u": "unroll", "group": "group", lane: "vector"}
    if not others:
        schedule = schedule.split(rows, params.threads * g * u, ("block", "piece"), whole=True)
        schedule = schedule.split("piece", params.threads * g, ("u", "chunk"), exact=True)
        schedule = schedule.split("chunk", g, ("tx", "group"), exact=True)
        return schedule.reorder("block", "tx", "u", "group", lane).bind(**bound)
    if params.along:
        schedule, others = _along(schedule, params, others)
    schedule = schedule.fuse_all(others, "other")
    across = sz.minimum(sz.nextpow2(sz.ceildiv(schedule.loop(rows).extent, g)), 32)
    down = sz.binary("div", params.threads, across)
    schedule = schedule.split(rows, across * g, ("row_block", "chunk"), whole=True)
    schedule = schedule.split("chunk", g, ("tx", "group"), exact=True)
    if params.along:
        schedule = schedule.split("other", down, ("other_block", "ty"))
    else:
        schedule = schedule.split("other", down * u, ("other_block", "down"))
        schedule = schedule.split("down", down, ("u", "ty"), exact=True)
    schedule = schedule.reorder("other_block", "row_block", "ty", "tx", "u", "group", lane)
    return schedule.fuse("other_block", "row_block", "block").bind(ty="thread_y", **bound)


def _along(schedule: Schedule, params: ShortRowsParams, others: list[str]) -> tuple[Schedule, list[str]]:
    """`schedule` with a loop `u` over neighbours along one of the dims `others`, behind all of them, and what
    the others are then."""
    times = sz.binary("div", schedule.loop(params.along).extent, params.unroll)
    schedule = schedule.split(params.along, params.unroll, ("part", "u"), exact=True, times=times)
    others = ["part" if x == params.along else x for x in others]
    inner = [x.name for x in schedule.loops if x.name not in (*others, "u")]
    return schedule.reorder(*others, "u", *inner), others
