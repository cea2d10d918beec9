"""Additions to new zeros at places that an index names, in the group that computes what is added.

In: a typed graph with groups. Out: the same graph, in which such a group adds while it computes, and the
summands are never stored. Example: the messages along the edges of a graph network, summed up by nodes:

    %m = prim::CudaFusionGroup(%x, %edges, %w)          x[edges[0]] * w, one row an edge
    %z = aten::new_zeros(%m, %sizes, ...);  %y = aten::index_add(%z, 0, %to, %m, 1)
becomes, with `tsfuser::add_at(%z, 0, %to, %m)` as the last node of the group,
    %z = aten::zeros(%sizes, ...);  %y = prim::CudaFusionGroup(%x, %edges, %w, %z, %to)

The order of the additions may differ from call to call, as in eager on a GPU. Where torch is asked for
deterministic algorithms, torch's op stays.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....graph.rows import row_of
from ....graph.wrapper import (
    GROUP,
    LIST,
    Graph,
    Node,
    Value,
    all_nodes_of,
    constant_before,
    constant_of,
    facts,
    inputs,
    insert,
    is_constant,
)
from ....grouping.support import Refusals
from .expected import expected_arguments
from .in_place import ADD_AT, is_refused

#: Devices where eager adds in any order.
DEVICES = ("cuda",)
_INDEX_ADD, _SIZE = "aten::index_add", "aten::size"
_ZEROS = {"aten::new_zeros": 1, "aten::zeros": 0}  # kind -> the position of the sizes
_DTYPES = (torch.float32, torch.float64)


def add_in_groups(graph: Graph, numbers: Mapping[int, int], refusals: Refusals) -> None:
    """Changes the graph's top block. `numbers`: those of `expected_calls`."""
    found = all_nodes_of(graph, (_INDEX_ADD,))
    if not found or torch.are_deterministic_algorithms_enabled():
        return
    for node in found:
        if _may_be_added(node):
            _take_in(graph, node, numbers, refusals)


def _may_be_added(node: Node) -> bool:
    """Whether it adds, times 1, to new zeros that nobody else reads."""
    zeros, dim, _, source, alpha = inputs(node)
    known = facts(source.type())
    return (
        (known.device or "").startswith(DEVICES)
        and source.type().dtype() in _DTYPES
        and is_constant(dim)
        and is_constant(alpha)
        and constant_of(alpha) == 1
        and zeros.node().kind() in _ZEROS
        and len(zeros.uses()) == 1
    )


def _take_in(graph: Graph, node: Node, numbers: Mapping[int, int], refusals: Refusals) -> None:
    """Moves the addition into the group that makes its source, if that can be."""
    zeros, dim, index, source, _ = inputs(node)
    views: list[Node] = []  # from the group to the addition
    while _is_view(source.node()) and _readers(source, zeros) == 1:
        views.insert(0, source.node())
        source = source.node().inputsAt(0)
    group, sizes = source.node(), zeros.node().inputsAt(_ZEROS[zeros.node().kind()])
    if group.kind() != GROUP or _readers(source, zeros) != 1 or group.hasAttribute("batch"):
        return
    places = {v.unique(): at for at, made in enumerate(graph.nodes()) for v in made.outputs()}
    known = _Known(group, places)
    others = [v for view in views for v in inputs(view)[1:]]
    if not known.is_before(sizes) or not all(map(known.may_be_inside, (index, *others))):
        return
    zeros_before = _zeros(graph, group, zeros, known.before(graph, sizes))
    count, subgraph = group.inputsSize(), group.g("Subgraph").copy()
    taken = _Taken(known, subgraph)
    value = taken.value(source)
    for view in views:
        value = taken.node(view, [value, *map(taken.value, inputs(view)[1:])])
    operands = [zeros_before, dim, index]
    value = taken.node(node, [*map(taken.value, operands), value], ADD_AT)
    subgraph.return_node().replaceInput(source.offset(), value)
    args = expected_arguments(group, numbers)
    if args is None or is_refused(subgraph, args):
        for k in reversed(range(count, group.inputsSize())):
            group.removeInput(k)
        zeros_before.node().destroy()
        return
    group.g_("Subgraph", subgraph)
    node.output().replaceAllUsesWith(source)
    source.setType(node.output().type())
    refusals.add(zeros_before.node(), refusals.reason(zeros.node()))
    node.destroy()
    zeros.node().destroy()
    for view in reversed(views):
        view.destroy()
    _drop_unread(group, index)


