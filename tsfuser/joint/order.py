"""What the backward computes again, right before it is read; numbers, as soon as they are known.

In: a forward; and a backward, whose first inputs are gradients. Out: the same graphs in another order.
Before, as the joint graph has it, and after:

    %a = aten::sin(%x)                 %a = aten::sin(%x)
    %c = aten::cos(%a)                 %c = aten::cos(%a)
    %d = aten::cos(%x)                 %e = aten::mul(%grad, %c)
    %e = aten::mul(%grad, %c)          %d = aten::cos(%x)
    %f = aten::mul(%e, %d)             %f = aten::mul(%e, %d)

Groups are made in this order, and have a most of ops: one that begins with all that is computed again stores
it for the others. And a tensor of which the sizes are asked at the end of a forward would live as long.
"""

from __future__ import annotations

from functools import reduce

from ..graph.effects import PURE, effect
from ..graph.wrapper import CONSTANT, Graph, Node, graph_inputs, inputs, nodes_in, outputs
from .node_facts import PARAM, holds_tensors


def compute_late(graph: Graph, gradients: int) -> None:
    """`gradients`: how many of the inputs are."""
    late = {v.unique() for v in graph_inputs(graph)[:gradients]}
    waiting = []
    for node in nodes_in(graph):
        if effect(node) != PURE or any(v.unique() in late for v in inputs(node)):
            late.update(v.unique() for v in outputs(node))
        elif node.kind() != CONSTANT:
            waiting.append(node)
    for node in reversed(waiting):
        readers = [use.user for value in outputs(node) for use in value.uses()]
        if readers:
            first = readers[0]
            for reader in readers[1:]:
                first = reader if reader.isBefore(first) else first
            node.moveBefore(first)


def ask_early(graph: Graph) -> None:
    """Moves what gives nothing but numbers right behind what it is computed of; constants stand first."""
    nodes = nodes_in(graph)
    first = next((node for node in nodes if node.kind() != CONSTANT), None)
    for node in nodes:
        if node.kind() == CONSTANT and first is not None and first.isBefore(node):
            node.moveBefore(first)
    for node in filter(_gives_numbers, nodes):
        makers = [v.node() for v in inputs(node) if v.node().kind() not in (CONSTANT, PARAM)]
        if makers:
            node.moveAfter(reduce(lambda one, other: other if one.isBefore(other) else one, makers))
        elif node != first:
            node.moveBefore(first)


def _gives_numbers(node: Node) -> bool:
    if node.kind() == CONSTANT or not outputs(node) or effect(node) != PURE:
        return False
    return not any(map(holds_tensors, outputs(node)))
