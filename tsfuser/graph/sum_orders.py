"""Sums of gradients whose operands stand in the order in which torch added them.

While torch profiles a backward, `prim::AutogradAdd(%a, %b)` computes %b + %a: it takes its operands from the
end. In the graph that torch then optimises, it is `aten::add(%a, %b)`. The values are equal, but a sum has
the layout of its first operand, and what reads it was profiled with that of %b. Before:

    %c : Float(8, 4, strides=[1, 8]) = aten::add(%a, %b, 1)     with %a : Float(8, 4, strides=[4, 1])
becomes                                                          and %b : Float(8, 4, strides=[1, 8])
    %c : Float(8, 4, strides=[1, 8]) = aten::add(%b, %a, 1)

In: a graph with types. Out: the same graph, changed where the layouts say so, if it is a backward. In a
program the operands stand as written, and with other layouts in a later call the order matters."""

from __future__ import annotations

from .worth import shape
from .wrapper import Graph, Node, all_blocks, constant_of, is_constant, is_tensor, nodes_of

SUM = "aten::add"
#: What a backward that was optimised asks first.
BACKWARD = "prim::AutogradAllNonZero"


def order_sums(graph: Graph) -> None:
    """Exchanges the operands."""
    if graph.findNode(BACKWARD, True) is None:
        return
    for block in all_blocks(graph):
        for node in nodes_of(block, (SUM,)):
            if _is_turned(node):
                first, second = node.inputsAt(0), node.inputsAt(1)
                node.replaceInput(0, second)
                node.replaceInput(1, first)


def _is_turned(node: Node) -> bool:
    """Whether the sum has the layout of its second operand, and not of its first."""
    if node.inputsSize() != 3 or not all(is_tensor(node.inputsAt(k)) for k in (0, 1)):
        return False
    if not is_constant(node.inputsAt(2)) or constant_of(node.inputsAt(2)) != 1:
        return False
    sizes, strides = shape(node.output())
    (first, mine), (second, others) = (shape(node.inputsAt(k)) for k in (0, 1))
    return sizes is not None and sizes == first == second and mine != strides == others
