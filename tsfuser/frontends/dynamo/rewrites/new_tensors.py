"""New tensors like another one, of which they ask the sizes, the dtype and the device: nobody waits for it,
as the trace knows these.

In: a node. Out: whether it has been replaced. Example, where a group computes `y`, and then `y * mask`, too:

    mask = bernoulli(empty_like(y), 0.9)    becomes    mask = bernoulli(empty([8, 16]), 0.9)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from ..fx.insert import Insert, empty_as

aten = torch.ops.aten


def empty(node: fx.Node) -> bool:
    """`empty_like(x)`."""
    value = node.meta["val"]
    sizes = [_known(node, size) for size in value.shape] if _waits(node) else [None]
    made = empty_as(value, sizes, node) if None not in sizes else None
    if made is None:
        return False
    node.replace_all_uses_with(made)
    return True


def zeros(node: fx.Node) -> bool:
    """`x.new_zeros(sizes)`."""
    if not _waits(node):
        return False
    value = node.meta["val"]
    made = Insert(node, node)(aten.zeros.default, node.args[1], dtype=value.dtype, device=value.device)
    node.replace_all_uses_with(made)
    return True


def _waits(node: fx.Node) -> bool:
    """Whether it is like a tensor that the graph computes, and can be traced without that."""
    is_plain = node.meta["val"].layout == torch.strided and not node.kwargs.get("pin_memory")
    return is_plain and node.args[0].op != "placeholder" and detect_fake_mode() is not None


def _known(node: fx.Node, size: Any) -> Any:
    """A size, before `node`: a number, or a node that waits for nothing but inputs; None if there is none."""
    if isinstance(size, int):
        return size
    for given in node.graph.find_nodes(op="placeholder"):
        value = given.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return given
        for d, own in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(own, torch.SymInt) and own.node.expr == size.node.expr:
                return Insert(node, node)(aten.sym_size.int, given, d)
    return None
