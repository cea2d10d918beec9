"""Loads of the next row, while threads work on this one.

In: a draft whose schedule prefetches loads, and goes over rows. Out: statements that fetch them into shared
memory, which has room for two iterations, and loads from there. Example:

    fetch x0_prefetched[0 * 512 + tx] = args.x0[...]               the first row
    for iteration in iterations:
      fetch x0_prefetched[(iteration + 1) % 2 * 512 + tx] = ...    the next one
      wait for all but the last group
      x0_m = x0_prefetched[iteration % 2 * 512 + tx]

Where registers hold a row, shared memory has room for one iteration, and each thread fetches its part of the
next row as soon as it has taken that of this one (`refill`):

    fetch x0_prefetched[u * 512 + tx] = args.x0[...]               the first row
    for iteration in iterations:
      wait for all groups
      for u: x0_v[u] = x0_prefetched[u * 512 + tx]
      for u: fetch x0_prefetched[u * 512 + tx] = ...               the next one

There, what all rows share is fetched once, before the first row.
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
from .loop_ir import Array, Fetch, FetchGroup, For, Hide, Load, Stmt
from .stage import NARROW
from .traverse import statements, used, with_bodies

#: Where loads stay that are fetched for each row, and once for all.
_EACH_ROW, _ONCE = ("prefetched", "held"), ("kept",)


def use(draft: Draft) -> None:
    """Lets `draft` load from shared memory what is prefetched: zeros lie there where there is no element.
    What is kept there is loaded where it is used, since registers hold the row."""
    for access in _loads(draft, *_EACH_ROW, *_ONCE):
        name = access.buffer.value.name
        *_, read, computed = draft.loads[name]
        assert isinstance(read, Load)
        own = replace(
            read,
            buffer=_name(access),
            offset=_place(draft, Var(draft.iteration.name)),
            guard=None,
            shared=True,
            own=True,
            held=name in draft.schedule.values_in("held"),
            packed=name in draft.schedule.values_in("held"),
        )
        draft.loads[name] = [own, computed]


def fetches(draft: Draft) -> bool:
    """Whether the next row is fetched."""
    return bool(_loads(draft, *_EACH_ROW))


def before_the_rows(draft: Draft) -> list[Stmt]:
    """Fetches what the first iteration needs, and what all do."""
    accesses = _loads(draft, *_EACH_ROW, *_ONCE)
    return _fetched(draft, accesses, ix.Const(0), "_first") if accesses else []


def before_a_row(draft: Draft) -> list[Stmt]:
    """Fetches the next iteration's operands, and waits for this one's."""
    accesses = _loads(draft, *_EACH_ROW)
    if not accesses:
        return []
    following = _fetched(draft, accesses, ix.add(Var(draft.iteration.name), 1), "_next")
    if _holds(draft):  # an empty group comes last, so that the wait is for all others
        return [FetchGroup(), FetchGroup(wait=True), *following]
    return [*following, FetchGroup(wait=True)]


def refill(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The pass that moves the fetches of the next row behind the loads of this one, where these are held, and
    lets no loop keep for the next one what it has converted."""
    return tuple(
        replace(s, body=_refilled(s)) if isinstance(s, For) and s.bind == "rows" else with_bodies(s, refill)
        for s in body
    )


def _refilled(rows: For) -> tuple[Stmt, ...]:
    """The body of the loop over rows."""
    body = rows.body
    held = [k for k, s in enumerate(body) if isinstance(s, For) and any(map(_is_of_held, s.body))]
    if not held:
        return tuple(_hidden(body, rows.var))
    last = held[-1]
    wait = next(k for k, s in enumerate(body) if isinstance(s, FetchGroup) and s.wait)
    late = [k for k in range(wait + 1, last) if _fetches(body[k])]
    early = [s for k, s in enumerate(body[: last + 1]) if k not in late]
    return tuple(_hidden([*early, *(body[k] for k in late), *body[last + 1 :]], rows.var))


def _hidden(body: Sequence[Stmt], iteration: str) -> list[Stmt]:
    """`body`, in which each loop but the first over packed elements converts them anew."""
    arrays = {s.name for s in body if isinstance(s, Array) and s.packed and s.ctype in NARROW}
    made: list[Stmt] = []
    seen: set[str] = set()
    for s in body:
        if isinstance(s, For) and (mine := [x for x in sorted(used(s)) if x.partition("[")[0] in arrays]):
            s = replace(s, body=(*(Hide(x, iteration) for x in mine if x in seen), *s.body))
            seen.update(mine)
        made.append(s)
    return made


def _is_of_held(s: Stmt) -> bool:
    return isinstance(s, Load) and s.held


def _fetches(s: Stmt) -> bool:
    """Whether `s` fetches, or ends a group of fetches."""
    return any(isinstance(inner, (Fetch, FetchGroup)) for inner in statements((s,)))


def tiles(draft: Draft, start: int) -> list[Tile]:
    """Where shared memory keeps what is fetched, from byte `start` on."""
    each = math.prod(x.extent.a for x in draft.loops) * draft.schedule.threads
    made: list[Tile] = []
    for access in _loads(draft, *_EACH_ROW, *_ONCE):
        dtype = access.buffer.value.dtype
        made.append(Tile(_name(access), dtype.ctype, dtype.itemsize, 1 if _holds(draft) else 2, each, start))
        start += -(-made[-1].bytes // 16) * 16
    return made


def _loads(draft: Draft, *places: str) -> list[Access]:
    """The loads that stay in `places`."""
    names = {name for where in places for name in draft.schedule.values_in(where)}
    return [a for a in draft.schedule.domain.loads if a.buffer.value.name in names]


def _holds(draft: Draft) -> bool:
    """Whether registers hold a row."""
    return bool(draft.schedule.values_in("held"))


def _name(access: Access) -> str:
    return f"{access.buffer.value.name}_prefetched"


def _fetched(draft: Draft, accesses: Sequence[Access], iteration: Expr, suffix: str) -> list[Stmt]:
    """Fetches what `iteration` needs of `accesses`, as one group."""
    lane = draft.lane
    of = {draft.iteration.name: iteration, lane.name: ix.Const(0)}
    at = indices(draft.schedule, draft.params, of, suffix)
    place = ix.substitute(_place(draft, iteration), {lane.name: ix.Const(0)})
    made: list[Stmt] = list(at.lets)
    for access in accesses:
        read = draft.elements.read(access, at)
        guard = guarded(draft, iteration, read.guard)
        made.append(Fetch(_name(access), place, read.buffer, read.offset, lane.extent.a, guard))
    return [*draft.looped(made, draft.loops[:-1]), FetchGroup()]


def guarded(draft: Draft, iteration: Expr, guard: Expr | None) -> Expr:
    """`guard`, where there is such an `iteration` over the rows."""
    more = ix.less(iteration, draft.params.size(draft.iteration.extent, "iterations"))
    return ix.both([more, *([] if guard is None else [guard])])


def _place(draft: Draft, iteration: Expr) -> Expr:
    """Index in shared memory of the element that a thread works on in `iteration`: a thread's vectors lie a
    block apart."""
    at = numbered(draft.loops[:-1], ix.Const(0) if _holds(draft) else ix.mod(iteration, 2))
    x, y = draft.bound("thread.x"), draft.bound("thread.y")
    thread: Expr = Var(x.name)
    if y.extent != sz.const(1):
        thread = ix.add(ix.mul(Var(y.name), draft.params.size(x.extent, "across")), thread)
    at = ix.add(ix.mul(at, draft.schedule.threads), thread)
    return ix.add(ix.mul(at, draft.lane.extent.a), Var(draft.lane.name))
