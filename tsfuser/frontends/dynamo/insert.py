"""Inserts ops into an FX graph, with what they give in `meta`.

In: the node before which they go, and one for whose sake they are made. Out: nodes. Example:

    ops = Insert(before=node, like=node)
    y = ops(aten.exp.default, ops(aten.neg.default, x))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves


class Insert:
    """Called with an op and its arguments."""

    def __init__(self, before: fx.Node, like: fx.Node):
        self.before = before
        self.meta = {k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack", "custom")}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_function(op, args, kwargs)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
        with detect_fake_mode(tensors):
            node.meta = {**self.meta, "val": op(*values, **kwargs)}
        return node


def is_alike(made: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether one tensor has the other's sizes and strides."""
    pairs = [*zip(made.shape, result.shape), *zip(made.stride(), result.stride())]
    return made.dim() == result.dim() and all(statically_known_true(a == b) for a, b in pairs)
