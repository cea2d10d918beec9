"""Merges equal nodes, before the partitioner chooses what to save.

In: AOTAutograd's joint graph. Out: the same graph, with one node in place of all that do the same with the
same operands. torch's partitioner has such a pass, too, but that imports all of inductor's lowerings, which
takes a fifth of the time of the first step. Before:

    a = sin(x);  b = sin(x);  y = mul(a, b)
becomes
    a = sin(x);  y = mul(a, a)

A result of the graph, and a tensor that shares memory with one, is not merged.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from ..fx import sizes

_NAMESPACES = ("aten", "prims")  # ops of others may have unknown side effects
_OF_NUMBERS = {operator.getitem, sizes.SUM, *sizes.NUMBERS, *sizes.WHOLE}
#: Tags of ops that draw random numbers, and of ops whose traced sizes or numbers differ from call to call.
_UNLIKE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}


def merge_repeats(joint: fx.GraphModule) -> None:
    """Changes the module's graph, which has `meta["val"]` on its nodes."""
    graph = joint.graph
    returned = _memory_of_results(graph)
    first: dict[Hashable, fx.Node] = {}
    merged = False
    for node in list(graph.nodes):
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            first.clear()  # nodes that read the same tensors may now read other values
        elif _is_pure(node) and returned.isdisjoint(_memory(node)):
            known = first.setdefault(_what(node), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.erase_node(node)
                merged = True
    if merged:
        joint.recompile()


def _is_pure(node: fx.Node) -> bool:
    """Whether the node's result depends on its operands only."""
    if node.op != "call_function":
        return False
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return op in _OF_NUMBERS
    # each reader of an allocation needs its own
    is_new = op._schema.name.startswith(("aten::empty", "aten::new_empty"))
    return op.namespace in _NAMESPACES and not is_new and _UNLIKE.isdisjoint(op.tags)


def _what(node: fx.Node) -> Hashable:
    """Equal for nodes that do the same with the same operands."""
    return node.target, _key(node.args), _key(node.kwargs)


def _key(argument: Any) -> Hashable:
    """Equal for equal arguments. `1`, `1.0` and `True` have different keys, and so have 0.0 and -0.0."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(_key, argument))
    if isinstance(argument, Mapping):
        return tuple((name, _key(value)) for name, value in sorted(argument.items()))
    return argument if isinstance(argument, fx.Node) else (type(argument), repr(argument))


def _memory_of_results(graph: fx.Graph) -> set[int]:
    (last,) = (node for node in graph.nodes if node.op == "output")
    return {memory for node in last.all_input_nodes for memory in _memory(node)}


def _memory(node: fx.Node) -> list[int]:
    """The memory of the node's tensors, by its address in the traced call."""
    values = node.meta.get("val")
    found = []
    for value in values if isinstance(values, (tuple, list)) else [values]:
        if isinstance(value, torch.Tensor):
            try:
                found.append(value.untyped_storage()._cdata)
            except NotImplementedError:  # a tensor without an address, such as a sparse one
                pass
    return found
