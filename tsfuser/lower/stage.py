"""The pass that lets the loads of an unrolled loop be in flight together.

In: statements, some in loops bound to `unroll`. Out: statements of the same meaning. Example:

    for u in 4: { x = args.x[i + u]; use(x) }
becomes
    float x[4];  for u in 4: x[u] = args.x[i + u];  for u in 4: use(x[u])
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, TypeGuard, Union

from ..ir import dtypes
from .loop_ir import Array, Body, Compute, For, Let, Load, Place, Stmt, Uniform
from .traverse import defined, rename, used, with_bodies

#: Statements of a loop that can come first.
Early: TypeAlias = Union[Let, Place, Uniform, Load, Compute]
MOST_STAGED = 128  # bytes of a thread that one loop alone loads ahead, where registers hold a row
_BYTES = {d.ctype: d.itemsize for d in dtypes.DTYPES.values()}
#: Types in memory of elements that are wider in registers: floats of 16 bits.
NARROW = frozenset(d.ctype for d in dtypes.NARROW)


def stage(body: Body, in_rows: bool = False) -> Body:
    """`for u in 4: x = load; use(x)` -> `for u in 4: x[u] = load; for u in 4: use(x[u])`, so that the loads
    are in flight together. Loops over the same `u` that follow one another share what they load. In a loop
    over rows (`in_rows`), what they share is packed: a thread's registers also hold sums over the rows."""
    unrolled = [s for s in body if isinstance(s, For) and s.bind == "unroll"]
    result: list[Stmt] = []
    arrays_of: dict[Early, str] = {}  # a statement of some loop's front -> the array that holds its values
    for s in body:
        if isinstance(s, For) and s.bind == "unroll":
            later = [x for x in unrolled[unrolled.index(s) + 1 :] if x.var == s.var and x.extent == s.extent]
            result.extend(_staged(s, later, arrays_of, in_rows))
        else:
            rows = in_rows or (isinstance(s, For) and s.bind == "rows")
            result.append(with_bodies(s, lambda inner: stage(inner, rows)))
    return tuple(result)


def _front(loop: For) -> tuple[list[Early], list[Stmt]]:
    """The index computations and loads that can come first, and the rest. Where registers hold a row already,
    other loads stay where they are."""
    front: list[Early] = []
    back: list[Stmt] = []
    late: set[str] = set()
    places: set[str] = set()  # names that some place depends on
    for s in reversed(loop.body):
        if isinstance(s, Place) or (isinstance(s, Compute) and s.name in places):
            places |= used(s)
    holds = any(isinstance(s, Load) and s.held for s in loop.body)
    for s in loop.body:
        if _may_be_early(s, places, holds) and not (used(s) & late):
            front.append(s)
        else:
            back.append(s)
            if defined(s):
                late.add(defined(s))
    return front, back


def _may_be_early(s: Stmt, places: set[str], holds: bool) -> TypeGuard[Early]:
    """As of `_front`, whatever `s` reads; `holds`: registers hold a row already."""
    return (
        isinstance(s, (Let, Place, Uniform))
        or (isinstance(s, Load) and (s.held if holds else not s.shared))
        or (isinstance(s, Compute) and s.name in places)
    )


def _staged(loop: For, later: list[For], arrays_of: dict[Early, str], in_rows: bool) -> list[Stmt]:
    """`loop` as two, with arrays between them; the loops `later`, over the same iterations, use them too."""
    front, back = _front(loop)
    shared = {s for x in later for s in _front(x)[0]}
    front, back = _in_place(loop, front, back, arrays_of, shared)
    if not back or not (any(isinstance(s, (Load, Uniform)) for s in front) or arrays_of.keys() & set(front)):
        return [loop]
    needed = frozenset().union(*map(used, back))
    fresh = [s for s in front if s not in arrays_of]
    stored = [s for s in fresh if s.name in needed or s in shared]
    packs: dict[Early, Load]
    packs = {s: replace(s, packed=True) for s in stored if in_rows and s in shared and _may_be_packed(s)}
    for s in stored:
        name, k = s.name, 1
        while name in arrays_of.values():
            name, k = f"{s.name}_{k + 1}", k + 1
        arrays_of[s] = name
    arrays = [
        Array(
            arrays_of[s],
            s.ctype,
            getattr(s, "lanes", 1),
            loop.trips,
            getattr(packs.get(s, s), "packed", False),
        )
        for s in stored
    ]
    table = {s.name: f"{arrays_of[s]}[{loop.var}]" for s in front if s in arrays_of}
    loads = [replace(loop, body=tuple(rename(packs.get(s, s), table) for s in fresh))] if fresh else []
    rest = replace(loop, body=tuple(rename(s, table) for s in back))
    return [*arrays, *loads, rest]


def _in_place(
    loop: For, front: list[Early], back: list[Stmt], arrays_of: dict[Early, str], shared: set[Early]
) -> tuple[list[Early], list[Stmt]]:
    """`front` and `back`, in which loads of values that all rows share, and one loop alone reads, stay where
    they are if they would fill many registers, and registers hold what earlier loops have loaded: the weights
    of a norm of long rows. A cache has them, so the loop does not wait for memory in each iteration."""
    places = frozenset().union(*map(used, front))  # by which others are loaded
    own = [
        s
        for s in front
        if isinstance(s, Load)
        and s.common
        and s not in arrays_of
        and s not in shared
        and s.name not in places
    ]
    taken = sum(_BYTES[s.ctype] * s.lanes for s in own) * loop.trips
    if not arrays_of.keys() & set(front) or taken <= MOST_STAGED:
        return front, back
    return [s for s in front if s not in own], [*own, *back]


def _may_be_packed(s: Stmt) -> TypeGuard[Load]:
    """Whether `s` loads whole vectors of 16-bit floats."""
    return isinstance(s, Load) and s.lanes > 1 and s.count is None and not s.shared and s.ctype in NARROW
