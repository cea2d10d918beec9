"""Layouts that nodes of the graph rely on are those that were traced.

In: an FX graph in its last form. Out: the same graph, whose results do not depend on the layouts of kernels'
results. These may differ from the traced ones: torch's fake kernels are wrong about some of its own kernels,
and a part of a tensor that is computed alone is dense. Views become reshapes, which copy where memory does
not allow the view. An op that reads strides gets its operand in the traced order of dims, or a view of it:

    y = native_batch_norm_backward(...)[0];  z = view(transpose(y, 1, 2), [132, 8])
    s = slice(y, 1, 0, 8, 2);  look(s)
becomes
    y = native_batch_norm_backward(...)[0];  z = reshape(transpose(y, 1, 2), [132, 8])
    s = slice(in_order(y, [0, 2, 1]), 1, 0, 8, 2);  look(s)

where `in_order` copies only if `y` has another layout, which the call decides. The strides of a view follow
from those of its operand. Inputs of the graph have the traced strides, since torch checks them, and the
results of the forward, too, are such readers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..fx.strides import is_view, reads_strides, relies_on_strides
from ..fx.types import order_of
from ..fx.updates import move_last

aten = torch.ops.aten
in_order = torch.ops.tsfuser.in_order.default

_VIEWS = (aten.view.default, aten._unsafe_view.default)


def settle_layouts(module: fx.GraphModule) -> None:
    """Changes the module's graph."""
    traced = _TracedLayouts()
    copy_where_needed(module)
    for node in list(module.graph.nodes):
        if node.op == "output":
            node.args = fx.map_arg(node.args, lambda n, node=node: traced.result(n, node))
        elif (reads_strides(node) or relies_on_strides(node)) and not _writes(node):
            given = node.args, node.kwargs
            node.args, node.kwargs = fx.map_arg(given, lambda n, node=node: traced.operand(n, node))
    move_last(module.graph)  # copies to inputs, behind the nodes made for results
    module.graph.eliminate_dead_code()
    module.recompile()


def copy_where_needed(module: fx.GraphModule) -> None:
    """Makes each view as other dims a reshape."""
    for view in _VIEWS:
        for node in module.graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default
    module.recompile()


def _writes(node: fx.Node) -> bool:
    """Whether the op changes an operand, which has to be that tensor itself. AOTAutograd leaves no such op
    but copies to inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _TracedLayouts:
    """Makes values in their traced layout, each once, before the first node that reads it."""

    def __init__(self):
        self.made: dict[fx.Node, fx.Node] = {}

    def result(self, node: fx.Node, output: fx.Node) -> fx.Node:
        """A result of the graph. If it has no gaps, the program sees to its layout (`Translation.orders`)."""
        found = node.meta.get("val")
        has_gaps = (
            isinstance(found, torch.Tensor) and found.layout == torch.strided and order_of(found) is None
        )
        return self.operand(node, output) if has_gaps else node

    def operand(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        if node not in self.made:
            self.made[node] = self._make(node, reader)
        return self.made[node]

    def _make(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        if is_view(node):
            base: Any = node.args[0]
            found = self.operand(base, reader)
            return node if found is base else self._view(node, found, reader)
        order = _order(node)
        if order is None:
            return node
        with reader.graph.inserting_before(reader):
            made = reader.graph.call_function(in_order, (node, order))
        made.meta = dict(node.meta)
        return made

    @staticmethod
    def _view(node: fx.Node, base: fx.Node, reader: fx.Node) -> fx.Node:
        with reader.graph.inserting_before(reader):
            made = reader.graph.node_copy(node, lambda n: base if n is node.args[0] else n)
        made.meta = dict(node.meta)
        return made


def _order(node: fx.Node) -> list[int] | None:
    """The traced order of dims of the result of an op of the graph; None if it can have only one, or has
    gaps, which only a kernel of torch's leaves."""
    found = node.meta.get("val")
    if node.op != "call_function" or node.target is in_order or not isinstance(found, torch.Tensor):
        return None
    return order_of(found) if found.dim() > 1 else None
