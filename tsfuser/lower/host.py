"""What the host's kernels need beside the passes of all: loops that its compiler can vectorise.

In: statements of a kernel for one thread. Out: statements of the same meaning. Example, of `peel`:

    for r in r_size: for lane in 32: if r * 32 + lane < n: S
becomes
    for r in n / 32: for lane in 32: S
    for r in r_size - n / 32: for lane in 32: if ... < n: S
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import index as ix
from .combine import COMBINATIONS
from .index import Const, Expr, Var
from .loop_ir import Accumulate, Accumulator, Body, Compute, Draw, For, Let, Load, Stmt, Store, Uniform
from .rounds import in_two
from .traverse import defined, rewrite_indices, statements, with_bodies, without_guards


def peel(body: Body) -> Body:
    """Cuts serial loops in two where all but the last iterations need no bound on their lanes: a trip count
    that is known is what lets the compiler keep accumulators in registers."""
    result: list[Stmt] = []
    known: dict[Expr, Let] = {}
    for s in body:
        s = with_bodies(s, peel)
        result += _peeled(s, known) if isinstance(s, For) and s.bind == "serial" else [s]
    return tuple(result)


def _peeled(loop: For, known: dict[Expr, Let]) -> list[Stmt]:
    lanes = next(
        (s for s in loop.body if isinstance(s, For) and s.bind == "simd" and isinstance(s.extent, Const)),
        None,
    )
    if lanes is None:
        return [loop]
    local: dict[str, Expr] = {}
    for s in loop.body:
        if isinstance(s, Let):
            local[s.name] = ix.substitute(s.value, local)
    inside = {defined(s) for s in loop.body} | {loop.var, lanes.var}
    bounds: dict[Expr, Expr] = {}  # guard -> whole iterations before it
    for s in statements(lanes.body):
        for c in ix.bounds(getattr(s, "guard", None)):
            index = ix.substitute(c.a, local)
            steady = (
                ix.coefficient(index, lanes.var) == Const(1)
                and ix.coefficient(index, loop.var) == lanes.extent
            )
            start = ix.substitute(index, {lanes.var: Const(0), loop.var: Const(0)})
            if steady and not (ix.names(start) | ix.names(c.b)) & inside:
                bounds[c] = ix.div(ix.sub(c.b, start), lanes.extent)
    if not bounds:
        return [loop]
    return in_two(loop, bounds.values(), without_guards(loop.body, set(bounds)), known)


def store_once(body: Body) -> Body:
    """What only the first lane of a simd loop stores, and no lane changes, is stored behind the loop: a
    compiler makes no vectors of a loop with such a branch.

    for lane in n: S; if i + lane < 1: out[j] = x   ->   for lane in n: S
                                                         if 0 < n && i < 1: out[j] = x
    """
    return _in_loops(body, "simd", _stored_once)


def _in_loops(body: Body, bind: str, change: Callable[[For], list[Stmt]]) -> Body:
    """`body` with each loop of the binding changed, those inside of others first."""
    result: list[Stmt] = []
    for s in body:
        s = with_bodies(s, lambda inner: _in_loops(inner, bind, change))
        result += change(s) if isinstance(s, For) and s.bind == bind else [s]
    return tuple(result)


def _stored_once(loop: For) -> list[Stmt]:
    inside = {defined(s) for s in loop.body} - {None}
    late = [s for s in loop.body if isinstance(s, Store) and _is_of_first_lane(s, loop.var, inside)]
    kept = tuple(s for s in loop.body if s not in late)
    if not late or not kept:
        return [loop]
    runs = [] if isinstance(loop.extent, Const) else [ix.less(0, loop.extent)]
    first = {loop.var: Const(0)}
    guards = [ix.both([*runs, *ix.conjuncts(ix.substitute(s.guard, first))]) for s in late]
    return [replace(loop, body=kept), *(replace(s, guard=g) for s, g in zip(late, guards))]


def _is_of_first_lane(store: Store, lane: str, inside: set[str]) -> bool:
    asked = [c for c in ix.conjuncts(store.guard) if lane in ix.names(c)]
    first = [c for c in ix.bounds(store.guard) if c.b == Const(1) and ix.coefficient(c.a, lane) == Const(1)]
    return (
        not store.adds
        and store.value not in inside
        and not (ix.names(store.offset) | ix.names(store.guard)) & inside
        and lane not in ix.names(store.offset)
        and 0 < len(asked) == len(first)
    )


FLOAT_ADDITIONS = 16  # to an accumulator of float, before it is added to one of double


def chunk(body: Body) -> Body:
    """Adds floats in float, 16 times, and then to the accumulators of double: converting each would take
    longer than adding it."""
    return _in_loops(body, "serial", _chunked)


def _chunked(loop: For) -> list[Stmt]:
    lanes = next(
        (s for s in loop.body if isinstance(s, For) and s.bind == "simd" and isinstance(s.extent, Const)),
        None,
    )
    if lanes is None or _ends_in(loop, lanes):
        return [loop]  # `peel` leaves few iterations with bounds
    sums = {s.value: s for s in lanes.body if isinstance(s, Accumulate) and s.combine == _SUM}
    floats = {s.name for s in lanes.body if isinstance(s, (Compute, Load)) and s.ctype == "float"}
    widened = [
        s
        for s in lanes.body
        if isinstance(s, Compute) and s.name in sums and s.symbol == "convert" and s.ctype == "double"
    ]
    terms = {s.name: s for s in widened if s.operands[0] in floats}
    if not terms:
        return [loop]
    parts = {name: f"{sums[name].name}_part" for name in terms}
    inner = []
    for s in lanes.body:
        if isinstance(s, Compute) and s.name in terms:
            s = replace(s, ctype="float", symbol="copy")
        elif isinstance(s, Accumulate) and s.value in terms:
            s = replace(s, name=parts[s.value])
        inner.append(s)
    chunk_loop = f"{loop.var}_chunk"
    at = {loop.var: ix.add(ix.mul(Var(chunk_loop), FLOAT_ADDITIONS), Var(loop.var))}
    count = ix.minimum(FLOAT_ADDITIONS, ix.sub(loop.extent, ix.mul(Var(chunk_loop), FLOAT_ADDITIONS)))
    body = [replace(lanes, body=tuple(inner)) if s is lanes else s for s in loop.body]
    some = replace(loop, extent=count, body=tuple(rewrite_indices(s, at) for s in body))
    fold: list[Stmt] = []
    for name, part in parts.items():
        lane = Var(lanes.var)
        fold += [Compute(name, "double", "convert", (part,), (part,), lane), replace(sums[name], guard=None)]
    before = [Accumulator(part, "float", lanes.trips, "0.0f") for part in parts.values()]
    chunks = ix.div(ix.add(loop.extent, FLOAT_ADDITIONS - 1), FLOAT_ADDITIONS)
    return [For(chunk_loop, chunks, "serial", (*before, some, replace(lanes, body=tuple(fold))))]


def _ends_in(loop: For, lanes: For) -> bool:
    """Whether the bounds of `lanes` are other ones in some iterations of `loop`."""
    inside = {defined(s) for s in loop.body} | {loop.var}
    guards = [ix.conjuncts(getattr(s, "guard", None)) for s in lanes.body]
    return any(lanes.var in (names := ix.names(c)) and names & inside for found in guards for c in found)


_SUM = COMBINATIONS["sum"].symbol


DRAWN = 256  # random numbers that are drawn at a time: few enough to stay in the nearest cache


def draw(body: Body) -> Body:
    """Random numbers of a simd loop are drawn before it, so that each run of Philox gives all its numbers and
    runs beside others:

    for lane in n: u = uniform(at + lane); S   ->   for piece in n / 256:
                                                        u_drawn[] = 256 of uniform(at + piece * 256)
                                                        for lane in 256: u = u_drawn[lane]; S
    """
    return _in_loops(body, "simd", _drawn)


def _drawn(loop: For) -> list[Stmt]:
    own = {defined(s) for s in loop.body}
    steady = [
        s
        for s in loop.body
        if isinstance(s, Uniform) and not s.walk and ix.coefficient(s.offset, loop.var) == Const(1)
    ]
    wanted = [s for s in steady if not ix.names(s.offset) & own]
    if not wanted:
        return [loop]
    short = isinstance(loop.extent, Const) and loop.extent.value <= DRAWN
    piece, lane = f"{loop.var}_piece", Var(loop.var)
    start: Expr = Const(0) if short else ix.mul(Var(piece), DRAWN)
    end = Var(f"{piece}_end")
    before: list[Stmt] = []
    if not short:
        before.append(Let(end.name, "int64_t", ix.minimum(DRAWN, ix.sub(loop.extent, start))))
    count, most = (loop.extent, loop.trips) if short else (end, DRAWN)
    for drawn in wanted:
        offset = ix.substitute(drawn.offset, {loop.var: start})
        name = f"{drawn.name}_drawn"
        before.append(Draw(name, drawn.ctype, drawn.state, drawn.stream, offset, count, most))
    body: list[Stmt] = []
    for s in loop.body:
        if isinstance(s, Uniform) and s in wanted:
            body.append(Load(s.name, s.ctype, f"{s.name}_drawn", lane, shared=True))
        else:
            body.append(rewrite_indices(s, {loop.var: ix.add(start, lane)}))
    inner = replace(loop, extent=count, body=tuple(body))
    if short:
        return [*before, inner]
    return [For(piece, ix.div(ix.add(loop.extent, DRAWN - 1), DRAWN), "serial", (*before, inner))]
