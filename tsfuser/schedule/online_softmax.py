"""Which maximum and sum cooperative blocks combine together, as online softmax does.

In: the sweeps of a segment. Out: pairs of reductions, a maximum m of x and the sum of exp(x - m). Each block
computes its sum with the maximum of its own part. Then the blocks combine (m, sum), once instead of twice
(Milakov, Gimelshein, Online normalizer calculation for softmax, 2018). Example: `(("amax_2", "sum_5"),)`.
"""

from __future__ import annotations

from ..ir.fusion import Pointwise, Reduce
from ..ir.symbols import find
from .sweeps import Sweeps


def pairs(sweeps: Sweeps) -> tuple[tuple[str, str], ...]:
    """Names of the maximum and of the sum of each pair."""
    found = [_pair(sweeps, number) for number in sweeps.numbers[:-1]]
    return tuple((largest.output.name, summed.output.name) for largest, summed in filter(None, found))


def _pair(sweeps: Sweeps, number: int) -> tuple[Reduce, Reduce] | None:
    """The pair, if sweep `number` only finds the maximum, and the next one only computes the sum."""
    largest, summed = sweeps.reductions(number), sweeps.reductions(number + 1)
    if len(largest) != 1 or len(summed) != 1 or sweeps.stores(number + 1):
        return None
    if not {*largest, *summed} <= {*sweeps.allreduced}:
        return None
    if (largest[0].combine, summed[0].combine) != ("max", "sum") or not largest[0].output.dtype.is_floating:
        return None
    if sweeps.row_ops(number + 1) or not _is_exp_of_distance(sweeps, largest[0], summed[0], number):
        return None
    return largest[0], summed[0]


def _is_exp_of_distance(sweeps: Sweeps, largest: Reduce, summed: Reduce, number: int) -> bool:
    """Whether only exp(x - largest) is computed between the two, with an x that is known before `largest`."""
    terms = sweeps.ops_for({summed.operands[0].name})
    late = [op for op in terms if sweeps.level[op.output.name] == number + 1]
    symbols = [find(op.symbol).exact if isinstance(op, Pointwise) else "" for op in late]
    if symbols != ["sub", "exp"]:
        return False
    distance, exponential = late
    return (
        distance.operands[1].name == largest.output.name
        and exponential.operands[0].name == distance.output.name
        and sweeps.level.get(distance.operands[0].name, 0) <= number
    )
