"""Ranges of numbers with known ends are made once, when a graph is compiled, and not in each call.

In: a graph of ATen ops. Out: the same graph; the module owns such tensors. Example: the positions with which
embeddings and masks begin. Otherwise they are one more kernel in each call, whose launch takes longer than
its work. Before:

    positions = arange(512, device=device("cuda:0"));  angles = mul(unsqueeze(positions, 1), rates)
becomes
    positions = self.tsfuser_range_0;  angles = mul(unsqueeze(positions, 1), rates)

A range is still made in each call if its ends vary, if it is long, if the graph returns it, or if an op may
write to it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..fx.updates import sharing

aten = torch.ops.aten

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_MOST = 1 << 16  # bytes


def make_ranges(module: fx.GraphModule) -> None:
    """Changes the module's graph."""
    known = [node for node in module.graph.nodes if node.target in _RANGES and _is_known(node)]
    for number, node in enumerate(known):
        if not any(map(_is_exposed, sharing(module.graph, [node]))):
            _make(module, node, f"tsfuser_range_{number}")
    if known:
        module.recompile()


def _is_known(node: fx.Node) -> bool:
    """Whether the range is short, the same in each call, and on a device on which it can be made now."""
    value = node.meta.get("val")
    if node.all_input_nodes or not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return False
    if not 0 < value.numel() * value.element_size() <= _MOST or value.device.type not in ("cpu", "cuda"):
        return False
    if value.device.type == "cpu":
        return True
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def _is_exposed(node: fx.Node) -> bool:
    """Whether the graph returns the node's result, or an op writes to it."""
    return any(
        user.op != "call_function"
        or not isinstance(user.target, torch._ops.OpOverload)
        or user.target._schema.is_mutable
        for user in node.users
    )


def _make(module: fx.GraphModule, node: fx.Node, name: str) -> None:
    value = node.meta["val"]
    with unset_fake_temporarily(), torch.inference_mode(False):
        made = node.target(*node.args, **{**node.kwargs, "device": "cpu", "pin_memory": False})
        made = made.to(value.device)
        if value.is_cuda:
            torch.cuda.current_stream(value.device).synchronize()  # calls may come on any stream
    if made.dtype != value.dtype or made.shape != value.shape:
        return
    module.register_buffer(name, made, persistent=False)
    with module.graph.inserting_before(node):
        owned = module.graph.get_attr(name)
    owned.meta = dict(node.meta)
    node.replace_all_uses_with(owned)
    module.graph.erase_node(node)
