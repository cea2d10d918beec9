"""Moves each cluster of nodes into the subgraph of a `prim::CudaFusionGroup` node.

Before: `%a = aten::add(%x, %y, %one);  %b = aten::relu(%a)`, of which the second is used elsewhere. After:
`%b = prim::CudaFusionGroup[Subgraph=...](%x, %y)`. Tensors are the first inputs; constants are copied in;
numbers and lists that are not constant stay inputs."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _C
from ..graph.wrapper import (
    GROUP,
    Block,
    Graph,
    Node,
    Value,
    end_of,
    graph_inputs,
    graph_outputs,
    ids,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
    operands,
    outputs,
    use_count,
)


def reorder(block: Graph | Block, nodes: Sequence[Node]) -> None:
    """Puts the block's nodes in the order of `nodes`, which holds all of them."""
    anchor = end_of(block)
    for node in nodes:
        node.moveBefore(anchor)


def outline(graph: Graph, nodes: Sequence[Node]) -> Node:
    """Makes the group of `nodes`, which stand in one piece, and destroys them. Returns the group node."""
    made = [v for node in nodes for v in outputs(node)]
    inside = dict.fromkeys(ids(made), 0)  # value -> how often it is read inside
    external: dict[int, Value] = {}
    for node in nodes:
        read = operands(node)
        for key, v in zip(ids(read), read):
            if key in inside:
                inside[key] += 1
            else:
                external[key] = v
    arguments = [v for v in external.values() if not is_constant(v)]
    arguments.sort(key=lambda v: not is_tensor(v))
    constants = [v for v in external.values() if is_constant(v)]
    results = [v for v, uses in zip(made, inside.values()) if use_count(v) > uses]
    group = graph.create(GROUP, arguments, len(results))
    group.g_("Subgraph", _C.subgraph(nodes, arguments, constants, results))
    group.insertBefore(nodes[0])
    for old, new in zip(results, outputs(group)):
        new.copyMetadata(old)
        old.replaceAllUsesWith(new)
    for node in reversed(nodes):
        node.destroy()
    return group


def inline(graph: Graph, group: Node) -> list[Node]:
    """Undoes `outline`: puts the nodes of the group's subgraph back in its place, and returns them."""
    made = []
    subgraph = group.g("Subgraph")
    mapping = {inner.unique(): outer for inner, outer in zip(graph_inputs(subgraph), inputs(group))}
    for node in nodes_in(subgraph):
        copy = graph.createClone(node, lambda v: mapping[v.unique()])
        made.append(copy.insertBefore(group))
        for old, new in zip(outputs(node), outputs(copy)):
            mapping[old.unique()] = new
    for inner, outer in zip(graph_outputs(subgraph), outputs(group)):
        outer.replaceAllUsesWith(mapping[inner.unique()])
    group.destroy()
    return made
