"""Derivatives of activations that read the result, where that is saved anyway, and not the operand.

In: a graph with derivatives. Out: the same graph. Example, of which eager saves %x, and %y for the product:

    %y = aten::relu6(%x);  %z = aten::mm(%y, %w);  ...;  %gx = aten::hardtanh_backward(%gy, %x, 0, 6)
    ->  %gx = aten::hardtanh_backward(%gy, %y, 0, 6)

A softplus has its derivative by its result only where its threshold is large: there both are near 1.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph.wrapper import (
    Graph,
    Node,
    Value,
    constant_before,
    constant_of,
    facts,
    inputs,
    is_constant,
    nodes_of,
)
from .terms import Term, Writer

_CLIPPED, _SOFT = "aten::hardtanh_backward", "aten::softplus_backward"
_LEAKY = "aten::leaky_relu_backward"
#: The kinds of those.
DERIVATIVES = (_CLIPPED, _SOFT, _LEAKY)
_IS_RESULT = 3  # the argument that says what the derivative of a leaky relu reads
LARGE = 20  # a threshold of softplus above which the derivative is 1, but for 2e-9


def read_results(graph: Graph, is_saved: Callable[[Value, Node], bool]) -> bool:
    """Whether the graph was changed. `is_saved`: whether a result of the forward is saved where the
    derivative, a node, runs."""
    writer, changed = Writer(graph), False
    for node in nodes_of(graph, DERIVATIVES):
        readers = [use.user for use in node.inputsAt(1).uses() if use.offset == 0]
        made = next((reader.output() for reader in readers if _is_of(node, reader)), None)
        if made is None or not is_saved(made, node):
            continue
        changed = True
        if node.kind() == _SOFT:
            _derive_softplus(node, Term(writer, made))
            continue
        node.replaceInput(1, made)
        if node.kind() == _LEAKY:
            node.replaceInput(_IS_RESULT, constant_before(graph, node, True))
    return changed


def _is_of(derivative: Node, node: Node) -> bool:
    """Whether one is the derivative of the other."""
    numbers = [_number(v) for v in inputs(derivative)[2:]]
    if None in numbers or node.inputsAt(0).unique() != derivative.inputsAt(1).unique():
        return False
    if derivative.kind() == _LEAKY:  # the result has the operand's sign
        slope, is_result = numbers
        its_slope = _number(node.inputsAt(1)) if node.kind() == "aten::leaky_relu" else None
        return not is_result and its_slope == slope >= 0
    if node.kind() == "aten::relu6":
        return derivative.kind() == _CLIPPED and numbers == [0, 6]
    if [_number(v) for v in inputs(node)[1:]] != numbers:
        return False
    if node.kind() == "aten::hardtanh":
        return derivative.kind() == _CLIPPED and numbers[0] < numbers[1] and _are_exact(numbers, node)
    beta, threshold = numbers
    return node.kind() == "aten::softplus" and derivative.kind() == _SOFT and beta > 0 and threshold >= LARGE


def _are_exact(numbers: list, node: Node) -> bool:
    """Whether the op's result can be these numbers: 16 bits hold whole ones up to 256."""
    is_wide = facts(node.output().type()).dtype in ("float32", "float64")
    return is_wide or all(number == int(number) and abs(number) <= 256 for number in numbers)


def _number(value: Value) -> int | float | None:
    found = constant_of(value) if is_constant(value) else None
    return found if isinstance(found, (int, float)) else None


def _derive_softplus(node: Node, result: Term) -> None:
    writer = result.writer
    writer.place = writer.lines = node
    gradient = Term(writer, node.inputsAt(0))
    scaled = result * constant_of(node.inputsAt(2))
    slope = -((-scaled).expm1())
    made = (scaled > constant_of(node.inputsAt(3))).where(gradient, gradient * slope)
    made.value.setType(node.output().type())
    node.output().replaceAllUsesWith(made.value)
    node.destroy()
