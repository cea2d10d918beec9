"""Which ops take their fast forms: those whose error a rounding to 16 bits hides.

In: a Fusion whose ops are exact. Out: the Fusion with fast forms where the budget allows them. A budget is
how far a value may be off, relative to itself, because of fast forms. Example, of `sigmoid(x) * y` in
bfloat16:

    pointwise('sigmoid', 'sigmoid', (x0,), float32, sigmoid_0)
    -> pointwise('sigmoid', 'fast_sigmoid', (x0,), float32, sigmoid_0)

Budgets come from where values go. What is stored in 16 bits may be off by a quarter of its last place, what
is stored in 32 bits by nothing. An op shares what its own form leaves of the budget among its operands, each
by how much an error of it grows on the way (`Symbol.grows`). Any operand whose error may grow without bound,
as in a difference, has to be exact, but for one of a 16-bit dtype: the program rounds it there, with an
error of up to half its last place in eager, so with a quarter of it the result is still nearer to the exact
one. That does not hold for quotients and roots, which often are numbers of 16 bits, so that eager's rounding
changes nothing. Hence a value has two budgets, with and without this exception.

What is reduced has to be exact, too, but for a sum of numbers that are not negative, whose relative error is
at most that of its terms, and for terms of a 16-bit dtype with a 64th of their budget: errors of fast forms
may add up, where the roundings of eager partly cancel. These terms, and what they are products of, have that
budget also where the sum is stored in 32 bits, as gradients of weights are: eager rounds them to 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from .dtypes import BFLOAT16, FLOAT, HALF
from .fusion import Fusion, Op, Pointwise, Random, Reduce, Reshape, Value
from .symbols import fast_of, find

#: A quarter of the last place, relative to the largest number that has it: 2^-3 2^-p with p bits.
QUARTER_ULP = {BFLOAT16: 2**-10, HALF: 2**-13}
REDUCED = 2**-6  # of such a budget: what terms of a sum may be off by


class Budget(NamedTuple):
    """`strict`: what is stored is off by a quarter of its last place at most. `loose`: that, or the program
    rounds on the way. `narrow`: the part of a quarter of its last place that an operand of a 16-bit dtype may
    be off by."""

    strict: float
    loose: float
    narrow: float

    def both(self, other: Budget) -> Budget:
        """What two readers allow."""
        return Budget(*map(min, self, other))

    def less(self, error: float) -> Budget:
        """What is left after `error`."""
        return Budget(max(self.strict - error, 0.0), max(self.loose - error, 0.0), self.narrow)


EXACT = Budget(0.0, 0.0, 0.0)


def with_fast_forms(fusion: Fusion, everywhere: bool = False) -> Fusion:
    """`fusion` with the fast forms that the budgets allow; `everywhere`: of all ops in float32."""
    if not everywhere and not any(op.output.dtype in QUARTER_ULP for op in fusion.ops):
        return fusion  # all budgets are 0
    producers = {op.output.name: op for op in fusion.ops}
    budgets: dict[str, Budget] = {}

    def allow(value: Value, budget: Budget) -> None:
        budgets[value.name] = budget.both(budgets.get(value.name, budget))

    for stored in [output.value for output in fusion.outputs] + [update.value for update in fusion.updates]:
        quarter = QUARTER_ULP.get(stored.dtype, 0.0)
        allow(stored, Budget(quarter, quarter, float(quarter > 0)))
    ops: list[Op] = []
    for op in reversed(fusion.ops):
        budget = budgets.get(op.output.name, EXACT) if op.output.dtype.is_floating else EXACT
        made, left = _chosen(op, budget, everywhere)
        ops.append(made)
        for k, operand in enumerate(op.operands):
            if not operand.is_number and not isinstance(op, Random):  # which reads no element
                allow(operand, _share(op, k, left, producers))
    return fusion if ops[::-1] == list(fusion.ops) else replace(fusion, ops=tuple(reversed(ops)))


def _chosen(op: Op, budget: Budget, everywhere: bool) -> tuple[Op, Budget]:
    """The op with the form that it gets, and what that leaves of its budget."""
    if not isinstance(op, Pointwise) or op.compute is not FLOAT:
        return op, budget
    fast = find(op.symbol).fast
    if fast is None or not (everywhere or fast.error <= (budget.strict if fast.algebraic else budget.loose)):
        return op, budget
    return replace(op, symbol=fast_of(op.symbol)), budget.less(fast.error)


def _share(op: Op, k: int, budget: Budget, producers: Mapping[str, Op]) -> Budget:
    """What operand `k` of `op`, whose result has the `budget`, may be off by."""
    operand, narrow = op.operands[k], budget.narrow
    own = QUARTER_ULP.get(operand.dtype, 0.0)
    times = 0.0  # of the result's own tolerance
    if isinstance(op, Reshape) or (isinstance(op, Reduce) and op.combine in ("max", "min")):
        times = 1.0
    elif isinstance(op, Reduce) and op.combine in ("sum", "mean", "squares"):
        times = float(op.combine == "sum" and _is_positive(operand, producers))
        own, narrow = own * REDUCED, max(narrow * times, REDUCED)
        return Budget(budget.strict * times, max(budget.loose * times, own), narrow)
    elif isinstance(op, Pointwise) and find(op.symbol).grows:
        times = 1 / (find(op.symbol).grows[k] * sum(not v.is_number for v in op.operands))
    else:
        narrow = 0.0
    return Budget(budget.strict * times, max(budget.loose * times, own * narrow), narrow)


def _is_positive(value: Value, producers: Mapping[str, Op]) -> bool:
    """Whether no element of `value` is below 0."""
    op = producers.get(value.name)
    return isinstance(op, Pointwise) and find(op.symbol).positive
