"""The pass that lets the loads of a tile and those of other operands be in flight together.

In: statements, after `stage`. Out: statements of the same meaning. Example:

    for k: t[k] = args.x0[...];  for k: tile[...] = t[k];  barrier;  for u: y[u] = args.x1[...];  ...
becomes
    for k: t[k] = args.x0[...];  for u: y[u] = args.x1[...];  for k: tile[...] = t[k];  barrier;  ...
"""

from __future__ import annotations

from .loop_ir import Array, Barrier, For, Let, Load, Stmt, Store
from .traverse import statements, with_bodies


def overlap(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Moves the loads that follow the barrier behind a tile in front of the stores to the tile."""
    made = [with_bodies(s, overlap) for s in body]
    at = next((k for k, s in enumerate(made) if _fills(s)), None)
    end = next((k for k, s in enumerate(made) if at is not None and k > at and isinstance(s, Barrier)), None)
    if end is None:
        return tuple(made)
    last = next((k for k in range(end + 1, len(made)) if not _loads(made[k])), len(made))
    return (*made[:at], *made[end + 1 : last], *made[at : end + 1], *made[last:])


def _fills(s: Stmt) -> bool:
    """Whether `s` stores to a tile."""
    inside = statements((s,)) if not isinstance(s, For) or s.bind != "rows" else ()
    return any(isinstance(x, Store) and x.shared for x in inside)


def _loads(s: Stmt) -> bool:
    """Whether `s` only loads from memory and computes where to."""
    if isinstance(s, For):
        return s.bind == "unroll" and all(map(_loads, s.body))
    return isinstance(s, (Let, Array)) or (isinstance(s, Load) and not s.shared)
