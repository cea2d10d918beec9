"""Inserts ops into an FX graph, with what they give in `meta`.

In: the node before which they go, and one for whose sake they are made. Out: nodes. Example:

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

#: What says where a node comes from, and in which part of the program it runs: its backward, a checkpoint.
ORIGIN = ("stack_trace", "nn_module_stack", "custom")
PART = (*ORIGIN, "partitioner_tag", "recompute", "ac_graph_id", "seq_nr")


class Insert:
    """Called with an op and its arguments. The nodes have the entries `kept` of the `meta` of `like`."""

    def __init__(self, before: fx.Node, like: fx.Node, kept: tuple[str, ...] = ORIGIN):
        self.before = before
        self.meta = {k: v for k, v in like.meta.items() if k in kept}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_function(op, args, kwargs)
        node.meta = {**self.meta, "val": evaluate(node)}
        return node


def evaluate(node: fx.Node) -> Any:
    """What the node's op gives for what its operands are. Raises what the op raises."""
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta["val"], (list(node.args), dict(node.kwargs)))
    tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    with detect_fake_mode(tensors), enable_python_dispatcher():  # as where it was traced
        return node.target(*args, **kwargs)  # type: ignore[operator]


def is_alike(made: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether one tensor has the other's sizes and strides."""
    strides = zip(made.stride(), result.stride())
    return has_sizes_of(made, result) and all(statically_known_true(a == b) for a, b in strides)


def has_sizes_of(made: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether one tensor has the other's sizes."""
    pairs = zip(made.shape, result.shape)
    return made.dim() == result.dim() and all(statically_known_true(a == b) for a, b in pairs)
