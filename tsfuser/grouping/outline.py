"""Moves each cluster of nodes into the subgraph of a `prim::CudaFusionGroup` node.

Before: `%a = aten::add(%x, %y, %one);  %b = aten::relu(%a)`, of which the second is used elsewhere. After:
`%b = prim::CudaFusionGroup[Subgraph=...](%x, %y)`. Tensors are the first inputs; constants are copied in;
numbers and lists that are not constant stay inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph.wrapper import (
    GROUP,
    Block,
    Graph,
    Node,
    Value,
    end_of,
    inputs,
    is_constant,
    is_tensor,
    operands,
    outputs,
)


def reorder(block: Graph | Block, nodes: Sequence[Node]) -> None:
    """Puts the block's nodes in the order of `nodes`, which holds all of them."""
    anchor = end_of(block)
    for node in nodes:
        node.moveBefore(anchor)


def outline(graph: Graph, nodes: Sequence[Node]) -> Node:
    """Makes the group of `nodes`, which stand in one piece, and destroys them. Returns the group node."""
    made = {v.unique() for node in nodes for v in outputs(node)}
    external: dict[int, Value] = {}
    inside: dict[int, int] = {}
    for node in nodes:
        for v in operands(node):
            if v.unique() in made:
                inside[v.unique()] = inside.get(v.unique(), 0) + 1
            else:
                external.setdefault(v.unique(), v)
    arguments = [v for v in external.values() if not is_constant(v)]
    arguments.sort(key=lambda v: not is_tensor(v))
    subgraph = torch._C.Graph()
    mapping: dict[int, Value] = {}
    for v in arguments:
        mapping[v.unique()] = _add_input(subgraph, v)
    for v in external.values():
        if is_constant(v):
            _copy_constant(subgraph, v, mapping)
    for node in nodes:
        _copy(subgraph, node, mapping)
    results = [v for node in nodes for v in outputs(node) if len(v.uses()) > inside.get(v.unique(), 0)]
    for v in results:
        subgraph.registerOutput(mapping[v.unique()])
    group = graph.create(GROUP, arguments, len(results))
    group.g_("Subgraph", subgraph)
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
    mapping = {inner.unique(): outer for inner, outer in zip(subgraph.inputs(), inputs(group))}
    for node in subgraph.nodes():
        copy = graph.createClone(node, lambda v: mapping[v.unique()])
        made.append(copy.insertBefore(group))
        for old, new in zip(outputs(node), outputs(copy)):
            mapping[old.unique()] = new
    for inner, outer in zip(list(subgraph.outputs()), outputs(group)):
        outer.replaceAllUsesWith(mapping[inner.unique()])
    group.destroy()
    return made


def _add_input(subgraph: Graph, value: Value) -> Value:
    result = subgraph.addInput()
    result.setType(value.type())
    return result


def _copy(subgraph: Graph, node: Node, mapping: dict[int, Value]) -> None:
    copy = subgraph.createClone(node, lambda v: mapping[v.unique()])
    subgraph.appendNode(copy)
    for old, new in zip(outputs(node), outputs(copy)):
        mapping[old.unique()] = new


def _copy_constant(subgraph: Graph, value: Value, mapping: dict[int, Value]) -> None:
    """Copies the constant, or the list of constants, that makes `value`."""
    for part in inputs(value.node()):
        if part.unique() not in mapping:
            _copy(subgraph, part.node(), mapping)
    _copy(subgraph, value.node(), mapping)
