"""What the host's kernels need beside the passes of all: loops that its compiler can vectorise.

In: statements of a kernel for one thread. Out: statements of the same meaning. Example, of `peel`:

    for r in r_size: for lane in 32: if r * 32 + lane < n: S   ->   for r in n / 32: for lane in 32: S
                                                                    for r in r_size - n / 32: for lane in 32: if ... < n: S
"""

from __future__ import annotations

from dataclasses import replace

from . import index as ix
from .index import Const, Expr, Var
from .loop_ir import For, Let, Stmt, defined, rewrite_indices, statements, with_bodies
from .passes import conjuncts, without_guards

Body = "tuple[Stmt, ...]"


def peel(body: Body) -> Body:
    """Cuts serial loops in two where all but the last iterations need no bound on their lanes: a trip count that is known
    is what lets the compiler keep accumulators in registers."""
    result: list[Stmt] = []
    known: dict[Expr, Let] = {}
    for s in body:
        s = with_bodies(s, peel)
        result += _peeled(s, known) if isinstance(s, For) and s.bind == "serial" else [s]
    return tuple(result)


def _peeled(loop: For, known: "dict[Expr, Let]") -> list[Stmt]:
    lanes = next((s for s in loop.body if isinstance(s, For) and s.bind == "simd" and isinstance(s.extent, Const)), None)
    if lanes is None:
        return [loop]
    local: dict[str, Expr] = {}
    for s in loop.body:
        if isinstance(s, Let):
            local[s.name] = ix.substitute(s.value, local)
    inside = {defined(s) for s in loop.body} | {loop.var, lanes.var}
    bounds: dict[Expr, Expr] = {}  # guard -> whole iterations before it
    for s in statements(lanes.body):
        for c in conjuncts(getattr(s, "guard", None)):
            index = ix.substitute(c.a, local)
            steady = ix.coefficient(index, lanes.var) == Const(1) and ix.coefficient(index, loop.var) == lanes.extent
            start = ix.substitute(index, {lanes.var: Const(0), loop.var: Const(0)})
            if steady and not (ix.names(start) | ix.names(c.b)) & inside:
                bounds[c] = ix.div(ix.sub(c.b, start), lanes.extent)
    if not bounds:
        return [loop]
    whole: Expr = loop.extent
    for count in bounds.values():
        whole = ix.minimum(whole, count)
    made: list[Stmt] = []
    if whole not in known:
        known[whole] = Let(f"{loop.var}_whole{len(known) + 1 if known else ''}", "int64_t", whole)
        made.append(known[whole])
    done = Var(known[whole].name)
    rest = tuple(rewrite_indices(s, {loop.var: ix.add(done, Var(loop.var))}) for s in loop.body)
    return [*made, replace(loop, extent=done, body=without_guards(loop.body, set(bounds))), replace(loop, extent=ix.sub(loop.extent, done), body=rest)]
