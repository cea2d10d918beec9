"""The pass that lets the loads of an unrolled loop be in flight together.

In: statements, some in loops bound to `unroll`. Out: statements of the same meaning. Example:

    for u in 4: { x = args.x[i + u]; use(x) }
becomes
    float x[4];  for u in 4: x[u] = args.x[i + u];  for u in 4: use(x[u])
"""

from __future__ import annotations

from dataclasses import replace

from .loop_ir import Array, Compute, For, Let, Load, Place, Stmt, Uniform
from .traverse import defined, rename, used, with_bodies

Body = "tuple[Stmt, ...]"


def stage(body: Body) -> Body:
    """`for u in 4: x = load; use(x)` -> `for u in 4: x[u] = load; for u in 4: use(x[u])`, so that the loads
    are in flight together. Loops over the same `u` that follow one another share what they load."""
    unrolled = [s for s in body if isinstance(s, For) and s.bind == "unroll"]
    result: list[Stmt] = []
    arrays_of: dict[Stmt, str] = {}  # a statement of some loop's front -> the array that holds its values
    for s in body:
        if isinstance(s, For) and s.bind == "unroll":
            later = [x for x in unrolled[unrolled.index(s) + 1 :] if x.var == s.var and x.extent == s.extent]
            result.extend(_staged(s, later, arrays_of))
        else:
            result.append(with_bodies(s, stage))
    return tuple(result)


def _front(loop: For) -> tuple[list[Stmt], list[Stmt]]:
    """The index computations and loads that can come first, and the rest. Where registers hold a row already,
    other loads stay where they are."""
    front: list[Stmt] = []
    back: list[Stmt] = []
    late: set[str] = set()
    places: set[str] = set()  # names that some place depends on
    for s in reversed(loop.body):
        if isinstance(s, Place) or (isinstance(s, Compute) and s.name in places):
            places |= used(s)
    holds = any(isinstance(s, Load) and s.held for s in loop.body)
    for s in loop.body:
        early = (
            isinstance(s, (Let, Place, Uniform))
            or (isinstance(s, Load) and (s.held if holds else not s.shared))
            or (isinstance(s, Compute) and s.name in places)
        )
        if early and not (used(s) & late):
            front.append(s)
        else:
            back.append(s)
            if defined(s):
                late.add(defined(s))
    return front, back


def _staged(loop: For, later: list[For], arrays_of: dict[Stmt, str]) -> list[Stmt]:
    """`loop` as two, with arrays between them; the loops `later`, over the same iterations, use them too."""
    front, back = _front(loop)
    shared = {s for x in later for s in _front(x)[0]}
    if not back or not (any(isinstance(s, (Load, Uniform)) for s in front) or arrays_of.keys() & set(front)):
        return [loop]
    needed = frozenset().union(*map(used, back))
    fresh = [s for s in front if s not in arrays_of]
    stored = [s for s in fresh if s.name in needed or s in shared]
    for s in stored:
        name, k = s.name, 1
        while name in arrays_of.values():
            name, k = f"{s.name}_{k + 1}", k + 1
        arrays_of[s] = name
    arrays = [
        Array(arrays_of[s], s.ctype, getattr(s, "lanes", 1), loop.extent.value, getattr(s, "held", False))
        for s in stored
    ]
    table = {s.name: f"{arrays_of[s]}[{loop.var}]" for s in front if s in arrays_of}
    loads = [replace(loop, body=tuple(rename(s, table) for s in fresh))] if fresh else []
    rest = replace(loop, body=tuple(rename(s, table) for s in back))
    return [*arrays, *loads, rest]
