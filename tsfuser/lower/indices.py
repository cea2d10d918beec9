"""The index of every dim of a domain, as formulas of loop variables.

In: a Schedule. Out: `Indices`: definitions in order, an expression for each dim, and a guard where a split
does not divide. Example, n elements over blocks of 128 threads:

    i0 = block * 128 + tx        exists where i0 < args.i0_size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..schedule.loops import Schedule, Split
from . import index as ix
from .arguments import Params
from .index import Bin, Expr, Var
from .loop_ir import Let, Stmt
from .traverse import used


@dataclass(frozen=True)
class Guard:
    """`condition` must hold for the elements of domain dims `dims` to exist; `inside` says that it does for
    the whole tile."""

    condition: Bin
    dims: frozenset[str]
    inside: Expr


@dataclass(frozen=True)
class Indices:
    """The index of every domain dim, of loop variables: `lets` define names that the expressions `of` use."""

    lets: tuple[Let, ...]
    of: dict[str, Expr]
    guards: tuple[Guard, ...]

    def lets_for(self, statements: Iterable[Stmt]) -> list[Let]:
        """Of `lets` those that `statements` read, and what these read."""
        names = frozenset().union(*map(used, statements))
        return self.lets_of(names)

    def lets_of(self, names: frozenset[str]) -> list[Let]:
        """Of `lets` those that define `names`, and what these read."""
        found: list[Let] = []
        for let in reversed(self.lets):
            if let.name in names:
                found.insert(0, let)
                names |= used(let)
        return found


def indices(
    schedule: Schedule, params: Params, override: Mapping[str, Expr] | None = None, suffix: str = ""
) -> Indices:
    """Domain indices from loop variables, by the schedule's relations backwards. `override` fixes the index
    of a loop that exists only between relations; `suffix` keeps names apart where indices are needed twice.
    """
    override = override or {}
    of: dict[str, Expr] = {**{x.name: Var(x.name) for x in schedule.loops}, **override}
    lanes = [x.name for x in schedule.loops if x.bind in ("group", "vector", "simd")]
    dims_of = covered(schedule)
    lets: list[Let] = []
    guards: list[Guard] = []

    def first_lane(e: Expr) -> Expr:
        return ix.substitute(e, {lane: ix.Const(0) for lane in lanes})

    def name(loop: str, value: Expr) -> Expr:
        """A name for the part of an index that lanes share."""
        lane = next((x for x in lanes if x in ix.names(value)), None)
        base = value if lane is None else ix.substitute(value, {lane: ix.Const(0)})
        if not isinstance(base, (Var, ix.Const)):
            lets.append(Let(loop + suffix, params.index, base))
            base = Var(loop + suffix)
        return base if lane is None else ix.add(base, Var(lane))

    for relation in reversed(schedule.relations):
        if isinstance(relation, Split):
            if relation.parent in override:
                continue
            inner = f"{relation.inner}_size"
            start = (
                ix.mul(of[relation.outer], params.size(relation.by, inner)) if relation.outer else ix.Const(0)
            )
            index = of[relation.parent] = name(relation.parent, ix.add(start, of[relation.inner]))
            if not relation.exact:
                extent = params.size(relation.extent, f"{relation.parent}_size")
                end = ix.mul(ix.add(of[relation.outer], 1), params.size(relation.by, inner))
                condition = ix.less(first_lane(index) if relation.whole else index, extent)
                guards.append(Guard(condition, dims_of[relation.parent], ix.less(end, ix.add(extent, 1))))
        else:
            by = params.size(relation.by, f"{relation.inner}_size")
            # lanes never cross from one piece to the next
            outer = of[relation.outer] = name(relation.outer, ix.quotient(first_lane(of[relation.into]), by))
            of[relation.inner] = name(relation.inner, ix.sub(of[relation.into], ix.mul(outer, by)))
    return Indices(tuple(lets), of, tuple(guards))


def covered(schedule: Schedule) -> dict[str, frozenset[str]]:
    """For each loop, also those between relations, the dims of the domain that it covers."""
    found: dict[str, frozenset[str]] = {x.name: frozenset() for x in schedule.loops}
    found |= {d.name: frozenset((d.name,)) for d in schedule.domain.dims}
    for relation in schedule.relations:
        if isinstance(relation, Split):
            found[relation.inner] = found[relation.outer] = found[relation.parent]
        else:
            found[relation.into] = found.get(relation.outer, frozenset()) | found[relation.inner]
    return found
