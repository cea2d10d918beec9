"""The pass that makes one memory access of the lanes of a vector loop.

In: statements, some in loops bound to `vector`. Out: statements of the same meaning. Example:

    for lane in 4: { x = args.x[i + lane]; y = exp(x); args.y[i + lane] = y }
becomes
    x_v = args.x[i .. +4];  for lane in 4: { y = exp(x_v[lane]); y_o[lane] = y };  args.y[i .. +4] = y_o

Neighbouring vectors are one access where a loop bound to `group` is around the vector loop. What is the same
for all lanes of a vector is loaded and computed once for each of them:

    for g in 4: for lane in 2: { c = args.c[i + g]; x = args.x[(i + g) * 2 + lane]; args.y[...] = x * c }
becomes
    c_v = args.c[i .. +4];  x_v = args.x[i * 2 .. +8]
    for g in 4: for lane in 2: y_o[g * 2 + lane] = x_v[g * 2 + lane] * c_v[g];      args.y[i * 2 .. +8] = y_o
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import index as ix
from .index import Bin, Const, Expr, Var
from .loop_ir import Body, Compute, For, Let, Load, Pack, SetLane, Stmt, Store, Uniform
from .traverse import defined, once, used, with_bodies


def vectorize(body: Body, counts: dict[Expr, str] | None = None) -> Body:
    """`for lane in 4: x = p[i + lane]` -> one vector load before the loop; likewise for stores after it.
    `counts` names the numbers of valid lanes."""
    counts = {} if counts is None else counts
    result: list[Stmt] = []
    for s in body:
        if isinstance(s, For) and s.bind == "group":
            [lanes] = s.body
            assert isinstance(lanes, For)
            result.extend(_vectorized((s, lanes), counts))
            continue
        s = with_bodies(s, lambda inner: vectorize(inner, counts))
        if isinstance(s, For) and s.bind == "vector":
            result.extend(_vectorized((s,), counts))
            continue
        result.append(s)
    return once(result)


@dataclass
class _Vector:
    """The parts that `loops`, a vector loop and perhaps a group around it, fall into; `counts` are the named
    numbers of valid lanes of the whole kernel. `inside` has the statements of each loop, `varying` what they
    define. `picks`: by the name of a load, its vector and the element of it that an iteration reads."""

    loops: tuple[For, ...]
    counts: dict[Expr, str]
    before: list[Stmt] = field(default_factory=list)
    after: list[Stmt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inside: list[list[Stmt]] = [[] for _ in self.loops]
        self.varying: list[set[str]] = [{loop.var} for loop in self.loops]
        self.picks: dict[str, tuple[str, Expr]] = {}

    @property
    def lane(self) -> Expr:
        """The number of the lane, counted through the loops."""
        number: Expr = Const(0)
        for loop in self.loops:
            number = ix.add(ix.mul(number, loop.extent), Var(loop.var))
        return number

    @property
    def lanes(self) -> int:
        count = 1
        for loop in self.loops:
            count *= loop.trips
        return count

    def first(self, e: Expr | None) -> Expr | None:
        """`e` of the first lane."""
        return ix.substitute(e, {loop.var: Const(0) for loop in self.loops})

    def access(self, offset: Expr) -> tuple[int, Expr] | None:
        """How many lanes the vector has that the iterations read together, and which of its elements each of
        them reads; None if they do not read neighbours."""
        if any(ix.names(offset) & (names - {x.var}) for x, names in zip(self.loops, self.varying)):
            return None
        steps = [ix.coefficient(offset, loop.var) for loop in self.loops]
        if steps == [ix.coefficient(self.lane, loop.var) for loop in self.loops]:
            return self.lanes, self.lane
        outer = self.loops[0]
        if len(self.loops) > 1 and steps == [Const(1), Const(0)]:
            return outer.trips, Var(outer.var)
        return None

    def put(self, s: Stmt) -> None:
        """Adds `s` to the innermost loop on which it depends, or before all of them."""
        level = max((k for k, names in enumerate(self.varying) if used(s) & names), default=None)
        if level is None:
            self.before.append(s)
            return
        self.inside[level].append(s)
        if defined(s):
            self.varying[level].add(defined(s))

    def bounds(self, guard: Expr | None) -> tuple[Expr | None, Expr | None]:
        """What `guard` leaves: a condition on the whole vector, or the number of its leading lanes as a named
        value; None for neither."""
        var, lanes = self.loops[-1].var, self.loops[-1].extent
        varying = [c for c in ix.conjuncts(guard) if var in ix.names(c)]
        uniform = ix.both(c for c in ix.conjuncts(guard) if var not in ix.names(c))
        count: Expr = lanes
        for c in varying:  # base + lane < bound
            assert isinstance(c, Bin) and c.op == "<" and ix.coefficient(c.a, var) == Const(1), (
                f"guard {c} is not linear in {var}"
            )
            count = ix.minimum(count, ix.sub(c.b, ix.substitute(c.a, {var: Const(0)})))
        if count == lanes:
            return uniform, None
        if uniform is not None:
            count = ix.Select(uniform, count, Const(0))
        if count not in self.counts:
            self.counts[count] = "count" if not self.counts else f"count_{len(self.counts) + 1}"
        self.before.append(Let(self.counts[count], "int32_t", count))
        return None, Var(self.counts[count])

    def looped(self) -> list[Stmt]:
        """The loops, with the statements that are left in them."""
        body: list[Stmt] = []
        for loop, statements in reversed(list(zip(self.loops, self.inside))):
            body = [*statements, *body]
            body = [replace(loop, body=tuple(body))] if body else []
        return body


def _vectorized(loops: tuple[For, ...], counts: dict[Expr, str]) -> list[Stmt]:
    v = _Vector(loops, counts)
    for s in loops[-1].body:
        if isinstance(s, (Load, Uniform)) and (read := v.access(s.offset)):
            _load(v, s, *read)
        elif isinstance(s, Store) and (read := v.access(s.offset)) and read[0] == v.lanes:
            _store(v, s)
        elif isinstance(s, Store) and not any({*ix.names(s.offset), s.value} & x for x in v.varying):
            v.after.append(replace(s, guard=v.first(s.guard)))
        elif isinstance(s, Compute) and v.picks.keys() & set(s.operands):
            v.put(_picked(v, s))
        else:
            v.put(s)
    return [*once(v.before), *v.looped(), *v.after]


def _load(v: _Vector, s: Load | Uniform, lanes: int, lane: Expr) -> None:
    """One vector for all lanes."""
    name = f"{s.name.removesuffix('_m')}_v"
    v.picks[s.name] = name, lane
    s = replace(s, name=name, offset=v.first(s.offset), lanes=lanes)
    if isinstance(s, Load):
        guard, count = v.bounds(s.guard)
        s = replace(s, guard=guard, count=count)
    v.before.append(s)


def _store(v: _Vector, s: Store) -> None:
    """One store behind the loop, of a vector that the lanes fill."""
    packed = f"{s.value}_o"
    v.before.append(Pack(packed, s.register, v.lanes))
    v.inside[-1].append(SetLane(packed, v.lane, s.value))
    guard, count = v.bounds(s.guard)
    v.after.append(
        replace(s, offset=v.first(s.offset), value=packed, guard=guard, lanes=v.lanes, count=count)
    )


def _picked(v: _Vector, s: Compute) -> Compute:
    """`s` with elements of vectors in place of loads."""
    [lane] = {s.lane or lane for name, (_, lane) in v.picks.items() if name in s.operands}
    own = tuple(v.picks[n][0] if n in v.picks else n for n in s.operands)
    return replace(
        s, operands=own, vectors=tuple(v.picks[n][0] for n in s.operands if n in v.picks), lane=lane
    )
