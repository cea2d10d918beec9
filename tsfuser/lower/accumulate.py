"""How a thread accumulates.

In: a reduction and its terms, one an iteration. Out: the statements before, in and after the loops of the
thread. Most keep one number a lane. *Moments* keep several: how many terms there were, their mean, and the
sum of their squared distances from it, which every term updates (Welford, Note on a Method for Calculating
Corrected Sums of Squares and Products, 1962). Lanes that see equally many terms share the count and its
reciprocal; the mean is counted from the first term, unless the terms are coarser than the accumulator
anyway. After the loops they become one `moments`, which `Moments` combines (Chan, Golub, LeVeque, Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtypes import DOUBLE, FLOAT, DType
from ..ir.fusion import Reduce
from ..ir.symbols import define
from . import index as ix
from .combine import COMBINATIONS, conversion
from .index import Expr
from .loop_ir import Accumulate, Accumulator, Compute, Stmt

define("increment", "({0} + 1)", cheap=True)
define("reciprocal_of_count", "reciprocal({0} > 1 ? {0} : 1)")
define("first_of", "({2} < 1 ? {0} : {1})", cheap=True)
define("distance_from", "({1} - {0})", cheap=True)
for _dtype in (FLOAT, DOUBLE):
    define(f"moments_of_{_dtype}", f"moments_of<{_dtype.ctype}>({{0}}, {{1}}, {{2}}, {{3}})")


@dataclass(frozen=True)
class Accumulation:
    """Statements before the loops, in the innermost one, and after all."""

    before: list[Stmt]
    body: list[Stmt]
    after: list[Stmt]


@dataclass(frozen=True)
class Chains:
    """The accumulators of a thread: there are `count`, and a term is added to number `at`. `apart`: they have
    not all seen as many terms, even where that does not depend on them."""

    count: int
    at: Expr
    apart: bool = False


def accumulation(
    name: str,
    op: Reduce,
    registers: dict[str, str],
    wide: DType,
    chains: Chains,
    guard: Expr | None,
    masked: bool = False,
) -> Accumulation:
    """Accumulators `name` in dtype `wide`. Operands have the C types `registers`; a term counts where `guard`
    holds. `masked`: other terms become the identity, where a branch would cost more: a compiler moves all
    that leads to the term behind it, lane by lane."""
    combination = COMBINATIONS[op.combine]
    term = name.removesuffix("_total") + "_term"
    if combination.part and len(op.operands) == 1:
        convert = Compute(
            term, wide.ctype, conversion(registers[op.operands[0].name], wide.ctype), (op.operands[0].name,)
        )
        centred = op.operands[0].dtype.itemsize >= wide.itemsize
        return _moments(name, convert, wide, chains, guard, centred)
    ctype = combination.ctype(wide)
    if combination.part:  # what other blocks have left
        made = Compute(term, ctype, f"moments_of_{wide}", tuple(v.name for v in op.operands))
    else:
        made = Compute(term, ctype, conversion(registers[op.operands[0].name], ctype), (op.operands[0].name,))
    identity = combination.start(wide)
    start = Accumulator(name, ctype, chains.count, identity)
    add = Accumulate(name, chains.at, combination.symbol, term, guard, identity if masked else "")
    return Accumulation([start], [made, add], [])


def _moments(
    name: str, term: Compute, wide: DType, chains: Chains, guard: Expr | None, centred: bool
) -> Accumulation:
    """`place = term - origin; distance = place - rest; rest += distance / count; squares += distance (place -
    rest)`. `centred`: the origin is a thread's first term, else 0."""
    lanes, at = chains.count, chains.at
    shared = not chains.apart and not ix.names(guard) & ix.names(at)  # one count for all lanes
    count, origin, rest, squares = (f"{name}_{part}" for part in ("count", "origin", "rest", "squares"))
    distance, left, share = (f"{name}_{word}" for word in ("distance", "left", "share"))
    place = f"{name}_place" if centred else term.name
    at_count = ix.Const(0) if shared else at
    own = [rest, squares, *([origin] if centred else [])]
    before: list[Stmt] = [
        Accumulator(count, wide.ctype, 1 if shared else lanes, "0"),
        *(Accumulator(x, wide.ctype, lanes, "0") for x in own),
    ]
    body: list[Stmt] = [
        Accumulate(count, at_count, "increment", "1", guard),
        Compute(share, wide.ctype, "reciprocal_of_count", (count,), (count,), at_count),
        term,
    ]
    if centred:
        body.append(Accumulate(origin, at, "first_of", term.name, guard, others=(share,)))
        body.append(Compute(place, wide.ctype, "distance_from", (origin, term.name), (origin,), at))
    body.append(Compute(distance, wide.ctype, "distance_from", (rest, place), (rest,), at))
    # masked here, so that a compiler need not choose between two distances from two means
    body.append(Accumulate(rest, at, "add_product", distance, guard, "0", (share,)))
    body.append(Compute(left, wide.ctype, "distance_from", (rest, place), (rest,), at))
    body.append(Accumulate(squares, at, "add_product", left, guard, others=(distance,)))
    parts = [
        f"{count}[{'0' if shared else 'lane'}]",
        f"{origin}[lane]" if centred else "0",
        f"{rest}[lane]",
        f"{squares}[lane]",
    ]
    return Accumulation(
        before,
        body,
        [Accumulator(name, f"moments<{wide.ctype}>", lanes, f"moments_of<{wide.ctype}>({', '.join(parts)})")],
    )
