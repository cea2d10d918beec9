"""The passes of Loop IR; each is a function from statements to statements, unchanged input giving the same
meaning.

`vectorize`: a vector loop's loads and stores become single accesses. `hoist`: what a loop does not change
leaves it. `bound`: guards of plain loops become their trip counts. `stage`: unrolled loops issue all loads
before the first use. `flatten`: loops of one iteration vanish.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import index as ix
from .index import Bin, Const, Expr, Var
from .loop_ir import (
    Accumulate,
    Array,
    Compute,
    For,
    If,
    Let,
    Load,
    Pack,
    Place,
    SetLane,
    Stmt,
    Store,
    Uniform,
)
from .traverse import defined, rewrite_indices, statements, used, with_bodies

Body = "tuple[Stmt, ...]"


def conjuncts(e: Expr | None) -> list[Expr]:
    """The conditions whose conjunction is `e`."""
    if e is None:
        return []
    return conjuncts(e.a) + conjuncts(e.b) if isinstance(e, Bin) and e.op == "&&" else [e]


# ---- flatten


def flatten(body: Body) -> Body:
    """`for u in 1: S(u)` -> `S(0)`, except simd loops."""
    result: list[Stmt] = []
    for s in body:
        s = with_bodies(s, flatten)
        if isinstance(s, For) and s.extent == Const(1) and s.bind != "simd":
            result.extend(rewrite_indices(x, {s.var: Const(0)}) for x in s.body)
        else:
            result.append(s)
    return _once(result)


def _once(body: list[Stmt]) -> Body:
    """Without pure statements that repeat an earlier one."""
    seen: set[Stmt] = set()
    result = []
    for s in body:
        if not (_is_pure(s) and s in seen):
            result.append(s)
            seen.add(s)
    return tuple(result)


# ---- vectorize


def vectorize(body: Body, counts: dict[Expr, str] | None = None) -> Body:
    """`for lane in 4: x = p[i + lane]` -> one vector load before the loop; likewise for stores after it.
    `counts` names the numbers of valid lanes."""
    counts = {} if counts is None else counts
    result: list[Stmt] = []
    for s in body:
        s = with_bodies(s, lambda inner: vectorize(inner, counts))
        if isinstance(s, For) and s.bind == "vector":
            result.extend(_vectorized(s, counts))
            continue
        result.append(s)
    return _once(result)


@dataclass
class _Vector:
    """The three parts that a vector loop falls into; `counts` are the named numbers of valid lanes of the
    whole kernel."""

    loop: For
    counts: dict[Expr, str]
    before: list[Stmt] = field(default_factory=list)
    lane: list[Stmt] = field(default_factory=list)
    after: list[Stmt] = field(default_factory=list)

    def bounds(self, guard: Expr | None) -> tuple[Expr | None, Expr | None]:
        """What `guard` leaves: a condition on the whole vector, or the number of its leading lanes as a named
        value; None for neither."""
        var, lanes = self.loop.var, self.loop.extent
        varying = [c for c in conjuncts(guard) if var in ix.names(c)]
        uniform = ix.both(c for c in conjuncts(guard) if var not in ix.names(c))
        count: Expr = lanes
        for c in varying:  # base + lane < bound
            assert c.op == "<" and ix.coefficient(c.a, var) == Const(1), f"guard {c} is not linear in {var}"
            count = ix.minimum(count, ix.sub(c.b, ix.substitute(c.a, {var: Const(0)})))
        if count == lanes:
            return uniform, None
        if uniform is not None:
            count = ix.Select(uniform, count, Const(0))
        if count not in self.counts:
            self.counts[count] = "count" if not self.counts else f"count_{len(self.counts) + 1}"
        self.before.append(Let(self.counts[count], "int32_t", count))
        return None, Var(self.counts[count])


def _vectorized(loop: For, counts: dict[Expr, str]) -> list[Stmt]:
    v = _Vector(loop, counts)
    varying: set[str] = {loop.var}
    vectors: dict[str, str] = {}  # name of a load -> of its vector
    lanes = loop.extent.value
    for s in loop.body:
        if (
            isinstance(s, Load)
            and ix.coefficient(s.offset, loop.var) == Const(1)
            and not (ix.names(s.offset) - {loop.var}) & varying
        ):
            base = ix.substitute(s.offset, {loop.var: Const(0)})
            vectors[s.name] = f"{s.name.removesuffix('_m')}_v"
            guard, count = v.bounds(s.guard)
            v.before.append(
                replace(s, name=vectors[s.name], offset=base, guard=guard, lanes=lanes, count=count)
            )
        elif isinstance(s, Uniform) and ix.coefficient(s.offset, loop.var) == Const(1):
            vectors[s.name] = f"{s.name.removesuffix('_m')}_v"
            v.before.append(
                replace(
                    s, name=vectors[s.name], offset=ix.substitute(s.offset, {loop.var: Const(0)}), lanes=lanes
                )
            )
        elif isinstance(s, Store) and ix.coefficient(s.offset, loop.var) == Const(1):
            packed = f"{s.value}_o"
            v.before.append(Pack(packed, s.register, lanes))
            v.lane.append(SetLane(packed, loop.var, s.value))
            base = ix.substitute(s.offset, {loop.var: Const(0)})
            guard, count = v.bounds(s.guard)
            v.after.append(replace(s, offset=base, value=packed, guard=guard, lanes=lanes, count=count))
        elif (
            isinstance(s, Store) and ix.coefficient(s.offset, loop.var) == Const(0) and s.value not in varying
        ):
            v.after.append(replace(s, guard=ix.substitute(s.guard, {loop.var: Const(0)})))
        elif isinstance(s, Compute) and vectors.keys() & set(s.operands):
            own = tuple(vectors.get(n, n) for n in s.operands)
            v.lane.append(
                replace(
                    s,
                    operands=own,
                    vectors=tuple(vectors[n] for n in s.operands if n in vectors),
                    lane=loop.var,
                )
            )
            varying.add(s.name)
        elif used(s) & varying:
            v.lane.append(s)
            if defined(s):
                varying.add(defined(s))
        else:
            v.before.append(s)
    middle = [replace(loop, body=tuple(v.lane))] if v.lane else []
    return [*_once(v.before), *middle, *v.after]


# ---- hoist


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
            if _is_pure(s):
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


def _is_pure(s: Stmt) -> bool:
    """Whether the statement gives the same value wherever it stands. A read of shared memory or of an
    accumulator does not."""
    return (
        isinstance(s, (Let, Place, Uniform))
        or (isinstance(s, Compute) and not s.vectors)
        or (isinstance(s, Load) and (s.own or not s.shared))
    )


def _hoisted(loop: For) -> tuple[list[Stmt], For]:
    inside: set[str] = {loop.var} | {defined(s) for s in loop.body if isinstance(s, Pack)}
    before, kept = [], []
    may_be_empty = not isinstance(loop.extent, Const) and any(
        isinstance(s, Accumulate) for s in statements(loop.body)
    )
    for s in loop.body:
        if _is_pure(s) and not (used(s) & inside):
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
    return replace(load, guard=ix.both([runs, *conjuncts(load.guard)]))


# ---- bound


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
    found: dict[Expr, Expr] = {}  # guard -> the same in terms of what is known before the loop
    for s in statements(loop.body):
        for c in conjuncts(getattr(s, "guard", None)):
            index = ix.substitute(c.a, local)
            if (
                c.b != Const(1)
                and ix.coefficient(index, loop.var) == Const(1)
                and not (ix.names(index) - {loop.var}) & inside
            ):
                found[c] = index
    if not found:
        return [], loop
    extent = loop.extent
    for c, index in found.items():
        extent = ix.minimum(extent, ix.sub(c.b, ix.substitute(index, {loop.var: Const(0)})))
    body = without_guards(loop.body, set(found))
    if extent in ends:
        return [], replace(loop, extent=Var(ends[extent].name), body=body)
    taken = [end.name for end in ends.values()]
    name = next(n for k in range(len(taken) + 1) if (n := f"{loop.var}_end{k + 1 if k else ''}") not in taken)
    ends[extent] = Let(name, "int64_t", extent)
    return [ends[extent]], replace(loop, extent=Var(name), body=body)


def without_guards(body: Body, drop: set[Expr]) -> Body:
    result = []
    for s in body:
        if isinstance(s, For):
            s = replace(s, body=without_guards(s.body, drop))
        elif getattr(s, "guard", None) is not None:
            s = replace(s, guard=ix.both(c for c in conjuncts(s.guard) if c not in drop))
        result.append(s)
    return tuple(result)


# ---- stage


def stage(body: Body) -> Body:
    """`for u in 4: x = load; use(x)` -> `for u in 4: x[u] = load; for u in 4: use(x[u])`, so that the loads
    are in flight together. Loops over the same `u` that follow one another share what they load."""
    unrolled = [s for s in body if isinstance(s, For) and s.bind == "unroll"]
    result: list[Stmt] = []
    kept: dict[Stmt, str] = {}  # a statement of some loop's front -> its array
    for s in body:
        if isinstance(s, For) and s.bind == "unroll":
            later = [x for x in unrolled[unrolled.index(s) + 1 :] if x.var == s.var and x.extent == s.extent]
            result.extend(_staged(s, later, kept))
        else:
            result.append(with_bodies(s, stage))
    return tuple(result)


def _front(loop: For) -> tuple[list[Stmt], list[Stmt]]:
    """The index computations and loads that can come first, and the rest."""
    front: list[Stmt] = []
    back: list[Stmt] = []
    late: set[str] = set()
    places: set[str] = set()  # names that some place depends on
    for s in reversed(loop.body):
        if isinstance(s, Place) or (isinstance(s, Compute) and s.name in places):
            places |= used(s)
    for s in loop.body:
        early = (
            isinstance(s, (Let, Place, Uniform))
            or (isinstance(s, Load) and not s.shared)
            or (isinstance(s, Compute) and s.name in places)
        )
        if early and not (used(s) & late):
            front.append(s)
        else:
            back.append(s)
            if defined(s):
                late.add(defined(s))
    return front, back


def _staged(loop: For, later: list[For], kept: dict[Stmt, str]) -> list[Stmt]:
    front, back = _front(loop)
    shared = {s for x in later for s in _front(x)[0]}
    if not back or not (any(isinstance(s, (Load, Uniform)) for s in front) or kept.keys() & set(front)):
        return [loop]
    needed = frozenset().union(*map(used, back))
    fresh = [s for s in front if s not in kept]
    stored = [s for s in fresh if s.name in needed or s in shared]
    for s in stored:
        name, k = s.name, 1
        while name in kept.values():
            name, k = f"{s.name}_{k + 1}", k + 1
        kept[s] = name
    arrays = [Array(kept[s], s.ctype, getattr(s, "lanes", 1), loop.extent.value) for s in stored]
    table = {s.name: f"{kept[s]}[{loop.var}]" for s in front if s in kept}
    loads = [replace(loop, body=tuple(rename(s, table) for s in fresh))] if fresh else []
    rest = replace(loop, body=tuple(rename(s, table) for s in back))
    return [*arrays, *loads, rest]


def rename(s: Stmt, table: dict[str, str]) -> Stmt:
    """`s` with names replaced, in what it reads and in what it defines."""
    s = rewrite_indices(s, {k: Var(v) for k, v in table.items()})
    if isinstance(s, (Let, Load, Place, Uniform, Compute)):
        s = replace(s, name=table.get(s.name, s.name))
    if isinstance(s, Place):
        s = replace(s, index=table.get(s.index, s.index))
    if isinstance(s, Compute):
        s = replace(
            s,
            operands=tuple(table.get(n, n) for n in s.operands),
            vectors=tuple(table.get(n, n) for n in s.vectors),
        )
    if isinstance(s, (Store, SetLane)):
        s = replace(s, value=table.get(s.value, s.value))
    if isinstance(s, For):
        s = replace(s, body=tuple(rename(x, table) for x in s.body))
    return s
