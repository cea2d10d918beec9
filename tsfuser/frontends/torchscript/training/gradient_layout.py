"""Gradients in the layout of the tensor that they are the gradient of.

Eager leaves a gradient in whatever layout its ops give. A gradient of `view(n, t, h, d).transpose(1, 2)` that
is row-major costs the backward of the view a copy, and one with the last dims exchanged makes a product of
matrices copy it twice. A group stores its results anyway, in any layout. Before:

    %grad_x = aten::mul(%g, %c);  return (%grad_x)
becomes
    %grad_x = aten::mul(%g, %c)
    %l = prim::GradOf(%grad_x) block0: tsfuser::laid_out(%grad_x, [0, 2, 1, 3])
    return (%l)

In: the backward of a differentiable graph, and for each of its results the order of dims to be wished for.
Out: the same graph. Only a group heeds the hint; elsewhere the op gives its operand back."""

from __future__ import annotations

from collections.abc import Sequence

from ....graph.layout_hints import LAID_OUT
from ....graph.wrapper import Graph, Node, Value, graph_outputs, inputs, insert, is_tensor


def add_layout_hints(backward: Graph, orders: Sequence[Sequence[int]]) -> None:
    """Inserts the hints, each in a `prim::GradOf`, which torch drops where the gradient is a zero without
    elements; `orders` are empty where there is none."""
    for end in {result.node() for result in graph_outputs(backward)}:
        if end.kind() != "prim::TupleConstruct" or end.inputsSize() != len(orders):
            continue
        for k, (gradient, order) in enumerate(zip(inputs(end), orders)):
            if order and is_tensor(gradient):
                whole = insert(backward, end, "prim::GradOf", [gradient])
                whole.s_("name", LAID_OUT)
                block = whole.addBlock()
                hint = block.addNode(LAID_OUT, [gradient, _numbers(backward, whole, order)])
                block.registerOutput(hint.output())
                end.replaceInput(k, whole.output())


def _numbers(graph: Graph, place: Node, numbers: Sequence[int]) -> Value:
    """A constant list before `place`."""
    made = graph.insertConstant(list(numbers))
    made.node().moveBefore(place)
    return made
