"""What statements of Loop IR read, define and hold.

In: a statement, or a body of them. Out: names, the statements inside, or the statement with other bodies,
names or indices. Example:

    used(Load("x", "float", "args.x0", Var("i"))) == {"i"}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .index import Expr, Var, as_expr, both, conjuncts, names, substitute
from .loop_ir import (
    Accumulate,
    Accumulator,
    Array,
    BlockReduce,
    BlockScan,
    Body,
    ClusterReduce,
    ColumnReduce,
    Compute,
    CooperativeReduce,
    CooperativeSlots,
    Draw,
    Fetch,
    FillTile,
    For,
    Hide,
    If,
    Let,
    Load,
    Pack,
    Place,
    Scratch,
    SetLane,
    Stmt,
    Store,
    Uniform,
)  # fmt: skip

#: Statements that define their `name`.
_NAMED = (Accumulator, Array, Compute, CooperativeSlots, Draw, Let, Load, Pack, Place, Scratch, Uniform)
#: Statements that do nothing where their `guard` is false.
_GUARDED = (Accumulate, Fetch, Load, Place, Store)


def defined(s: Stmt) -> str | None:
    """The name that a statement defines."""
    return s.name if isinstance(s, _NAMED) else None


def _totals(s: BlockReduce | CooperativeReduce | ClusterReduce | ColumnReduce) -> frozenset[str]:
    return frozenset([t.name for t in s.totals])


def _in_loop(s: For) -> frozenset[str]:
    return names(s.extent).union(*map(used, s.body)) - {s.var}


_USED: dict[type, Callable[[Any], frozenset[str]]] = {
    Let: lambda s: names(s.value),
    Scratch: lambda s: names(s.elements),
    FillTile: lambda s: names(s.offset) | names(s.stride) | names(s.rows) | names(s.columns),
    Load: lambda s: names(s.offset) | names(s.guard) | names(s.count) | _pointer(s),
    Place: lambda s: names(s.step) | names(s.guard) | {s.index, s.flag},
    Uniform: lambda s: names(s.offset) | {s.state},
    Draw: lambda s: names(s.offset) | names(s.count) | {s.state},
    Compute: lambda s: frozenset(s.operands) | (names(as_expr(s.lane)) if s.vectors else frozenset()),
    Store: lambda s: names(s.offset) | names(s.guard) | names(s.count) | {s.value},
    SetLane: lambda s: names(as_expr(s.lane)) | {s.name, s.value},
    Accumulate: lambda s: names(s.guard) | names(s.lane) | {s.name, s.value},
    Hide: lambda s: frozenset((s.name, s.iteration)),
    Fetch: lambda s: names(s.place) | names(s.offset) | names(s.guard) | {s.prefetched},
    CooperativeSlots: lambda s: names(s.block_set) | names(s.parts) | names(s.part) | names(s.iteration),
    BlockReduce: _totals,
    CooperativeReduce: lambda s: _totals(s) | {s.slots},
    ClusterReduce: _totals,
    ColumnReduce: _totals,
    BlockScan: lambda s: frozenset((s.name, s.carry, *((s.iteration,) if s.iteration else ()))),
    For: _in_loop,
    If: lambda s: names(s.condition).union(*map(used, s.yes + s.no)),
}


def used(s: Stmt) -> frozenset[str]:
    """The names that a statement reads."""
    read = _USED.get(type(s))
    return frozenset() if read is None else read(s)


def _pointer(s: Load) -> frozenset[str]:
    """The name of the pointer by which `s` reads memory, where that is computed."""
    given = s.shared or s.buffer.startswith("args.")
    return frozenset() if given else frozenset((s.buffer,))


def statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """All statements of `body`, also those inside others."""
    for s in body:
        yield s
        if isinstance(s, For):
            yield from statements(s.body)
        elif isinstance(s, If):
            yield from statements(s.yes + s.no)


def with_bodies(s: Stmt, f: Callable[[Body], Body]) -> Stmt:
    """`s` with `f` applied to the bodies it holds."""
    if isinstance(s, For):
        return replace(s, body=f(s.body))
    if isinstance(s, If):
        return replace(s, yes=f(s.yes), no=f(s.no))
    return s


def rewrite_indices(s: Stmt, table: Mapping[str, Expr]) -> Stmt:
    """`s` with index variables substituted."""
    if isinstance(s, Compute):  # most statements are
        return replace(s, lane=substitute(as_expr(s.lane), table)) if s.vectors else s
    if isinstance(s, Let):
        return replace(s, value=substitute(s.value, table))
    if isinstance(s, (Load, Store)):
        offset, guard, count = (substitute(e, table) for e in (s.offset, s.guard, s.count))
        return replace(s, offset=offset, guard=guard, count=count)
    if isinstance(s, Place):
        return replace(s, guard=substitute(s.guard, table))
    if isinstance(s, Uniform):
        return replace(s, offset=substitute(s.offset, table))
    if isinstance(s, Draw):
        return replace(s, offset=substitute(s.offset, table), count=substitute(s.count, table))
    if isinstance(s, Fetch):
        place, offset, guard = (substitute(e, table) for e in (s.place, s.offset, s.guard))
        return replace(s, place=place, offset=offset, guard=guard)
    if isinstance(s, CooperativeSlots):
        block_set, parts, part, iteration = (
            substitute(e, table) for e in (s.block_set, s.parts, s.part, s.iteration)
        )
        return replace(s, block_set=block_set, parts=parts, part=part, iteration=iteration)
    if isinstance(s, For):
        return replace(
            s, extent=substitute(s.extent, table), body=tuple(rewrite_indices(x, table) for x in s.body)
        )
    if isinstance(s, If):
        yes, no = (tuple(rewrite_indices(x, table) for x in body) for body in (s.yes, s.no))
        return replace(s, condition=substitute(s.condition, table), yes=yes, no=no)
    if isinstance(s, Accumulate):
        return replace(s, guard=substitute(s.guard, table), lane=substitute(s.lane, table))
    return s


def rename(s: Stmt, table: Mapping[str, str]) -> Stmt:
    """`s` with names replaced, in what it reads and in what it defines."""
    if not table:
        return s
    s = rewrite_indices(s, {k: Var(v) for k, v in table.items()})
    new: dict[str, Any] = {}
    if isinstance(s, (Let, Load, Place, Uniform, Compute)):
        new["name"] = table.get(s.name, s.name)
    if isinstance(s, Load):
        new["buffer"] = table.get(s.buffer, s.buffer)
    elif isinstance(s, Place):
        new["index"] = table.get(s.index, s.index)
    elif isinstance(s, Compute):
        new["operands"] = tuple(table.get(n, n) for n in s.operands)
        new["vectors"] = tuple(table.get(n, n) for n in s.vectors)
    elif isinstance(s, (Store, SetLane)):
        new["value"] = table.get(s.value, s.value)
    elif isinstance(s, For):
        new["body"] = tuple(rename(x, table) for x in s.body)
    return replace(s, **new) if new else s


def without_guards(body: Body, drop: Collection[Expr]) -> Body:
    """`body` without the conditions `drop`, which are known to hold."""
    result = []
    for s in body:
        if isinstance(s, For):
            s = replace(s, body=without_guards(s.body, drop))
        elif isinstance(s, _GUARDED) and s.guard is not None:
            s = replace(s, guard=both(c for c in conjuncts(s.guard) if c not in drop))
        result.append(s)
    return tuple(result)


def is_pure(s: Stmt) -> bool:
    """Whether the statement gives the same value wherever it stands. A read of shared memory or of an
    accumulator does not."""
    return (
        isinstance(s, (Let, Place, Uniform))
        or (isinstance(s, Compute) and not s.vectors)
        or (isinstance(s, Load) and (s.own or not s.shared) and not s.held)
    )


def once(body: Sequence[Stmt]) -> Body:
    """Without pure statements that repeat an earlier one."""
    seen: set[Stmt] = set()
    result = []
    for s in body:
        if is_pure(s):
            if s in seen:
                continue
            seen.add(s)
        result.append(s)
    return tuple(result)


def read_by(
    body: Sequence[Stmt], known: Sequence[Stmt], besides: Mapping[str, str] | None = None
) -> list[Stmt]:
    """Of the statements `known` those that define what `body` reads, and what these read. `besides`: by the
    name of a value, another one that it needs, though its statement does not read it."""
    names = frozenset().union(*map(used, body))
    found: list[Stmt] = []
    for s in reversed(known):
        name = defined(s)
        if name in names:
            found.insert(0, s)
            names |= used(s)
            if besides and name in besides:
                names |= {besides[name]}
    return found
