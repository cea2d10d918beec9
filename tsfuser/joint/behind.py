"""Results that share memory are made behind the differentiable graph, where autograd records them.

In: a graph that is to become one node. Out: the same graph, which returns what these results are views of,
and the nodes that make them of it. Example:

    %h = aten::mul(%x, %w)                          %h = aten::mul(%x, %w)
    %y = aten::t(%h)           ->   the node:       return (%h)
    %n = aten::size(%h, 0)          behind it:      %y = aten::t(%h);  %n = aten::size(%h, 0)
    return (%y, %x, %n)                             return (%y, %x, %n)

So a result that eager makes as a view is one, of an input, too; and numbers are made there as well. What was
a copy stays inside, where nobody can tell: in another call it may be a view of what the node made.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refusal
from ..graph.copied_reshapes import gives_own_copy
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Graph,
    Node,
    Value,
    graph_inputs,
    graph_outputs,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
)
from .divide import Copy
from .node_facts import PARAM, elements_read, retypes, viewed


class Behind:
    """The nodes, in a graph of their own: its inputs are those of the program, then the results of the
    node; it returns what the program returns."""

    def __init__(self, graph: Graph):
        self._graph = graph

    def write(self, packed: Graph) -> None:
        """Has `packed`, which returns the results of the node, return those of the program."""
        given, made = graph_inputs(packed), graph_outputs(packed)
        known = {v.unique(): a for v, a in zip(graph_inputs(self._graph), [*given, *made], strict=True)}
        copy = Copy(packed, packed.return_node(), known)
        for node in nodes_in(self._graph):
            copy.add(node)
        for _ in made:
            packed.eraseOutput(0)
        for value in graph_outputs(self._graph):
            packed.registerOutput(copy.of(value))


def leave_behind(graph: Graph) -> Behind:
    """What is made behind. `graph` is changed: it returns each new tensor once that is needed for it."""
    results, nodes = graph_outputs(graph), nodes_in(graph)
    wanted = {v.unique() for v in results}
    late = []
    for node in reversed(nodes):
        if node.kind() != CONSTANT and _is_behind(node) and any(v.unique() in wanted for v in outputs(node)):
            late.append(node)
            wanted.update(v.unique() for v in inputs(node))
    late.reverse()
    own = {v.unique() for node in late for v in outputs(node)}
    read = [v for node in late for v in inputs(node)] + results
    needed = {v.unique(): v for v in read if v.unique() not in own}
    made = [v for v in needed.values() if v.node().kind() not in (PARAM, CONSTANT)]
    if without := [v for v in made if not is_tensor(v)]:
        raise Refusal(f"{without[0].node().kind()} gives no tensor")
    behind = _written(graph, late, made, results)
    for _ in results:
        graph.eraseOutput(0)
    for value in made:
        graph.registerOutput(value)
    return behind


def _written(graph: Graph, nodes: Sequence[Node], made: list[Value], results: list[Value]) -> Behind:
    part, known = Graph(), {}
    for value in [*graph_inputs(graph), *made]:
        known[value.unique()] = part.addInput()
        known[value.unique()].setType(value.type())
    copy = Copy(part, part.return_node(), known)
    for node in nodes:
        copy.add(node)
    for value in results:
        part.registerOutput(copy.of(value))
    return Behind(part)


def _is_behind(node: Node) -> bool:
    """Whether a result of the node may share memory with an operand, or is a number or a list."""
    if node.kind() == LIST or viewed(node) is not None:
        return not retypes(node) and not gives_own_copy(node)
    if any(map(is_tensor, outputs(node))):
        return False
    return node.kind().startswith("prim::") or not any(map(is_tensor, elements_read(node)))
