"""The pass that makes one memory access of the lanes of a vector loop.

In: statements, some in loops bound to `vector`. Out: statements of the same meaning. Example:

    for lane in 4: { x = args.x[i + lane]; y = exp(x); args.y[i + lane] = y }
becomes
    x_v = args.x[i .. +4];  for lane in 4: { y = exp(x_v[lane]); y_o[lane] = y };  args.y[i .. +4] = y_o
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import index as ix
from .index import Const, Expr, Var
from .loop_ir import Compute, For, Let, Load, Pack, SetLane, Stmt, Store, Uniform
from .traverse import defined, once, used, with_bodies

Body = "tuple[Stmt, ...]"


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
    return once(result)


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
        varying = [c for c in ix.conjuncts(guard) if var in ix.names(c)]
        uniform = ix.both(c for c in ix.conjuncts(guard) if var not in ix.names(c))
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
    return [*once(v.before), *middle, *v.after]
