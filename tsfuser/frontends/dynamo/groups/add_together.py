"""One op for the additions of a number to many inputs of the graph, in place.

In: a typed graph in its final order. Out: the same graph, in which all such additions to tensors of one dtype
and device are one op, if nothing else reads these tensors. On a GPU the op is one kernel. Example: each batch
norm counts its calls. Before:

    aten::add_(%count1, %one, %one) ... aten::add_(%count2, %one, %one)
becomes, at the place of the last one,
    %counts = prim::ListConstruct(%count1, %count2);  aten::_foreach_add_(%counts, %one)
"""

from __future__ import annotations

import torch

from ....graph.wrapper import LIST, Graph, Node, constant_of, insert, is_constant
from ....grouping.support import Refusals

_TENSORS = torch._C.ListType(torch._C.TensorType.get())
_KIND = "aten::add_"


def add_together(graph: Graph, refusals: Refusals) -> None:
    """Changes the graph's top block. Its nodes must stay in their order from then on."""
    found: dict[tuple, list[Node]] = {}
    for node in graph.findAllNodes(_KIND, False):
        if _is_alone(node) and not node.output().uses():
            to, number = node.inputsAt(0).type(), constant_of(node.inputsAt(1))
            found.setdefault((to.dtype(), to.device(), repr(number)), []).append(node)
    for nodes in found.values():
        if len(nodes) > 1:
            _join(graph, nodes, refusals)


def counts_calls(node: Node) -> bool:
    """Whether the node, in this form or in place, adds a constant to an input that nothing else reads."""
    return node.kind() in (_KIND, _KIND.removesuffix("_")) and _is_alone(node)


def _is_alone(node: Node) -> bool:
    target, number, factor = node.inputsAt(0), node.inputsAt(1), node.inputsAt(2)
    if target.node().kind() != "prim::Param" or not (is_constant(number) and is_constant(factor)):
        return False
    if type(constant_of(number)) not in (int, float) or constant_of(factor) != 1:
        return False
    readers = [use.user for use in target.uses() if use.user.kind() != "prim::Return"]
    return len(readers) == 1


def _join(graph: Graph, nodes: list[Node], refusals: Refusals) -> None:
    last = nodes[-1]
    targets = insert(graph, last, LIST, [node.inputsAt(0) for node in nodes])
    targets.output().setType(_TENSORS)
    made = insert(graph, last, "aten::_foreach_add_", [targets.output(), last.inputsAt(1)], 0)
    refusals.add(made, refusals.reason(last))
    for node in nodes:
        node.destroy()
