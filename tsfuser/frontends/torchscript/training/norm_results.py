"""A batch norm's result follows from what the norm's own derivative reads, so that in training nothing is
kept of it for the derivative of an activation behind it. Before:

    forward:  %n, ... = aten::_batch_norm_impl_index(%x, ...);  %y = aten::silu(%n);  keeps %n
    backward(%grad, %n):  the derivative of silu, of %grad and %n
becomes
    forward:  ...;  %k = tsfuser::kept_result(%n, %weight, %training);  keeps %k, and a copy of the bias
    backward(%grad, %k):  %n = tsfuser::batch_norm_result(%k, %x, %weight, %bias, ...);  the same derivative

%k is %n outside training, since the running statistics may have moved before the backward; in training it
is empty. The program may write to the bias before the backward: the forward keeps a copy, one number a
channel.

In: `SavedValues`, of a differentiable graph. Out: the same, with other graphs, and the numbers of the outputs
that are not kept. Only where %x is in memory when the norm reads it, and not made by the norm's group, with
more digits than are stored. Where the gradient is differentiated again, %n depends on what it is computed
of: the copy of the bias has a gradient for that."""

from __future__ import annotations

from ....graph.rows import row_of
from ....graph.wrapper import (
    CONSTANT,
    Node,
    Value,
    all_nodes_of,
    constant_near,
    graph_outputs,
    inputs,
    insert,
    is_tensor,
    nodes_in,
)
from .recompute import is_read_by_groups
from .relu_mask import DERIVATIVE, NORM, is_at_hand
from .saved import SavedValues, gradient_outside

_WEIGHT, _BIAS, _TRAINING = 1, 2, 5  # operands of the norm


def compute_again(saved: SavedValues) -> tuple[SavedValues, set[int]]:
    """`saved` with other graphs, and the outputs of the forward that the backward needs no more."""
    returned = {v.unique() for v in graph_outputs(saved.forward)[: saved.real]}
    places = {value.unique(): argument for _, value, argument in saved.of_outputs()}
    derivatives = {node.inputsAt(0).unique(): node for node in all_nodes_of(saved.backward, (DERIVATIVE,))}
    dropped: set[int] = set()
    for j, value, argument in list(saved.of_outputs()):
        norm = value.node()
        if norm.kind() != NORM or value.offset() != 0 or value.unique() in returned:
            continue
        index = places.get(norm.outputsAt(4).unique())
        derivative = index and derivatives.get(index.unique())
        if (
            derivative
            and row_of(norm.inputsAt(0).node()) is None  # else its group may make it
            and list(argument.uses())
            and is_read_by_groups(value)
            and is_read_by_groups(argument)
            and all(is_at_hand(saved, v) for v in _kept_by_norm(derivative))
            and (norm.inputsAt(_BIAS).node().kind() == CONSTANT or is_tensor(norm.inputsAt(_BIAS)))
        ):
            saved = _compute(saved, norm, derivative, argument)
            dropped.add(j)
    return saved, dropped


def _kept_by_norm(derivative: Node) -> list[Value]:
    """What the derivative reads besides the gradient and its flags."""
    return [v for k, v in enumerate(inputs(derivative)[:10]) if k != 2]


def _compute(saved: SavedValues, norm: Node, derivative: Node, argument: Value) -> SavedValues:
    """`saved`, where the result of `norm`, for which `argument` stands in the backward, is computed there."""
    forward, backward = saved.forward, saved.backward
    _, input, weight, mean, var, save_mean, save_invstd, training, eps = _kept_by_norm(derivative)
    result, bias = norm.outputsAt(0), norm.inputsAt(_BIAS)
    first = nodes_in(backward)[0]

    def near(value: Value) -> Value:
        return constant_near(backward, first, value) if value.node().kind() == CONSTANT else value

    kept = forward.create(
        "tsfuser::kept_result", [result, norm.inputsAt(_WEIGHT), norm.inputsAt(_TRAINING)], 1
    )
    saved, stand_in = saved.keeping(kept.insertAfter(norm).output())
    if bias.node().kind() == CONSTANT:
        bias = near(bias)
    else:
        saved, bias = saved.keeping_copy(bias, norm, gradient_outside(derivative, 2))
    operands = [stand_in, input, near(weight), bias, near(mean), near(var), save_mean, save_invstd]
    computed = insert(backward, first, "tsfuser::batch_norm_result", [*operands, near(training), near(eps)])
    argument.replaceAllUsesWith(computed.output())
    return saved
