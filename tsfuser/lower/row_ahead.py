"""What a row has one of, loaded while threads work on the row before.

In: a draft whose schedule fetches the next row (`prefetch`). Out: statements that keep such values in
registers, an iteration ahead, so that no row begins with a wait for memory. Example, of the mean of a row:

    x2_ahead[0] = args.x2[...]           of the first row
    for iteration in iterations:
      x2_now = x2_ahead[0]
      x2_ahead[0] = args.x2[...]         of the next one
      x2_m = x2_now
"""

from __future__ import annotations

from dataclasses import replace

from ..schedule.domain import Access
from . import index as ix
from .draft import Draft
from .index import Expr, Var
from .indices import indices
from .loop_ir import Array, Compute, Load, SetLane, Stmt


def use(draft: Draft) -> None:
    """Lets `draft` take what a row has one of from registers."""
    for access in _loads(draft):
        name = access.buffer.value.name
        read, computed = draft.loads[name]
        assert isinstance(read, Load)
        draft.loads[name] = [_copy(read.name, read.ctype, f"{name}_now"), computed]


def before_the_rows(draft: Draft) -> list[Stmt]:
    """Loads what the first iteration needs."""
    accesses = _loads(draft)
    arrays = [Array(f"{a.buffer.value.name}_ahead", a.buffer.value.dtype.ctype, 1, 1) for a in accesses]
    return [*arrays, *_loaded(draft, accesses, ix.Const(0), "_begin")]


def before_a_row(draft: Draft) -> list[Stmt]:
    """Takes what this iteration needs, and loads what the next one does."""
    accesses = _loads(draft)
    taken = [
        _copy(f"{a.buffer.value.name}_now", a.buffer.value.dtype.ctype, f"{a.buffer.value.name}_ahead[0]")
        for a in accesses
    ]
    return [*taken, *_loaded(draft, accesses, ix.add(Var(draft.iteration.name), 1), "_ahead")]


def _loads(draft: Draft) -> list[Access]:
    """The loads of which a row has one, where rows are fetched ahead and differ in them."""
    if draft.row_loop or not any(p.where in ("prefetched", "held") for p in draft.schedule.placements):
        return []
    found = []
    for access in draft.schedule.domain.loads:
        buffer = access.buffer
        plain = not (buffer.by_value or buffer.windows or access.part_of) and draft.loads[buffer.value.name]
        moves = any(access.moves(d) for d, _ in enumerate(draft.schedule.domain.dims))
        if plain and moves and not draft.sweeps.varies(buffer.value):
            found.append(access)
    return found


def _loaded(draft: Draft, accesses: list[Access], iteration: Expr, suffix: str) -> list[Stmt]:
    """Loads what `iteration` needs, if there is one."""
    at = indices(draft.schedule, draft.params, {draft.iteration.name: iteration}, suffix)
    more = ix.less(iteration, draft.params.size(draft.iteration.extent, "iterations"))
    made: list[Stmt] = []
    for access in accesses:
        name = access.buffer.value.name
        read = draft.elements.read(access, at)
        guard = ix.both([more, *ix.conjuncts(read.guard)])
        made += [replace(read, name=f"{name}{suffix}_m", guard=guard)]
        made += [SetLane(f"{name}_ahead", "0", f"{name}{suffix}_m")]
    return [*at.lets_for(made), *made]


def _copy(name: str, ctype: str, source: str) -> Compute:
    return Compute(name, ctype, "copy", (source,))
