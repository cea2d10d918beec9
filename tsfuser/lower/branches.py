"""The pass that computes only the chosen side, where one condition chooses for all lanes of a vector.

In: statements, some in loops bound to `vector`. Out: statements of the same meaning. Example, of the
gradients of q and of k, side by side in one tensor:

    for lane in 8: { a = f(x[lane]); b = g(y[lane]); c = where(in_q, a, b); c_o[lane] = c }
becomes
    if in_q: for lane in 8: { a = f(x[lane]); c = a; c_o[lane] = c }
    else:    for lane in 8: { b = g(y[lane]); c = b; c_o[lane] = c }

Threads of one warp that differ in the condition take both ways, as without the pass.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.symbols import filled, find
from .index import Var
from .loop_ir import Compute, For, If, Let, Load, Stmt
from .traverse import defined, used, with_bodies

WORTH_A_BRANCH = 12  # instructions of a lane that need not be computed on one of the two sides
LANE_LOAD = 16  # instructions that a load by each lane is taken for: 32 threads read 32 sectors, in 32 cycles
MOST_CONDITIONS = 16  # the most that are tried
MOST_COPIED = 1.5  # the instructions of both sides together over those of before, at most


def branch(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """`for lane in 8: c = where(p, a, b)` -> `if p: for lane in 8: c = a; else: for lane in 8: c = b` where
    `p` does not depend on the lane and one side costs much that the other does not need."""
    made = (with_bodies(s, branch) for s in body)
    return tuple(_branched(s) if isinstance(s, For) and s.bind == "vector" else s for s in made)


def _branched(loop: For) -> Stmt:
    local, whole = {defined(s) for s in loop.body}, _cost(loop)
    best, ways = WORTH_A_BRANCH, None
    conditions = dict.fromkeys(c for c in map(condition, loop.body) if c is not None and c not in local)
    for asked in list(conditions)[:MOST_CONDITIONS]:
        yes, no = _decided(loop, asked, 1), _decided(loop, asked, 2)
        costs = _cost(yes), _cost(no)
        if whole - min(costs) >= best and sum(costs) <= MOST_COPIED * whole:
            best, ways = whole - min(costs), (asked, yes, no)
    if ways is None:
        return loop
    asked, yes, no = ways
    return If(Var(asked), (_branched(yes),), (_branched(no),))


def condition(s: Stmt) -> str | None:
    """The name that a choice asks, where that is a condition as it is."""
    if not isinstance(s, Compute) or s.symbol != "where" or not s.operands:
        return None
    plain = _argument(s, 0) == _hole(0) and s.operands[0] not in s.vectors
    return s.operands[0] if plain else None


def is_text(s: Compute, k: int) -> bool:
    """Whether argument `k` is a number of the code."""
    return "{" not in _argument(s, k)


def _argument(s: Compute, k: int) -> str:
    return s.arguments[k] if s.arguments else _hole(k)


def _hole(k: int) -> str:
    """What stands for operand `k`."""
    return f"{{{k}}}"


def _decided(loop: For, asked: str, side: int) -> For:
    """`loop` where all choices by `asked` take operand `side`, without what is of no use then."""
    body: list[Stmt] = []
    needed: set[str] = set()
    for s in reversed(loop.body):
        s = chosen(s, side) if condition(s) == asked else s
        if isinstance(s, (Compute, Let, Load)) and "[" not in s.name and s.name not in needed:
            continue
        body.append(s)
        needed |= used(s)
    return replace(loop, body=tuple(reversed(body)))


def chosen(s: Stmt, side: int) -> Compute:
    """The choice `s` once it is made."""
    assert isinstance(s, Compute)
    text = _argument(s, side)
    read = tuple(n for k, n in enumerate(s.operands) if _hole(k) in text)  # one operand, or none
    text = filled(text, [_hole(0)] * len(s.operands))
    vectors = tuple(v for v in s.vectors if v in read)
    return replace(s, symbol="convert", operands=read, arguments=(text,), vectors=vectors)


def _cost(loop: For) -> int:
    return sum(
        find(s.symbol).cost if isinstance(s, Compute) else LANE_LOAD if isinstance(s, Load) else 0
        for s in loop.body
    )
