"""The pass for loops over lanes in which a condition that no lane changes chooses what is read or computed.

In: statements of a kernel of the host. Out: statements of the same meaning, of which a compiler makes
vectors, as it does not of a choice by a condition from outside of the loop. A padded window has such
conditions: for most rows all of them hold. For the others, what is outside of the window is read elsewhere in
the tensor, and not chosen behind. Example, of a pooling in channels last, where `x[j + lane]` is read in any
case:

    for lane in n: { a = in_a ? x[i + lane]; c = where(in_a, a, 0); d = x[j + lane]; S }
becomes
    if in_a: for lane in n: { a = x[i + lane]; c = a; d = x[j + lane]; S }
    else:    for lane in n: { a = x[j + in_a * (i - j) + lane]; c = choose(in_a, a, 0); d = x[j + lane]; S }
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..ir.symbols import define
from . import index as ix
from .branches import chosen, condition, is_text
from .loop_ir import Body, Compute, For, If, Load, Stmt
from .traverse import defined, used, with_bodies

define("choose", "choose({0}, convert<{ctype}>({1}), convert<{ctype}>({2}))", cheap=True)


def whole_windows(body: Body) -> Body:
    """Loops over lanes ask before them whether windows are whole, and choose without branches."""
    made = (with_bodies(s, whole_windows) for s in body)
    return tuple(_asked_once(s) if isinstance(s, For) and s.bind == "simd" else s for s in made)


def _asked_once(loop: For) -> Stmt:
    changing = {defined(s) for s in loop.body} | {loop.var}
    choices = _choices(loop, changing)
    guards = {load.guard: None for load in choices.values() if load.guard is not None}
    asks = ix.both(dict.fromkeys([*guards, *(ix.Var(s.operands[0]) for s in choices)]))
    cut = _without_branches(loop, changing, set(choices.values()))
    if asks is None:
        return cut
    body: list[Stmt] = []
    for s in loop.body:
        if isinstance(s, Compute) and s in choices:
            s = chosen(s, 1)
        elif isinstance(s, Load) and s.guard in guards:
            s = replace(s, guard=None)
        body.append(s)
    return If(asks, (_without_branches(replace(loop, body=tuple(body)), changing, set()),), (cut,))


def _choices(loop: For, changing: set[str | None]) -> dict[Compute, Load]:
    """Choices, by a condition that no lane changes, between a number and a load whose guard no lane changes;
    of that load nothing else reads anything."""
    readers = Counter(name for s in loop.body for name in used(s))
    loads: dict[str, Load] = {}  # by its name, and by those of its copies
    found = {}
    for s in loop.body:
        if isinstance(s, Load):
            if s.guard is not None and not ix.names(s.guard) & changing and readers[s.name] == 1:
                loads[s.name] = s
        elif isinstance(s, Compute) and s.operands:
            asked = condition(s)
            if s.symbol in ("copy", "convert") and s.operands[0] in loads and readers[s.name] == 1:
                loads[s.name] = loads[s.operands[0]]
            elif asked is not None and asked not in changing and is_text(s, 2) and s.operands[1] in loads:
                found[s] = loads[s.operands[1]]
    return found


def _without_branches(loop: For, changing: set[str | None], chosen_loads: set[Load]) -> For:
    read = {s.buffer: s.offset for s in loop.body if isinstance(s, Load) and s.guard is None and not s.shared}
    body: list[Stmt] = []
    for s in loop.body:
        if isinstance(s, Load) and s in chosen_loads and s.buffer in read:
            other = read[s.buffer]
            s = s if ix.names(other) & (changing - {loop.var}) else _moved(s, other, loop.var)
        elif isinstance(s, Compute) and s.ctype == "float" and condition(s) not in changing | {None}:
            s = replace(s, symbol="choose")
        body.append(s)
    return replace(loop, body=tuple(body))


def _moved(load: Load, other: ix.Expr, lane: str) -> Load:
    """`load` without its guard: where that does not hold it reads at `other`, by equal steps."""
    step = ix.coefficient(load.offset, lane)
    if load.guard is None or step is None or step != ix.coefficient(other, lane):
        return load
    first: dict[str, ix.Expr] = {lane: ix.Const(0)}
    away = ix.sub(ix.substitute(load.offset, first), ix.substitute(other, first))
    return replace(load, guard=None, offset=ix.add(other, ix.Bin("*", load.guard, away)))
