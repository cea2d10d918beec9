"""Ops between groups that write into the graph's inputs, where a copy at the graph's end would do so.

In: a typed graph in its last order, and the copies to inputs that end the program. Out: the same graph, where
an op that changes a part of an input, and leaves the rest of it, does so in place, if nobody asks for the old
one any more; and the copies that are left. A cache of keys is then not copied to add one. Before:

    %new = aten::index_copy(%cache, %dim, %at, %key)                 cache.copy_(new) at the end
    %s = aten::slice(%x, ...);  %c = aten::copy(%s, %y)
    %new2 = aten::slice_scatter(%x, %c, ...)                         x.copy_(new2) at the end
becomes
    aten::index_copy_(%cache, %dim, %at, %key)
    %s = aten::slice(%x, ...);  aten::copy_(%s, %y)

and who read `new` reads the input, behind that. Which op works in place is told by its schema.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ...graph.effects import draws
from ...graph.wrapper import (
    GROUP,
    LIST,
    Graph,
    Node,
    Value,
    constant_of,
    inputs,
    insert,
    is_constant,
    outputs,
    schema,
)
from ...grouping.support import Refusals
from .in_place import Update, is_alike, sharing

_SCATTER = "_scatter"


class _Way(NamedTuple):
    """How a new value is made of an old one. `scatters`, the outermost first: each places in a view what the
    next one makes. `last`: the op that makes what the innermost one places; None where that is copied."""

    scatters: tuple[Node, ...]
    last: Node | None

    @property
    def first_written(self) -> Node:
        return self.scatters[-1] if self.last is None else self.last

    @property
    def others(self) -> list[Value]:
        """What is read while the input is written, but the input."""
        return [self.scatters[-1].inputsAt(1)] if self.last is None else inputs(self.last)[1:]


def update_in_place(
    graph: Graph, updates: Sequence[Update], results: Collection[int | None], refusals: Refusals
) -> list[Update]:
    """Changes ops of the graph's top block, whose nodes must stay in their order from then on; returns the
    updates that are left: (input, output that is copied to it). `results`: outputs that are returned."""
    left = list(updates)
    for update in updates:
        old, new = list(graph.inputs())[update[0]], list(graph.outputs())[update[1]]
        way = _way(old, new) if is_alike(old, new) else None
        if way is not None and _may_be_lost(graph, way, update, left, results):
            _write(graph, way, old, new, refusals)
            left.remove(update)
    return left


def _way(old: Value, new: Value) -> _Way | None:
    """How the new value is made of the old one; None where not by ops that have twins."""
    scatters: list[Node] = []
    value = new
    while True:
        node = value.node()
        if scatters and len(value.uses()) > 1:
            return _Way(tuple(scatters), None)
        if not node.kind().startswith("aten::") or not _is_part(node.inputsAt(0), old, scatters):
            return _Way(tuple(scatters), None) if scatters else None
        if _view_of(node) is not None:
            scatters.append(node)
            value = node.inputsAt(1)
        elif twin_of(node) is not None and not draws(node) and is_alike(node.inputsAt(0), value):
            return _Way(tuple(scatters), node)
        else:
            return _Way(tuple(scatters), None) if scatters else None


def _is_part(value: Value, old: Value, scatters: Sequence[Node]) -> bool:
    """Whether the value is that view of the old one in which all of the scatters place something."""
    if not scatters:
        return value.unique() == old.unique()
    node, scatter = value.node(), scatters[-1]
    if node.kind() != _view_of(scatter):
        return False
    same = all(map(_is_equal, inputs(node)[1:], inputs(scatter)[2:]))
    return same and _is_part(node.inputsAt(0), old, scatters[:-1])


def _is_equal(a: Value, b: Value) -> bool:
    """Whether the values are one, or constants that are equal."""
    if a.unique() == b.unique():
        return True
    if not (is_constant(a) and is_constant(b)):
        return False
    return type(constant_of(a)) is type(constant_of(b)) and constant_of(a) == constant_of(b)


def _view_of(node: Node) -> str | None:
    """The kind of the view in which the node places something; None where it does nothing of the sort. What
    strides say goes beyond the operand."""
    kind = node.kind().removesuffix(_SCATTER)
    return kind if kind != node.kind() and kind != "aten::as_strided" and _has_view(node.kind()) else None


@cache
def _has_view(kind: str) -> bool:
    """Whether the view takes what the op has behind the source."""
    scatter = _arguments(getattr(torch.ops.aten, kind.removeprefix("aten::")).default)
    packet = getattr(torch.ops.aten, kind.removeprefix("aten::").removesuffix(_SCATTER), None)
    views = [getattr(packet, name) for name in packet.overloads()] if packet else []
    return scatter[1:2] == [("src", "Tensor")] and any(
        _arguments(view) == [scatter[0], *scatter[2:]] and view.is_view for view in views
    )


def twin_of(node: Node) -> str | None:
    """The kind of the op that does the same in place, to its first operand; None where there is none."""
    found = schema(node)
    return None if found is None else _twin(found.name, found.overload)


@cache
def _twin(name: str, overload: str) -> str | None:
    plain, in_place = (
        getattr(getattr(torch.ops.aten, name.removeprefix("aten::") + end, None), overload or "default", None)
        for end in ("", "_")
    )
    if plain is None or in_place is None or torch.Tag.inplace_view in in_place.tags:
        return None
    made, taken = plain._schema.returns, in_place._schema.arguments
    fresh = len(made) == 1 and made[0].alias_info is None and not plain._schema.is_mutable
    written = [k for k, a in enumerate(taken) if a.alias_info is not None and a.alias_info.is_write]
    return name + "_" if fresh and written == [0] and _arguments(plain) == _arguments(in_place) else None


def _arguments(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _may_be_lost(
    graph: Graph, way: _Way, update: Update, updates: Sequence[Update], results: Collection[int | None]
) -> bool:
    """Whether nobody reads the old value once the new one is there, nor finds that both are one tensor."""
    nodes, given, returned = list(graph.nodes()), list(graph.inputs()), list(graph.outputs())
    old, new = given[update[0]], returned[update[1]]
    own = {v.unique() for node in (*way.scatters, way.first_written) for v in outputs(node)}
    shared, its_views = sharing(nodes, old), sharing(nodes, new)
    others = [u for u in updates if u != update]
    sources = {returned[source].unique() for _, source in others}
    leaving = sources | {returned[k].unique() for k in results if k is not None}
    if update[0] in [target for target, _ in others] or not its_views.isdisjoint(leaving):
        return False
    if not shared.isdisjoint(sources) or any(v.unique() in shared for v in way.others):
        return False
    if _is_read(new) and old.type().strides() != new.type().strides():
        return False
    at = next(k for k, node in enumerate(nodes) if _made(node) == _made(way.first_written))
    return not any(
        not own & set(_made(node)) and not _is_view(node) and any(v.unique() in shared for v in inputs(node))
        for node in nodes[at:]
    )


def _made(node: Node) -> tuple[int, ...]:
    return tuple(v.unique() for v in outputs(node))


def _is_read(value: Value) -> bool:
    return any(use.user.kind() != "prim::Return" for use in value.uses())


def _is_view(node: Node) -> bool:
    """Whether the node does not look at the elements of its operand."""
    found = schema(node) if node.kind().startswith("aten::") else None
    return node.kind() == LIST or (found is not None and found.aliases and not found.writes)


def _write(graph: Graph, way: _Way, old: Value, new: Value, refusals: Refusals) -> None:
    """Has the ops write to the input, which takes the place of the new value."""
    place = way.first_written
    if way.last is not None:
        made = insert(graph, place, str(twin_of(place)), inputs(place))
    else:
        target, source, *where = inputs(place)
        view = insert(graph, place, str(_view_of(place)), [target, *where])
        with graph.insert_point_guard(place):
            blocking = graph.insertConstant(False)
        made = insert(graph, place, "aten::copy_", [view.output(), source, blocking])
    refusals.add(made, refusals.reason(place))
    new.replaceAllUsesWith(old)
    for node in (*way.scatters, way.last):
        if node is not None:
            _remove(node)


def _remove(node: Node) -> None:
    """With the views that nobody else reads."""
    makers = [v.node() for v in inputs(node)]
    node.destroy()
    for maker in {m.output().unique(): m for m in makers if m.outputsSize() == 1}.values():
        if maker.kind() != GROUP and _is_view(maker) and not maker.output().uses():
            _remove(maker)
