"""The table of derivatives.

In: an operator kind. Out: its `Rule`: a function that writes the gradients of the op's operands. It gets its
arguments by name: `grad` (that of the result; `grads`: a tuple for several results, None for those that have
none), `result` (`results`), `wants` (the names of the operands that want a gradient), and the op's arguments
by their names in the schema: Terms, Python values for constants, lists of Terms for lists of tensors. It
returns the gradient of the first tensor operand, or a
tuple, one for each tensor operand (a list for a list of tensors); None for none. Example:

    @broadcasting("aten::mul")
    def mul(grad, self, other):
        return grad * other, grad * self

What the formulas are is said in torch's derivatives.yaml; the tests compare each with eager, at two sets of
sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Refusal
from ...graph.effects import PURE, effect
from ...graph.wrapper import LIST, Value, constant_of, inputs, is_constant, is_tensor
from ..terms import DTYPE_NUMBERS, Term, Writer


@dataclass(frozen=True)
class Rule:
    """How one kind of op is differentiated. `takes` are the names that `write` asks for, `of` those of the
    operands whose gradients it gives. `broadcasts`: these have the sizes of the result, and are summed to
    those of the operands."""

    kind: str
    write: Callable[..., Any]
    takes: frozenset[str]
    of: tuple[str, ...]
    broadcasts: bool


RULES: dict[str, Rule] = {}  # registry: rules by operator kind


def rule(*kinds: str, of: str = "self", broadcasts: bool = False) -> Callable[[Callable], Callable]:
    """Registers the function below as the rule of these kinds."""

    def add(write: Callable) -> Callable:
        takes = frozenset(inspect.signature(write).parameters)
        for kind in kinds:
            if kind in RULES:
                raise ValueError(f"{kind} has two rules")
            RULES[kind] = Rule(kind, write, takes, tuple(of.split()), broadcasts)
        return write

    return add


def broadcasting(*kinds: str, of: str) -> Callable[[Callable], Callable]:
    """The same for ops whose operands are broadcast."""
    return rule(*kinds, of=of, broadcasts=True)


class Unknown(Refusal):
    """A derivative has to know what these inputs of the graph are, which are numbers, or lists of them."""

    def __init__(self, reason: str, numbers: tuple[int, ...]):
        super().__init__(reason)
        self.numbers = numbers


def structural(value: Any, what: str) -> Any:
    """`value`, which a rule has to know. Raises Refusal where the program computes it; Unknown where that
    follows from inputs alone."""
    if not isinstance(value, Term):
        return value
    reason = f"{what} is not a constant, which its derivative needs"
    given = leading_numbers(value.value)
    if given is None:
        raise Refusal(reason)
    raise Unknown(reason, given)


def items_of(value: Any, what: str) -> Sequence[Any]:
    """The items of a list of numbers, of which the program may compute some. Raises as `structural` where it
    is not known how many there are."""
    if isinstance(value, Term) and value.value.node().kind() == LIST:
        return [
            constant_of(v) if is_constant(v) else Term(value.writer, v) for v in inputs(value.value.node())
        ]
    return structural(value, what)


def leading_numbers(value: Value) -> tuple[int, ...] | None:
    """Which inputs of the graph a number, or a list, is computed of; None where tensors lead to it."""
    found, waiting = set[int](), [value]
    while waiting:
        value = waiting.pop()
        if is_tensor(value):
            return None
        if value.node().kind() == "prim::Param":
            found.add(value.offset())
        elif effect(value.node()) == PURE:
            waiting += inputs(value.node())
        else:
            return None
    return tuple(sorted(found))


def known_rank(value: Term) -> int:
    """How many dims the tensor has. Raises Refusal where that is not known."""
    if value.facts.rank is None:
        raise Refusal("the number of dims is not known, which a derivative needs")
    return value.facts.rank


def is_whole(value: Term) -> bool:
    """Whether the tensor has whole numbers, or bools."""
    return value.facts.dtype is not None and value.facts.dtype not in DTYPE_NUMBERS


def argument(writer: Writer, value: Value | None) -> Any:
    """What a rule gets for an argument of its op."""
    if value is None:
        return None
    if is_constant(value):
        constant = constant_of(value)
        return list(constant) if isinstance(constant, tuple) else constant
    type_ = value.type()
    listed = type_.kind() == "ListType" and type_.getElementType().kind() == "TensorType"
    if listed and value.node().kind() == LIST:
        return [Term(writer, v) for v in inputs(value.node())]
    return Term(writer, value)
