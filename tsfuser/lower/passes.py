"""Passes that simplify Loop IR.

In: statements. Out: statements of the same meaning. `flatten`: loops of one iteration vanish. `hoist`: what a
loop does not change leaves it. `bound`: guards of plain loops become their trip counts. Example, of `bound`:

    for i in n: if base + i < end: S    ->    i_end = smaller(n, end - base); for i in i_end: S
"""

from __future__ import annotations

from dataclasses import replace

from . import index as ix
from .index import Const, Expr, Var
from .loop_ir import Accumulate, Body, For, If, Let, Load, Pack, Place, Stmt
from .traverse import defined, is_pure, once, rewrite_indices, statements, used, with_bodies, without_guards


def flatten(body: Body) -> Body:
    """`for u in 1: S(u)` -> `S(0)`, except simd loops."""
    result: list[Stmt] = []
    for s in body:
        s = with_bodies(s, flatten)
        if isinstance(s, For) and s.extent == Const(1) and s.bind != "simd":
            result.extend(rewrite_indices(x, {s.var: Const(0)}) for x in s.body)
        else:
            result.append(s)
    return once(result)


def hoist(body: Body, outer: frozenset[Stmt] = frozenset()) -> Body:
    """Moves statements out of loops that do not change them; what is there already, in this scope or around
    it (`outer`), is not computed again."""
    result: list[Stmt] = []
    present = set(outer)

    def put(s: Stmt) -> None:
        # loops of one extent differ in whether a load out of them asks if they run
        same = replace(s, guard=None) if isinstance(s, (Load, Place)) else s
        if same not in present:
            result.append(s)
            if is_pure(s):
                present.add(same)

    for s in body:
        if not isinstance(s, (For, If)):
            put(s)
            continue
        s = with_bodies(s, lambda inner: hoist(inner, frozenset(present)))
        if isinstance(s, For):
            before, s = _hoisted(s)
            for x in before:
                put(x)
            if not s.body:
                continue
        result.append(s)
    return tuple(result)


def _hoisted(loop: For) -> tuple[list[Stmt], For]:
    inside: set[str] = {loop.var} | {defined(s) for s in loop.body if isinstance(s, Pack)}
    before, kept = [], []
    may_be_empty = not isinstance(loop.extent, Const) and any(
        isinstance(s, Accumulate) for s in statements(loop.body)
    )
    for s in loop.body:
        if is_pure(s) and not (used(s) & inside):
            before.append(_if_run(s, loop.extent) if may_be_empty and isinstance(s, (Load, Place)) else s)
        else:
            kept.append(s)
            if defined(s):
                inside.add(defined(s))
    return before, replace(loop, body=tuple(kept))


def _if_run(load: Load | Place, extent: Expr) -> Load | Place:
    """`load` for a loop that may have no iteration, as where a reduced dim is empty: then there is no element
    to read."""
    runs = ix.less(0, extent)  # load_upto takes no guard beside its count
    if isinstance(load, Load) and load.count is not None:
        return replace(load, count=ix.Select(runs, load.count, Const(0)))
    return replace(load, guard=ix.both([runs, *ix.conjuncts(load.guard)]))


def bound(body: Body) -> Body:
    """`for i in n: if base + i < end: S` -> `i_end = min(n, end - base); for i in i_end: S` in serial and
    simd loops."""
    result: list[Stmt] = []
    ends: dict[Expr, Let] = {}  # loops that follow one another may end alike
    for s in body:
        if isinstance(s, For) and s.bind in ("serial", "simd"):
            end, s = _bounded(s, ends)
            result += end
        result.append(with_bodies(s, bound))
    return tuple(result)


def _bounded(loop: For, ends: dict[Expr, Let]) -> tuple[list[Stmt], For]:
    local: dict[str, Expr] = {}
    for s in loop.body:
        if isinstance(s, Let):
            local[s.name] = ix.substitute(s.value, local)
    inside = (
        {defined(s) for s in loop.body}
        | {loop.var}
        | {s.var for s in statements(loop.body) if isinstance(s, For)}
    )
    found: dict[ix.Bin, Expr] = {}  # guard -> the same in terms of values known before the loop
    for s in statements(loop.body):
        for c in ix.bounds(getattr(s, "guard", None)):
            index = ix.substitute(c.a, local)
            if (
                c.b != Const(1)
                and ix.coefficient(index, loop.var) == Const(1)
                and not (ix.names(index) - {loop.var}) & inside
            ):
                found[c] = index
    if not found:
        return [], loop
    extent: Expr = loop.extent
    for c, index in found.items():
        extent = ix.minimum(extent, ix.sub(c.b, ix.substitute(index, {loop.var: Const(0)})))
    body = without_guards(loop.body, set(found))
    if extent in ends:
        return [], replace(loop, extent=Var(ends[extent].name), body=body)
    taken = [end.name for end in ends.values()]
    name = next(n for k in range(len(taken) + 1) if (n := f"{loop.var}_end{k + 1 if k else ''}") not in taken)
    ends[extent] = Let(name, "int64_t", extent)
    return [ends[extent]], replace(loop, extent=Var(name), body=body)
