"""Convolutions of a whole graph in channels last, with the ops between them.

In: AOTAutograd's joint graph, or a graph without a backward. Out: the same graph, in which 2d convolutions
and their gradients read images and weights in channels last. Their results have this layout, too, and so have
the elementwise ops that read these results. Results of the graph, and operands of nodes that read strides,
keep the layout that they had. Before:

    y = relu(convolution(x, w, ...));  return convolution(y, v, ...)
becomes
    y = relu(convolution(clone(x, channels_last), clone(w, channels_last), ...))
    z = convolution(y, clone(v, channels_last), ...);  return clone(z, contiguous_format)

A copy that changes the layout becomes a part of the group that computes the value, or a kernel of its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from .... import log
from ....ops import table, without_row
from ..fx.insert import PART, Insert, evaluate, laid_out
from ..fx.strides import is_view, reads_strides
from ..fx.types import lies_in, order_of
from ..rewrites.simplify import FORMS, RELAID
from .layout_choice import CONVOLUTION, why_not

aten = torch.ops.aten

_FIRST, _LAST = [0, 1, 2, 3], [0, 2, 3, 1]  # the dims of an image in memory, outermost first
#: Convolutions and their gradients: which operands the kernel reads as images
_IMAGES = {CONVOLUTION: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
#: Kernels that assume row-major operands
_ROW_MAJOR = frozenset(("aten::native_group_norm", "aten::native_group_norm_backward"))


def channels_last(module: fx.GraphModule, wanted: bool | None, inference: bool) -> None:
    """Changes the module's graph. `wanted`: True or False; None: if inductor's rules say that it is faster.
    `inference`: the graph has no backward."""
    found = [node for node in module.graph.nodes if node.target is CONVOLUTION and _rank(node.args[0]) == 4]
    if wanted is False or not found:
        return
    reason = None if wanted else why_not(module.graph, found, inference)
    if reason is not None:
        log.write("partition", f"convolutions keep their layout: {reason}", "")
        return
    _Layouts(module.graph).run()
    module.graph.eliminate_dead_code()
    module.recompile()


class _Layouts:
    """The state of the rewrite.

    before       node whose layout has changed -> its traced value with the old layout
    last, first  node -> its copy in channels last, its value in the old layout
    read         nodes from which some convolution is computed
    behind       nodes with an operand in a changed layout, and nodes that are computed from such nodes
    shared       memory of which several results of the graph are views; they must stay views
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.read = _read_by_convolutions(graph)
        self.shared = _shared_by_results(graph)
        self.before: dict[fx.Node, Any] = {}
        self.behind: set[fx.Node] = set()
        self.last: dict[fx.Node, fx.Node] = {}
        self.first: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                node.args = fx.node.map_arg(node.args, lambda n: self.as_it_was(n, node))
            elif node.op == "call_function" and node.target is not aten.copy_.default:
                self.visit(node)

    def visit(self, node: fx.Node) -> None:
        """Gives the node operands in channels last if it may have them; notes the layout of its result."""
        given = node.args, node.kwargs
        free = _is_free(node)
        if free:
            images = _IMAGES.get(node.target)
            if images is not None:
                self.give(node, [node.args[k] for k in images])
            elif node in self.read:
                self.give(node, _beside_images(node))
        relaid = given != (node.args, node.kwargs) or any(n in self.before for n in node.all_input_nodes)
        if relaid and not (free and self.propagate(node)):
            node.args, node.kwargs = fx.node.map_arg(given, lambda n: self.as_it_was(n, node))
        if relaid or any(n in self.behind for n in node.all_input_nodes):
            self.behind.add(node)
            if node.target in (aten.view.default, aten._unsafe_view.default):
                node.meta[RELAID] = True
            if node.target is operator.getitem or is_view(node) and not _shares_memory(node):
                node.meta["val"] = evaluate(node)

    def give(self, node: fx.Node, operands: list[Any]) -> None:
        """Makes the node read these `operands` in channels last."""
        found = {n: self.in_channels_last(n, node) for n in operands if isinstance(n, fx.Node)}
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: found.get(n, n))

    def propagate(self, node: fx.Node) -> bool:
        """Traces the node with its new operands, and notes the layout of the result. False if it cannot have
        these operands: then nothing has changed."""
        before = node.meta.get("val")
        try:
            value = evaluate(node)
        except Exception:  # such as a view that these strides do not allow: it keeps its operands
            return False
        changed = not _lie_alike(value, before)
        if changed and not is_view(node) and any(order_of(v) is None for v in _tensors(before)):
            return False
        if changed or (is_view(node) and not self.shared.isdisjoint(map(_memory, _tensors(before)))):
            node.meta["val"] = value
            self.before[node] = before
        elif node.target is aten.clone.default and self.is_idle(node):
            node.target, node.args, node.kwargs = aten.alias.default, node.args[:1], {}
        return True

    def is_idle(self, copy: fx.Node) -> bool:
        """Whether the operand of the copy has by now the layout that the copy would give it."""
        (operand,) = copy.all_input_nodes
        alike = _lie_alike(copy.meta["val"], operand.meta["val"])
        return operand in self.before and alike and not _leaves_graph(copy)

    def in_channels_last(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        if lies_in(node.meta["val"], _LAST):
            return node
        if node not in self.last:
            insert = Insert(reader, reader, PART)
            self.last[node] = insert(aten.clone.default, node, memory_format=torch.channels_last)
        return self.last[node]

    def as_it_was(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node's value in its old layout. For a view: a view of the operand's value in its old layout.
        Else: a copy."""
        if node not in self.before:
            return node
        if node not in self.first:
            self.first[node] = self.restored(node, reader)
        return self.first[node]

    def restored(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        insert = Insert(reader, node, PART)
        if is_view(node):
            args = fx.node.map_arg(node.args, lambda n: self.as_it_was(n, reader))
            return insert(node.target, *args, **node.kwargs)
        return laid_out(insert, node, order_of(self.before[node]))


def _read_by_convolutions(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values reach convolutions, or their gradients, without a change of layout."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and _is_free(node) and (node.target in _IMAGES or node in found):
            found.update(node.all_input_nodes)
    return found


def _is_free(node: fx.Node) -> bool:
    """Whether the node computes the same values from operands of another layout."""
    op = node.target
    if op in _IMAGES:
        return _rank(node.args[0]) == 4
    if op is operator.getitem:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    if reads_strides(node) or op._schema.name in _ROW_MAJOR:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:  # the order in memory decides the numbers
        return False
    known = op._schema.name in without_row.KEEP_LAYOUT or op in FORMS or is_view(node)
    return known or table.find(op._schema.name, op._schema.overload_name) is not None


def _shares_memory(view: fx.Node) -> bool:
    """Whether the traced values of a view and of its operand share memory. torch's partitioner merges equal
    nodes, unless the graph returns their memory."""
    operand = view.args[0].meta.get("val")
    pair = _tensors(view.meta.get("val"))[:1] + _tensors(operand)[:1]
    return len(set(map(_memory, pair))) <= 1


def _shared_by_results(graph: fx.Graph) -> set[int]:
    """The memory, in the traced call, that several results of the graph share."""
    results = next(iter(reversed(graph.nodes))).all_input_nodes
    count = Counter(_memory(t) for node in results for t in _tensors(node.meta.get("val")))
    return {memory for memory, results in count.items() if results > 1}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _leaves_graph(node: fx.Node) -> bool:
    """Whether the graph returns the node or a view of it, or copies one of these to an input."""
    return any(
        user.op == "output" or user.target is aten.copy_.default or (is_view(user) and _leaves_graph(user))
        for user in node.users
    )


def _beside_images(node: fx.Node) -> list[fx.Node]:
    """Operands in eager's layout of images, if another operand of the same sizes is in channels last, or if
    the node joins both into one tensor."""
    values = {n: n.meta.get("val") for n in node.all_input_nodes}
    tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.dim() == 4}
    last = [v for v in tensors.values() if lies_in(v, _LAST) and not lies_in(v, _FIRST)]
    if not last or is_view(node):
        return []
    joins = node.target is aten.cat.default
    return [
        n
        for n, value in tensors.items()
        if lies_in(value, _FIRST) and (joins or any(_same(value.shape, v.shape) for v in last))
    ]


def _lie_alike(value: Any, other: Any) -> bool:
    """Whether two tensors, or two lists of tensors, have equal strides."""
    return all(_same(a.stride(), b.stride()) for a, b in zip(_tensors(value), _tensors(other)))


def _same(sizes: Any, others: Any) -> bool:
    return len(sizes) == len(others) and all(statically_known_true(a == b) for a, b in zip(sizes, others))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]


def _rank(node: Any) -> int:
    return node.meta["val"].dim()
