"""Moments of a block's part of a row that several blocks share, in two passes over that part.

In: a draft whose blocks share rows, and the moments that a sweep accumulates. Out: two accumulations. The
threads of a block first combine a sum, which gives the mean of their part. Then they add up the squared
distances from it, and the distances themselves: their sum is the rounding error of that mean, and corrects
the squares (Chan, Golub, LeVeque, Algorithms for Computing the Sample Variance, 1983). Terms with fewer
digits than the accumulators need no correction. So the blocks meet once, with moments each. Updates of
moments by each term (accumulate.py) take one pass, but twice as many instructions, and threads that combine
moments wait for a division at each step. Example:

    mean_0_sum[4] := 0.0f
    for u, lane: mean_0_sum[lane] := add(mean_0_sum[lane], share_of_sum(x0, mean_0_count))
    mean_0_sum := Sum over threads x
    mean_0_centre = scaled_mean(mean_0_sum, mean_0_count)
    mean_0_drift[4] := 0.0f;  mean_0_squares[4] := 0.0f
    for u, lane: { d = x0 - mean_0_centre; mean_0_drift[lane] += d; mean_0_squares[lane] += d * d }
    mean_0_drift := Sum, mean_0_squares := Sum over threads x
    mean_0_total[1] := moments_near(mean_0_count, mean_0_centre, mean_0_drift[0], mean_0_squares[0])
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ir.fusion import Lookup, Random, Reduce
from ..schedule.loops import Split
from ..schedule.placement import is_costly
from . import cooperative
from . import index as ix
from .accumulate import Accumulation
from .combine import COMBINATIONS, accumulator, conversion, totals
from .draft import Draft
from .exchange import combined_by_name, exchanged
from .index import Var
from .loop_ir import Accumulate, Accumulator, Compute, Let, Stmt, Total

SUM, MOMENTS = COMBINATIONS["sum"], COMBINATIONS["mean"]


def applies(draft: Draft, number: int, ops: Sequence[Reduce], known: Collection[str]) -> bool:
    """Whether sweep `number`, which accumulates `ops`, is two passes: it computes one set of moments and
    nothing else, of terms that are cheap to compute again. `known`: values that need not be computed."""
    if not draft.cooperative or draft.how.columns or draft.row_loop or len(totals(ops)) != 1:
        return False
    if not COMBINATIONS[ops[0].combine].part or len(ops[0].operands) != 1:
        return False
    if draft.sweeps.stores(number) or len(draft.sweeps.reductions(number)) != len(ops):
        return False
    terms, _ = draft.sweeps.needs(number, known)
    return not any(is_costly(op) or isinstance(op, (Random, Lookup)) for op in terms)


def passes(draft: Draft, ops: Sequence[Reduce]) -> list[Accumulation]:
    """The two passes. After the second one, blocks combine."""
    [(total, op)] = totals(ops).items()
    name, [value], wide = total.removesuffix("_total"), op.operands, accumulator(op, draft.how.in_double)
    lanes, lane = draft.lane.extent.a, Var(draft.lane.name)
    ctype, zero = wide.ctype, SUM.start(wide)
    sum_, squares, drift = (f"{name}_{word}" for word in ("sum", "squares_near", "drift"))
    term, share, distance = (f"{name}_{word}" for word in ("term", "share", "distance"))
    count, centre = f"{name}_count", f"{name}_centre"
    counted = _terms_of_part(draft, f"{name}_terms")
    made = Compute(term, ctype, conversion(draft.elements.registers[value.name], ctype), (value.name,))
    guard = draft.row_guard
    first = Accumulation(
        [
            *draft.at.lets_for([counted]),
            counted,
            Compute(count, ctype, "convert", (counted.name,)),
            Accumulator(sum_, ctype, lanes, zero),
        ],
        [
            made,
            Compute(share, ctype, "share_of_sum", (term, count)),
            Accumulate(sum_, lane, SUM.symbol, share, guard, zero),
        ],
        [
            *_over_the_block(draft, [sum_], op),
            Compute(centre, ctype, "scaled_mean", (sum_, count), (sum_,), "0"),
        ],
    )
    corrected = value.dtype.itemsize >= wide.itemsize
    summed = [squares, *([drift] if corrected else [])]
    last = f"{drift}[0]" if corrected else "0"
    of_block = _over_the_block(draft, summed, op)
    of_all = Total(total, MOMENTS.functor, MOMENTS.start(wide), 0, 32 * MOMENTS.bytes(wide))
    over_blocks = cooperative.of_all_blocks(draft, [of_all], draft.exchanged)
    draft.exchanged = max(draft.exchanged, exchanged(over_blocks))
    second = Accumulation(
        [Accumulator(x, ctype, lanes, zero) for x in summed],
        [
            made,
            Compute(distance, ctype, "distance_from", (centre, term)),
            *([Accumulate(drift, lane, SUM.symbol, distance, guard, zero)] if corrected else []),
            # behind the row the distance may be infinite or NaN, and its product with 0 is NaN
            Accumulate(squares, lane, "add_product", distance, guard, others=(distance,)),
        ],
        [
            *of_block,
            Accumulator(
                total,
                MOMENTS.ctype(wide),
                1,
                f"moments_near<{ctype}>({count}, {centre}, {last}, {squares}[0])",
            ),
            *over_blocks,
        ],
    )
    return [first, second]


def _over_the_block(draft: Draft, names: Sequence[str], op: Reduce) -> list[Stmt]:
    """The combination of sums over the threads of a block."""
    wide = accumulator(op, draft.how.in_double)
    found, threads = [(name, SUM, wide) for name in names], draft.schedule.threads
    made = combined_by_name(found, draft.how, threads, 1, 1, draft.exchanged, draft.across)
    draft.exchanged = max(draft.exchanged, exchanged(made))
    return made


def _terms_of_part(draft: Draft, name: str) -> Let:
    """How many elements of the row the block has: only the last part of a row has fewer than others."""
    part = draft.cooperative.part
    split = next(r for r in draft.schedule.relations if isinstance(r, Split) and r.outer == part)
    each = draft.params.size(split.by, "part_length")
    if split.exact:
        return Let(name, draft.params.index, each)
    left = ix.sub(draft.params.size(split.extent, "row_length"), ix.mul(draft.at.of[part], each))
    return Let(name, draft.params.index, ix.minimum(each, left))
