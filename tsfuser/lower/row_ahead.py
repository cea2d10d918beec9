"""What a row has one of, loaded while threads work on the row before.

In: a draft whose schedule fetches the next row (`prefetch`), and adds up values of all rows, so that a block
goes over many of them. Out: statements that keep such values in registers, an iteration ahead, so that no row
begins with a wait for memory. Example, of the mean of a row:

    x2_ahead[0] = args.x2[...]           of the first row
    for iteration in iterations:
      x2_now = x2_ahead[0]
      x2_ahead[0] = args.x2[...]         of the next one
      x2_m = x2_now
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.values import Value
from ..schedule.domain import Access
from . import index as ix
from . import prefetch
from .draft import Draft
from .index import Expr, Var
from .indices import indices
from .loop_ir import Array, Compute, Load, SetLane, Stmt


def use(draft: Draft) -> list[Access]:
    """Lets `draft` take what a row has one of from registers; the loads of that."""
    accesses = _loads(draft)
    for access in accesses:
        name = access.buffer.value.name
        read, computed = draft.loads[name]
        assert isinstance(read, Load)
        draft.loads[name] = [Compute(read.name, read.ctype, "copy", (f"{name}_now",)), computed]
    return accesses


def before_the_rows(draft: Draft, accesses: list[Access]) -> list[Stmt]:
    """Loads what the first iteration needs."""
    arrays = [Array(f"{a.buffer.value.name}_ahead", a.buffer.value.dtype.ctype, 1, 1) for a in accesses]
    return [*arrays, *_loaded(draft, accesses, ix.Const(0), "_begin")]


def before_a_row(draft: Draft, accesses: list[Access]) -> list[Stmt]:
    """Takes what this iteration needs, and loads what the next one does."""
    taken = [_taken(a.buffer.value) for a in accesses]
    return [*taken, *_loaded(draft, accesses, ix.add(Var(draft.iteration.name), 1), "_ahead")]


def _loads(draft: Draft) -> list[Access]:
    """The loads of one element per row, if many rows are fetched ahead and differ in it; without the loads
    that only some rows need."""
    if draft.row_loop or not prefetch.fetches(draft) or not draft.sweeps.final:
        return []
    dims = range(len(draft.schedule.domain.dims))
    return [
        a
        for a in draft.schedule.domain.loads
        if not draft.sweeps.varies(a.buffer.value)
        and any(a.moves(d) for d in dims)
        and not a.part_of
        and [type(s) for s in draft.loads[a.buffer.value.name]] == [Load, Compute]
    ]


def _loaded(draft: Draft, accesses: list[Access], iteration: Expr, suffix: str) -> list[Stmt]:
    """Loads what `iteration` needs, if there is one."""
    at = indices(draft.schedule, draft.params, {draft.iteration.name: iteration}, suffix)
    made: list[Stmt] = []
    for access in accesses:
        name = access.buffer.value.name
        read = draft.elements.read(access, at)
        guard = prefetch.guarded(draft, iteration, read.guard)
        made += [replace(read, name=f"{name}{suffix}_m", guard=guard)]
        made += [SetLane(f"{name}_ahead", "0", f"{name}{suffix}_m")]
    return [*at.lets_for(made), *made]


def _taken(value: Value) -> Compute:
    """What this iteration needs of `value`: an element of an array, which stays in the loop."""
    array = f"{value.name}_ahead"
    return Compute(f"{value.name}_now", value.dtype.ctype, "copy", (array,), (array,), "0")
