"""What is compared with a saved result must be that from which the result was computed.

In: the nodes of a forward and a backward as `Step`s. Out: for each node, the values that the backward must
not compute again. A kernel of the backward may give a value another last bit than the kernel of the forward.
That matters where an op that jumps compares the value with a saved one that depends on it. Example, the
gradient of `y = exp(x); m = amax(y, [1], True)`:

    equal = eq(y, m);  gradient = where(equal, g / sum(equal, [1], True), 0)

`m` is saved. If the backward computed `y` again, perhaps no element of a row would be equal to `m`.

Such values are the last ones on which both sides of a comparison depend. Any other op that jumps compares
with a number: the gradient of relu with 0. Its operand is equal to that number by more than chance only if an
op combines a value with elements of this value, as `y - m` does, or `y - relu(y)`. Then `y` must be saved,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..ops.table import Row
from .rows import row_of
from .wrapper import Node, Value, inputs, is_tensor

_ELEMENTWISE = ("activations", "arithmetic", "gradients", "joins", "paddings", "pointwise", "selection")


@dataclass(frozen=True)
class Step:
    """A node that computes. `operands`: the numbers of the steps that it reads, each once; `compared`: of
    those in which it jumps. `elementwise`: each element of the result depends on an element of each operand;
    `selects`: elements of the result may be elements of an operand. Both are true of views."""

    operands: tuple[int, ...]
    compared: tuple[int, ...] = ()
    elementwise: bool = False
    selects: bool = False


def is_elementwise(row: Row) -> bool:
    """The fact of a `Step`, of an op with that row."""
    return row.smooth or row.is_view or row.family in _ELEMENTWISE


def selects(row: Row) -> bool:
    """The fact of a `Step`, of an op with that row."""
    return row.selects or row.is_view or row.joins or row.family == "paddings"


def step_of(node: Node, numbers: Mapping[int, int], jumps: bool) -> Step:
    """A node of a typed graph. `numbers`: those of the steps by the numbers of values; `jumps`: whether the
    backward needs the node."""
    found, operands = row_of(node), [v for v in inputs(node) if v.unique() in numbers]
    given = _steps_of(operands, numbers)
    if found is None:
        return Step(given)
    row, schema = found
    named = zip(schema.arguments, inputs(node)) if jumps and row.jumps else ()
    read = [v for name, v in named if is_tensor(v) and not name.startswith("grad")]
    return Step(given, _steps_of(read, numbers), is_elementwise(row), selects(row))


def _steps_of(values: Iterable[Value], numbers: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers[v.unique()] for v in values if v.unique() in numbers))


def met_again(steps: Sequence[Step | None]) -> Iterator[tuple[int, int]]:
    """Pairs of a value and a step at which it is met again. None stands for an input, which nothing
    computes."""
    if any(step is not None and step.compared for step in steps):
        ways = _Ways(steps)
        for k, step in enumerate(steps):
            if step is not None:
                yield from ((value, k) for value in ways.met_again(k, step))


class _Ways:
    """In what ways values reach steps. A set of values is an int with a bit for each step, in order."""

    def __init__(self, steps: Sequence[Step | None]):
        self._steps, self._leading = steps, _lead_elementwise_to_compared(steps)
        count = len(steps)
        self._any, self._elementwise, self._selected = [0] * count, [0] * count, [0] * count
        for k, step in enumerate(steps):
            if step is not None:
                own = 1 << k
                self._any[k] = own | _union(self._any, step.operands)
                reaching, selected = (
                    _union(self._elementwise, step.operands),
                    _union(self._selected, step.operands),
                )
                if step.elementwise:
                    self._elementwise[k] = own | reaching
                    self._selected[k] = selected | (reaching if step.selects else 0)
                else:
                    self._elementwise[k] = own
                    self._selected[k] = reaching | selected if step.selects else 0

    def met_again(self, k: int, step: Step) -> list[int]:
        """The last values that reach the step on two ways that matter."""
        met = 0
        for a, b in combinations(step.compared, 2):
            met |= self._any[a] & self._any[b]
        if k in self._leading:
            for a, b in combinations(step.operands, 2):
                met |= self._elementwise[a] & self._selected[b] | self._selected[a] & self._elementwise[b]
        return list(self._last(met, self._any[k])) if met else []

    def _last(self, values: int, ways: int) -> Iterator[int]:
        """Those of the values that others on the ways read."""
        later = ways >> (values & -values).bit_length() << (values & -values).bit_length()
        read: set[int] = set()
        for k in _members(later & ~values):
            step = self._steps[k]
            read.update(step.operands if step is not None else ())
        return (k for k in sorted(read) if values >> k & 1)


def _lead_elementwise_to_compared(steps: Sequence[Step | None]) -> set[int]:
    """The operands in which steps jump, and what these depend on through elementwise steps."""
    found = {operand for step in steps if step is not None for operand in step.compared}
    for k in reversed(range(len(steps))):
        step = steps[k]
        if k in found and step is not None and step.elementwise:
            found.update(step.operands)
    return found


def _union(sets: list[int], members: Iterable[int]) -> int:
    found = 0
    for k in members:
        found |= sets[k]
    return found


def _members(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low
