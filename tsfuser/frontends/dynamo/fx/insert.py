"""Inserts ops into an FX graph, with their traced results in `meta`.

In: the node before which they are inserted, and the node that they replace or serve. Out: nodes. Example:

    ops = Insert(before=node, like=node)
    y = ops(aten.exp.default, ops(aten.neg.default, x))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

#: Keys of `meta` that say where a node comes from, and in which part of the program it runs: backward,
#: checkpoint.
ORIGIN = ("stack_trace", "nn_module_stack", "custom")
PART = (*ORIGIN, "partitioner_tag", "recompute", "ac_graph_id", "seq_nr")


_FORMATS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}  # besides the contiguous one


class Insert:
    """Call it with an op and its arguments. New nodes get the entries `kept` of the `meta` of `like`."""

    def __init__(self, before: fx.Node, like: fx.Node, kept: tuple[str, ...] = ORIGIN):
        self.before = before
        self.meta = {k: v for k, v in like.meta.items() if k in kept}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_function(op, args, kwargs)
        node.meta = {**self.meta, "val": evaluate(node)}
        return node


def size_of(tensor: fx.Node, d: int) -> Any:
    """A size of the tensor: a number, or a node behind it."""
    size = tensor.meta["val"].shape[d]
    return size if isinstance(size, int) else Insert(tensor.next, tensor, PART)(aten.sym_size.int, tensor, d)


def empty_as(
    value: torch.Tensor, sizes: list[Any], before: fx.Node, kept: tuple[str, ...] = ORIGIN
) -> fx.Node | None:
    """A new tensor like the traced `value`, which has these sizes, made before `before`; None if it would
    have another layout."""
    kind = {"dtype": value.dtype, "device": value.device}
    for form in (torch.contiguous_format, *_FORMATS.get(value.dim(), ())):
        made = Insert(before, before, kept)(aten.empty.memory_format, sizes, **kind, memory_format=form)
        if is_alike(made.meta["val"], value):
            return made
        made.graph.erase_node(made)
    return None


def laid_out(insert: Insert, node: fx.Node, order: list[int]) -> fx.Node:
    """A dense copy of a tensor with its dims in this `order` in memory, outermost first."""
    if order == list(range(len(order))):
        return insert(aten.clone.default, node, memory_format=torch.contiguous_format)
    turned = insert(aten.permute.default, node, order)
    turned = insert(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return insert(aten.permute.default, turned, [order.index(d) for d in range(len(order))])


def evaluate(node: fx.Node) -> Any:
    """The result of the node's op for the traced values of its operands. Raises what the op raises."""
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta["val"], (list(node.args), dict(node.kwargs)))
    tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    with detect_fake_mode(tensors), enable_python_dispatcher():  # as where it was traced
        return node.target(*args, **kwargs)


def is_alike(made: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether both tensors have the same sizes and strides."""
    strides = zip(made.stride(), result.stride())
    return has_sizes_of(made, result) and all(statically_known_true(a == b) for a, b in strides)


def has_sizes_of(made: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether one tensor has the other's sizes."""
    pairs = zip(made.shape, result.shape)
    return made.dim() == result.dim() and all(statically_known_true(a == b) for a, b in pairs)
