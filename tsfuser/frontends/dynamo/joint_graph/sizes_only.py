"""Gradients that read only the sizes and the layout of an operand, such as those of pooling.

In: AOTAutograd's joint graph; later, its backward. Out: the same graph, in which these gradients read no
values of the forward, so that none is saved for them. Before:

    y = relu(x);  p, indices = max_pool2d_with_indices(y, [2, 2])
    max_pool2d_with_indices_backward(g, y, [2, 2], ..., indices)
becomes
    max_pool2d_with_indices_backward(g, empty(y's sizes), [2, 2], ..., indices)

The backward reads an input like `y` instead, if it has one that lives on anyway: `empty(...)` takes memory
while the gradient is computed.
"""

from __future__ import annotations

import torch
from torch import fx

from ....ops import without_row
from ..fx.insert import PART, empty_as, is_alike, size_of
from ..fx.strides import is_one_of
from ..fx.updates import sharing

aten = torch.ops.aten

_DEVICES = ("cpu", "cuda")  # on which ops read the sizes only
_MARK = "tsfuser_sizes_only"  # in the `meta` of an `empty(...)` that is made here


def forget_values(joint: fx.GraphModule) -> None:
    """Changes the joint graph. Inputs of the program are still read: they take no further memory."""
    readers = [node for node in joint.graph.nodes if is_one_of(without_row.SIZES_ONLY, node)]
    if not readers:
        return
    inputs = sharing(joint.graph, joint.graph.find_nodes(op="placeholder"))
    for node in readers:
        if node.args[1] not in inputs and (made := _empty_like(node.args[1], node)) is not None:
            node.update_arg(1, made)
    joint.recompile()


def _empty_like(operand: fx.Node, reader: fx.Node) -> fx.Node | None:
    """A tensor like `operand`, made before `reader`; None if it would have another layout."""
    value = operand.meta["val"]
    if value.device.type not in _DEVICES:
        return None
    made = empty_as(value, [size_of(operand, d) for d in range(value.dim())], reader, PART)
    if made is not None:
        made.meta[_MARK] = True
    return made


def is_made_here(node: fx.Node) -> bool:
    """Whether the node is an `empty(...)` of `forget_values`."""
    return _MARK in node.meta


def read_inputs_instead(backward: fx.GraphModule) -> None:
    """Changes the backward."""
    # One that is no larger than its sizes may be saved.
    marked = [node for node in backward.graph.nodes if is_made_here(node) and node.op != "placeholder"]
    if not marked:
        return
    at = {node: k for k, node in enumerate(backward.graph.nodes)}
    given = [node for node in backward.graph.find_nodes(op="placeholder") if _is_tensor(node)]
    for node in marked:
        end = max(at[user] for user in node.users)
        later = (other for other in given if any(at[u] > end and u.op != "output" for u in other.users))
        found = next((other for other in later if _are_alike(other.meta["val"], node.meta["val"])), None)
        if found is not None:
            node.replace_all_uses_with(found)
            backward.graph.erase_node(node)
    backward.recompile()


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and is_alike(one, other)
