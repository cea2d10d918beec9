"""Loads of the next row, while threads work on this one.

In: a draft whose schedule prefetches loads, and goes over rows. Out: statements that fetch them into shared
memory, which has room for two iterations, and loads from there. Example:

    fetch x0_prefetched[0 * 512 + tx] = args.x0[...]               the first row
    for iteration in iterations:
      fetch x0_prefetched[(iteration + 1) % 2 * 512 + tx] = ...    the next one
      wait for all but the last group
      x0_m = x0_prefetched[iteration % 2 * 512 + tx]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..ir import size as sz
from ..schedule.domain import Access
from . import index as ix
from .draft import Draft, numbered
from .index import Expr, Var
from .indices import indices
from .kernel import Tile
from .loop_ir import Fetch, FetchGroup, Load, Stmt


def use(draft: Draft) -> None:
    """Lets `draft` load from shared memory what is prefetched: zeros lie there where there is no element."""
    for access in _accesses(draft):
        *_, read, computed = draft.loads[access.buffer.value.name]
        assert isinstance(read, Load)
        place = _place(draft, Var(draft.iteration.name))
        own = replace(read, buffer=_name(access), offset=place, guard=None, shared=True, own=True)
        draft.loads[access.buffer.value.name] = [own, computed]


def before_the_rows(draft: Draft) -> list[Stmt]:
    """Fetches what the first iteration needs."""
    return _fetched(draft, ix.Const(0), "_first") if _accesses(draft) else []


def before_a_row(draft: Draft) -> list[Stmt]:
    """Fetches what the next iteration needs, and waits for what this one does."""
    if not _accesses(draft):
        return []
    following = ix.add(Var(draft.iteration.name), 1)
    return [*_fetched(draft, following, "_next"), FetchGroup(wait=True)]


def tiles(draft: Draft, start: int) -> list[Tile]:
    """Where shared memory keeps what is fetched, from byte `start` on."""
    each = math.prod(x.extent.a for x in draft.loops) * draft.schedule.threads
    made: list[Tile] = []
    for access in _accesses(draft):
        dtype = access.buffer.value.dtype
        made.append(Tile(_name(access), dtype.ctype, dtype.itemsize, 2, each, start))
        start += -(-made[-1].bytes // 16) * 16
    return made


def _accesses(draft: Draft) -> Sequence[Access]:
    names = draft.schedule.values_in("prefetched")
    return [a for a in draft.schedule.domain.loads if a.buffer.value.name in names]


def _name(access: Access) -> str:
    return f"{access.buffer.value.name}_prefetched"


def _fetched(draft: Draft, iteration: Expr, suffix: str) -> list[Stmt]:
    """Fetches what `iteration` needs, as one group."""
    lane = draft.lane
    of = {draft.iteration.name: iteration, lane.name: ix.Const(0)}
    at = indices(draft.schedule, draft.params, of, suffix)
    place = ix.substitute(_place(draft, iteration), {lane.name: ix.Const(0)})
    more = ix.less(iteration, draft.params.size(draft.iteration.extent, "iterations"))
    made: list[Stmt] = list(at.lets)
    for access in _accesses(draft):
        read = draft.elements.read(access, at)
        guard = ix.both([more, *([read.guard] if read.guard is not None else [])])
        made.append(Fetch(_name(access), place, read.buffer, read.offset, lane.extent.a, guard))
    return [*draft.looped(made, draft.loops[:-1]), FetchGroup()]


def _place(draft: Draft, iteration: Expr) -> Expr:
    """Index in shared memory of the element that a thread works on in `iteration`: a thread's vectors lie a
    block apart."""
    at = numbered(draft.loops[:-1], ix.mod(iteration, 2))
    x, y = draft.bound("thread.x"), draft.bound("thread.y")
    thread: Expr = Var(x.name)
    if y.extent != sz.const(1):
        thread = ix.add(ix.mul(Var(y.name), draft.params.size(x.extent, "across")), thread)
    at = ix.add(ix.mul(at, draft.schedule.threads), thread)
    return ix.add(ix.mul(at, draft.lane.extent.a), Var(draft.lane.name))
