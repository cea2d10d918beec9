"""Moments in one pass over the data or in two.

In: a Fusion in which each mean and each sum of squared distances is one reduction (`mean`, `squares`), which
is one pass. Out: the Fusion in which some of them are two passes: all on the host, and on a GPU those whose
row a block keeps, so that the second pass reads no memory. (Blocks that share a row keep one reduction, and
exchange moments once; each takes two passes over its part, as lower/block_moments.py says.) The second pass
adds up distances from the mean of the first pass. The sum of these distances, the drift, is the rounding
error of that mean; it corrects both results (Chan, Golub, LeVeque, Algorithms for Computing the Sample
Variance, 1983). Values with fewer digits than the sums need no such correction. Example: `squares = reduce
squares of x` becomes, with a power of two `s` near 1 / n

    mean = sum(x * s) / (n * s);  distance = x - mean;  drift = sum(distance) / n
    squares = sum(distance * distance) - drift * drift * n
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.dtypes import DType
from ..ir.fusion import MOMENTS, Fusion, Op, Pointwise, Reduce, Value
from ..ir.symbols import define
from ..ir.values import extent
from ..segment import Allocations, Segment, segments
from .machine import Machine
from .proposal import Proposal
from .schedulers import is_one_pass, propose

define("share_of_sum", "({0} * sum_scale({1}))")
define("scaled_mean", "scaled_mean({0}, {1})")
define("scaled_mean_or_nan", "(scaled_mean({0}, {1}) + ({0} - {0}))")
define("square_times", "({0} * {0} * {1})", cheap=True)
define("corrected_squares", "(is_finite({0}) ? ({0} - {1} < 0 ? 0 : {0} - {1}) : {0})")


def expanded(call: Call, fusion: Fusion, machine: Machine) -> Fusion:
    """`fusion`, with two passes for those moments for which they are better on `machine`."""
    fusion = _once(fusion)
    found = {_key(op): op for op in fusion.ops if isinstance(op, Reduce) and op.combine in MOMENTS}
    if not found:
        return fusion
    trial = _rewritten(fusion, set(found))
    # the compiler vectorises sums: even with a second read they take less time than the divisions of moments
    if machine.vectorises_loops:
        return trial
    parts = segments(call, trial, Allocations(len(fusion.outputs)), lambda s: is_one_pass(call, s, machine))
    chosen = {
        key for key, op in found.items() if any(_keeps(call, part, _names(op), machine) for part in parts)
    }
    return trial if len(chosen) == len(found) else _rewritten(fusion, chosen)


def _once(fusion: Fusion) -> Fusion:
    """Computes equal moments once, and copies them. `fusion` itself if there are none."""
    known: dict[tuple, Value] = {}
    ops: list[Op] = []
    for op in fusion.ops:
        if isinstance(op, Reduce) and op.combine in MOMENTS:
            first = known.setdefault((op.combine, *_key(op)), op.output)
            if first is not op.output:
                op = Pointwise(op.name, "copy", (first,), first.dtype.register, op.output)
        ops.append(op)
    return fusion if tuple(ops) == fusion.ops else replace(fusion, ops=tuple(ops))


def _key(op: Reduce) -> tuple[Value, frozenset, DType]:
    """Equal for moments of the same data in the same dtype."""
    return op.operands[0], frozenset(op.axes), op.output.dtype


def _names(op: Reduce) -> tuple[str, str]:
    """Names of the two sums."""
    dtype = [op.output.dtype.name] if op.output.dtype is not op.operands[0].dtype.register else []
    where = "_".join([op.operands[0].name, *sorted(a.name for a in op.axes), *dtype])
    return f"sum_of_{where}", f"squares_of_{where}"


def _keeps(call: Call, segment: Segment, names: tuple[str, str], machine: Machine) -> bool:
    """Whether `segment` computes both sums, and reads no memory for the second."""
    if not {op.output.name for op in segment.reductions} >= set(names):
        return False
    proposal = propose(call, segment, machine)
    return isinstance(proposal, Proposal) and proposal.rereads_are_free


def _rewritten(fusion: Fusion, chosen: set) -> Fusion:
    """`fusion` with the moments of `chosen` in two passes."""
    ops: list[Op] = []
    done: set = set()
    wanted = {
        (_key(op), op.combine): op.output
        for op in fusion.ops
        if isinstance(op, Reduce) and op.combine in MOMENTS
    }
    for op in fusion.ops:
        if not (isinstance(op, Reduce) and op.combine in MOMENTS and _key(op) in chosen):
            ops.append(op)
        elif _key(op) not in done:
            done.add(_key(op))
            ops += _two_passes(op, wanted.get((_key(op), "mean")), wanted.get((_key(op), "squares")))
    return replace(fusion, ops=tuple(ops))


def _two_passes(op: Reduce, mean: Value | None, squares: Value | None) -> list[Op]:
    """The ops that compute `mean` and `squares`, each of which may be None, of the data of `op`."""
    [x], like = op.operands, op.output
    dtype, count, names = like.dtype, extent(sz.product([a.extent for a in op.axes])), _names(op)
    ops: list[Op] = []

    def value(name: str, dims) -> Value:
        return Value(name, dtype, dims)

    def add(made: Op) -> Value:
        ops.append(made)
        return made.output

    def pointwise(symbol: str, operands: tuple[Value, ...], output: Value, name: str = "") -> Value:
        return add(Pointwise(name or symbol, symbol, operands, dtype.register, output))

    def summed(name: str, operand: Value) -> Value:
        return add(Reduce("sum", "sum", (operand,), op.axes, value(name, like.dims)))

    # a sum of values near the largest number would overflow, although their mean does not
    share = pointwise("share_of_sum", (x, count), value(f"share_of_{names[0]}", x.dims), "mul")
    sum_ = summed(names[0], share)
    coarse = x.dtype.itemsize < dtype.itemsize  # a true quotient next: equal values have no variance
    if coarse and mean is not None:  # NaN where a term is infinite, as eager's updates of a mean leave it
        first = pointwise("scaled_mean_or_nan", (sum_, count), mean, "mean")
    else:
        first = pointwise("scaled_mean", (sum_, count), value(f"mean_of_{names[0]}", like.dims), "mean")
    if squares is None and coarse:
        return ops
    distance = pointwise("sub", (x, first), value(f"distance_of_{names[0]}", x.dims))
    if squares is not None:
        square = pointwise("square", (distance,), value(f"square_of_{names[0]}", x.dims))
        total = summed(names[1], square)
        if coarse:
            pointwise("copy", (total,), squares, "squares")
            return ops
    drift = pointwise(
        "mean",
        (summed(f"drift_of_{names[0]}", distance), count),
        value(f"mean_drift_of_{names[0]}", like.dims),
    )
    if squares is not None:  # where the squares overflow, so may the correction: inf, not inf - inf
        less = pointwise("square_times", (drift, count), value(f"less_of_{names[0]}", like.dims), "mul")
        pointwise("corrected_squares", (total, less), squares, "sub")
    if mean is not None:
        pointwise("add", (first, drift), mean)
    return ops
