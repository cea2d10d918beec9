"""Activations of which eager's derivative reads the operand, and autodiff's the result: relu6 and softplus.
The program may write to the result before the backward. Before:

    forward(%x):  %y = aten::relu6(%x);  return (%y, %y)
    backward(%grad, %grad_y, %y):  %m = (%y > 0) & (%y < 6);  %g = aten::mul(%grad, %m)

after:

    forward(%x):  %y = aten::relu6(%x);  return (%y, %x)
    backward(%grad, %grad_x, %x):  %g = aten::hardtanh_backward(%grad, %x, 0, 6)

In: `SavedValues` of a differentiable graph, and the results that the program may write to. Out: the same,
with eager's derivatives. A result that nothing writes to is read instead of the operand, which may not be in
memory otherwise. But of softplus the operand is read, too, where it is kept anyway, and where the threshold
is small: the result does not tell on which side of it the operand was. Autodiff's derivative of softplus is
`(z - 1) / z`, z = `exp(y * beta)`, of which no digit is left where y is small; `-expm1(-y * beta)` is the
same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ....graph.wrapper import (
    Block,
    Node,
    Value,
    blocks,
    constant_of,
    graph_inputs,
    insert,
    is_constant,
    nodes_of,
)
from .formulas import give
from .saved import SavedValues

_NAMES = ("aten::relu6", "aten::softplus")
LARGE = 20  # a threshold of softplus above which the derivative is 1, but for 2e-9


def save_operands(saved: SavedValues, written: Collection[int]) -> SavedValues:
    """`saved` with another backward, and with operands in place of results."""
    found = [n for n in nodes_of(saved.backward, ("prim::GradOf",)) if n.s("name") in _NAMES]
    exposed = saved.exposed(written) if found else set()
    for node in found:
        saved = _derive(saved, node, exposed)
    return saved


def _derive(saved: SavedValues, node: Node, exposed: set[str]) -> SavedValues:
    (block,) = blocks(node)
    compare = next(iter(nodes_of(block, ("aten::gt",))), None)
    if compare is None:
        return saved
    softplus, read = node.s("name") == "aten::softplus", compare.inputsAt(0)
    result = read.node().inputsAt(0) if softplus else read
    value = next((v for _, v, a in saved.of_outputs() if a.unique() == result.unique()), None)
    if value is None or value.node().kind() != node.s("name"):
        return saved
    operand = value.node().inputsAt(0)
    argument = _argument_of(saved, operand)
    by_operand = value.debugName() in exposed
    if softplus and not by_operand:
        threshold = compare.inputsAt(1)
        large = is_constant(threshold) and constant_of(threshold) >= LARGE
        by_operand = argument is not None or not large
    if by_operand and argument is None:
        saved, argument = _kept(saved, node, operand)
    chosen = argument if by_operand else result
    if softplus:
        _derive_softplus(saved, block, node.inputsAt(0), chosen, compare, by_operand)
    else:
        upper = nodes_of(block, ("aten::lt",))[0]
        bounds = [compare.inputsAt(1), upper.inputsAt(1)]
        give(saved, block, "aten::hardtanh_backward", [node.inputsAt(0), chosen, *bounds])
    return saved


def _derive_softplus(
    saved: SavedValues, block: Block, gradient: Value, chosen: Value, compare: Node, by_operand: bool
) -> None:
    scaled = compare.inputsAt(0)
    beta, threshold = scaled.node().inputsAt(1), compare.inputsAt(1)
    if by_operand:
        return give(saved, block, "aten::softplus_backward", [gradient, chosen, beta, threshold])
    end = block.returnNode()
    for kind in ("aten::neg", "aten::expm1", "aten::neg"):
        scaled = insert(saved.backward, end, kind, [scaled]).output()
    slope = insert(saved.backward, end, "aten::mul", [gradient, scaled]).output()
    give(saved, block, "aten::where", [compare.output(), gradient, slope])


def _argument_of(saved: SavedValues, value: Value) -> Value | None:
    """What stands in the backward for a value of the forward that is kept."""
    pairs = [*saved.of_inputs(), *((v, argument) for _, v, argument in saved.of_outputs())]
    return next((argument for v, argument in pairs if v.unique() == value.unique()), None)


def _kept(saved: SavedValues, node: Node, operand: Value) -> tuple[SavedValues, Value]:
    """`saved` with `operand`, of which `node` gives the gradient, and what stands for it in the backward. It
    has a gradient of its own, as what autodiff keeps has, for double backward."""
    backward, number = saved.backward, saved.forward.registerOutput(operand)
    of_operand, argument = backward.addInput(), backward.addInput()
    count, gradients = len(graph_inputs(backward)), len(saved.gradients)
    backward.permuteInputs([*range(gradients), count - 2, *range(gradients, count - 2), count - 1])
    total = backward.create("prim::AutogradAdd", [of_operand, node.output()], 1)
    total.insertAfter(node)
    node.output().replaceAllUsesAfterNodeWith(total, total.output())
    saved = replace(saved, gradients=[*saved.gradients, number], outputs=[*saved.outputs, number])
    return saved, argument