def _is_view(node: Node) -> bool:
    found = row_of(node)
    return found is not None and found[0].is_view


def _readers(value: Value, zeros: Value) -> int:
    """How often the value is read, but for zeros that ask it for a device."""
    return len([use for use in value.uses() if use.user != zeros.node()])


def _drop_unread(group: Node, index: Value) -> None:
    """Removes the views of an index that the group has made, and no longer returns it, where nobody else
    reads it."""
    while not index.uses() and _is_view(index.node()):
        view, index = index.node(), index.node().inputsAt(0)
        view.destroy()
    if not index.uses() and index.node() == group:
        place = index.offset()
        group.eraseOutput(place)
        group.g("Subgraph").eraseOutput(place)


def _zeros(graph: Graph, group: Node, zeros: Value, sizes: Value) -> Value:
    """The zeros, made before the group."""
    found = (zeros.type().dtype(), None, zeros.type().device(), None)
    constants = [constant_before(graph, group, value) for value in found]
    made = insert(graph, group, "aten::zeros", [sizes, *constants])
    made.copyMetadata(zeros.node())
    made.output().setType(zeros.type())
    return made.output()


class _Known:
    """What is known before a group; `places` has the position in the graph of each value's node."""

    def __init__(self, group: Node, places: Mapping[int, int]):
        self.group, self.places, self.at = group, places, places[group.outputsAt(0).unique()]

    def is_before(self, value: Value) -> bool:
        """Whether the value is there, or can be: constants, and lists and sizes of values that are there."""
        if self.places.get(value.unique(), -1) < self.at or is_constant(value):
            return True
        return value.node().kind() in (LIST, _SIZE) and all(map(self.is_before, inputs(value.node())))

    def may_be_inside(self, value: Value) -> bool:
        """Whether the value is there, or is made by the group, perhaps behind views."""
        if self.is_before(value) or value.node() == self.group:
            return True
        node = value.node()
        return (node.kind() == LIST or _is_view(node)) and all(map(self.may_be_inside, inputs(node)))

    def before(self, graph: Graph, value: Value) -> Value:
        """The value before the group, made there once more where it comes later."""
        if self.places.get(value.unique(), -1) < self.at:
            return value
        operands = {v.unique(): self.before(graph, v) for v in inputs(value.node())}
        again = graph.createClone(value.node(), lambda v: operands[v.unique()])
        return again.insertBefore(self.group).output()


class _Taken:
    """A subgraph of a group that gets more nodes at its end, and the group arguments."""

    def __init__(self, known: _Known, subgraph: Graph):
        self.known, self.group, self.subgraph = known, known.group, subgraph
        self.inside = {v.unique(): own for v, own in zip(inputs(self.group), subgraph.inputs())}
        made = zip(self.group.outputs(), subgraph.outputs())
        self.inside.update((v.unique(), own) for v, own in made)

    def node(self, like: Node, operands: list[Value], kind: str = "") -> Value:
        """The result of a node with the type and the source lines of `like`."""
        made = self.subgraph.create(kind or like.kind(), operands, 1)
        made.copyMetadata(like)
        self.subgraph.appendNode(made)
        made.output().setType(like.output().type())
        return made.output()

    def value(self, value: Value) -> Value:
        """What stands for a value of the graph: constants, lists, and views of the group's results are made
        again, others are arguments."""
        if value.unique() in self.inside:
            return self.inside[value.unique()]
        node = value.node()
        if node.kind() == LIST or (_is_view(node) and not self.known.is_before(value)):
            return self.node(node, list(map(self.value, inputs(node))))
        if is_constant(value):
            return constant_before(self.subgraph, self.subgraph.return_node(), constant_of(value))
        argument = self.inside[value.unique()] = self.subgraph.addInput()
        argument.setType(value.type())
        self.group.addInput(value)
        return argument
