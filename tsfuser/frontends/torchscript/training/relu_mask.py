"""The derivative of relu asks where its result is at most 0. Behind a batch norm that follows from what the
norm's own derivative reads, so that the backward need not read the result as well.

In: `SavedValues`, of a differentiable graph. Out: the same, where of `%y = aten::relu(%n)`, %n a result of
`aten::_batch_norm_impl_index`, the backward's

    %g = aten::threshold_backward(%grad, %y, %zero)
becomes
    %g = tsfuser::relu_backward(%grad, %y, %impl_index, %x, %weight, %bias, %save1, %save2, %training)

Of %y then only the dtype is asked. The norm's derivative has all of these operands but the bias, which the
program may write to before the backward: the forward keeps a copy, one number a channel. Only where %x is in
memory when the norm reads it, and not made by the norm's group, with more digits than are stored: then a
fused forward and a fused backward compute the same number, and take the same branch. What is not fused
compares %y, as before, and so does evaluation, whose statistics another norm may have moved before the
backward.
"""

from __future__ import annotations

from ....graph.rows import row_of
from ....graph.wrapper import (
    CONSTANT,
    Node,
    Value,
    all_nodes_of,
    constant_near,
    constant_of,
    inputs,
    insert,
    is_constant,
    is_tensor,
)
from .saved import SavedValues

NORM, DERIVATIVE = "aten::_batch_norm_impl_index", "aten::_batch_norm_impl_index_backward"


def ask_operands(saved: SavedValues) -> SavedValues:
    """`saved` with another backward, and with copies of biases that it needs."""
    arguments = {argument.debugName(): (value, argument) for _, value, argument in saved.of_outputs()}
    found = all_nodes_of(saved.backward, (DERIVATIVE,))
    derivatives = {node.inputsAt(0).debugName(): node for node in found}
    for node in all_nodes_of(saved.backward, ("aten::threshold_backward",)):
        if node.inputsAt(1).debugName() in arguments and _is_zero(node.inputsAt(2)):
            norm = _norm_behind(arguments[node.inputsAt(1).debugName()][0])
            index = norm and next(
                (a for v, a in arguments.values() if v.debugName() == norm.outputsAt(4).debugName()), None
            )
            if index is not None and index.debugName() in derivatives:
                saved = _ask(saved, node, norm, derivatives[index.debugName()])
    return saved


def _is_zero(value: Value) -> bool:
    return is_constant(value) and constant_of(value) == 0


def _norm_behind(result: Value) -> Node | None:
    """The batch norm that relu gave `result` of."""
    if result.node().kind() != "aten::relu":
        return None
    operand = result.node().inputsAt(0)
    norm = operand.node()
    if norm.kind() != NORM or operand.debugName() != norm.outputsAt(0).debugName():
        return None
    return norm if row_of(norm.inputsAt(0).node()) is None else None  # else its group may make it


def _ask(saved: SavedValues, asks: Node, norm: Node, derivative: Node) -> SavedValues:
    index, input, _, weight, _, _, save_mean, save_invstd, training = inputs(derivative)[:9]
    given = [index, input, weight, norm.inputsAt(2), save_mean, save_invstd, training]
    if not all(is_at_hand(saved, v) for k, v in enumerate(given) if k != 3):
        return saved
    if given[3].node().kind() != CONSTANT:
        if not is_tensor(given[3]):  # perhaps None
            return saved
        saved, given[3] = saved.keeping_copy(given[3], norm)
    operands = [constant_near(saved.backward, asks, v) if v.node().kind() == CONSTANT else v for v in given]
    gradient, result = inputs(asks)[:2]
    new = insert(saved.backward, asks, "tsfuser::relu_backward", [gradient, result, *operands])
    asks.output().replaceAllUsesWith(new.output())
    asks.destroy()
    return saved


def is_at_hand(saved: SavedValues, value: Value) -> bool:
    """Whether the backward has the value at its beginning."""
    return value.node().kind() == CONSTANT or value.node() == saved.backward.param_node()
