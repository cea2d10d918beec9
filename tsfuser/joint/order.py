"""What the backward computes again, right before it is read.

In: a backward, whose first inputs are gradients. Out: the same graph in another order. Before, as the joint
graph has it, and after:

    %a = aten::sin(%x)                 %a = aten::sin(%x)
    %c = aten::cos(%a)                 %c = aten::cos(%a)
    %d = aten::cos(%x)                 %e = aten::mul(%grad, %c)
    %e = aten::mul(%grad, %c)          %d = aten::cos(%x)
    %f = aten::mul(%e, %d)             %f = aten::mul(%e, %d)

Groups are made in this order, and have a most of ops: one that begins with all that is computed again stores
it for the others.
"""

from __future__ import annotations

from ..graph.effects import PURE, effect
from ..graph.wrapper import CONSTANT, Graph, graph_inputs, inputs, nodes_in, outputs


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
