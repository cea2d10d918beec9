"""Gradients that read the result of an op instead of its operand, if both lead to the same gradient.

In: AOTAutograd's joint graph. Out: the same graph, in which the operand may have no readers left in the
backward. The result is saved anyway if a product or a convolution reads it next. Before:

    x = addmm(b, a, w);  y = leaky_relu(x, 0.1);  z = mm(y, v)
    leaky_relu_backward(g, x, 0.1, False)
becomes
    leaky_relu_backward(g, y, 0.1, True)

torch does this for relu and tanh. Two kinds of operands are still read: an input of the program, which takes
no further memory, and the result of a norm, which is computed again from the tensors that the norm's gradient
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..fx.updates import sharing
from . import norms

aten = torch.ops.aten

_MOST = 256  # every floating dtype holds all integers up to this one


def read_results(joint: fx.GraphModule) -> None:
    """Changes the graph."""
    changed = False
    inputs = sharing(joint.graph, [node for node in joint.graph.nodes if node.op == "placeholder"])
    for node in joint.graph.nodes:
        gradient, form = _GRADIENTS.get(node.target, (None, None))
        operand = node.args[0] if gradient is not None else None
        if not isinstance(operand, fx.Node) or operand in inputs or norms.is_result(operand) or node.kwargs:
            continue
        for user in list(operand.users):
            found = form(node, user) if user.target is gradient and user.args[1] is operand else None
            if found is not None:
                user.args, changed = found, True
    if changed:
        joint.recompile()


def _leaky_relu(node: fx.Node, gradient: fx.Node) -> tuple | None:
    """The result has the operand's sign if the slope is at least 0."""
    slope = node.args[1] if len(node.args) > 1 else 0.01
    of_operand, (its_slope, is_result) = gradient.args[0], gradient.args[2:4]
    if is_result or type(slope) not in (int, float) or slope != its_slope or not slope >= 0:
        return None
    return (of_operand, node, slope, True)


def _hardtanh(node: fx.Node, gradient: fx.Node) -> tuple | None:
    """The result is at a bound where the operand is at it or beyond. The bounds must not be rounded."""
    ends = (*node.args[1:], *(-1.0, 1.0)[len(node.args) - 1 :])
    if ends != gradient.args[2:] or not all(_is_whole(end) for end in ends):
        return None
    return (gradient.args[0], node, *ends)


def _is_whole(number: Any) -> bool:
    return type(number) in (int, float) and abs(number) <= _MOST and number == int(number)


#: op -> its gradient, and a function of both nodes: the arguments with which the gradient reads the result,
#: or None if the result does not suffice
_GRADIENTS: dict[Any, tuple[Any, Callable[[fx.Node, fx.Node], tuple | None]]] = {
    aten.leaky_relu.default: (aten.leaky_relu_backward.default, _leaky_relu),
    aten.hardtanh.default: (aten.hardtanh_backward.default, _hardtanh),
}
