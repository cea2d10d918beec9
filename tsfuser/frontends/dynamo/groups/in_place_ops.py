"""Ops outside groups that write directly to the graph's inputs, instead of a copy at the end of the graph.

In: a typed graph in its final order, and the copies to inputs that end the program. Out: the same graph, in
which an op that changes a part of an input works in place, if nobody reads the old input later; and the
copies that are left. Example: a new key is written to a cache without a copy of the cache. Before:

    %new = aten::index_copy(%cache, %dim, %at, %key)                 cache.copy_(new) at the end
    %s = aten::slice(%x, ...);  %c = aten::copy(%s, %y)
    %new2 = aten::slice_scatter(%x, %c, ...)                         x.copy_(new2) at the end
becomes
    aten::index_copy_(%cache, %dim, %at, %key)
    %s = aten::slice(%x, ...);  aten::copy_(%s, %y)

and readers of `new` read the input, after that. The in-place op is found by its schema.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ....graph.effects import draws
from ....graph.wrapper import (
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
from ....grouping.support import Refusals
from .in_place import Update, is_alike, sharing

_SCATTER = "_scatter"


class _Way(NamedTuple):
    """How a new value is made from an old one. `scatters`, the outermost first: each writes the result of the
    next one to a view. `last`: the op that makes what the innermost one writes; None if that is only copied.
    """

    scatters: tuple[Node, ...]
    last: Node | None

    @property
    def first_written(self) -> Node:
        return self.scatters[-1] if self.last is None else self.last

    @property
    def others(self) -> list[Value]:
        """The values that the ops read while the input is written, without the input."""
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
    """How the new value is made from the old one; None if an op on the way has no in-place form."""
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
        elif in_place_form(node) is not None and not draws(node) and is_alike(node.inputsAt(0), value):
            return _Way(tuple(scatters), node)
        else:
            return _Way(tuple(scatters), None) if scatters else None


def _is_part(value: Value, old: Value, scatters: Sequence[Node]) -> bool:
    """Whether `value` is the view of `old` to which the innermost of the scatters writes."""
    if not scatters:
        return value.unique() == old.unique()
    node, scatter = value.node(), scatters[-1]
    if node.kind() != _view_of(scatter):
        return False
    same = all(map(_is_equal, inputs(node)[1:], inputs(scatter)[2:]))
    return same and _is_part(node.inputsAt(0), old, scatters[:-1])


def _is_equal(a: Value, b: Value) -> bool:
    """Whether both are the same value, or equal constants."""
    if a.unique() == b.unique():
        return True
    if not (is_constant(a) and is_constant(b)):
        return False
    return type(constant_of(a)) is type(constant_of(b)) and constant_of(a) == constant_of(b)


def _view_of(node: Node) -> str | None:
    """The kind of the view to which the node writes; None if it is no scatter. (`as_strided_scatter` is not
    taken: its strides may reach memory outside of the operand.)"""
    kind = node.kind().removesuffix(_SCATTER)
    return kind if kind != node.kind() and kind != "aten::as_strided" and _has_view(node.kind()) else None


@cache
def _has_view(kind: str) -> bool:
    """Whether the view has the arguments that the op has after the source."""
    scatter = _arguments(getattr(torch.ops.aten, kind.removeprefix("aten::")).default)
    packet = getattr(torch.ops.aten, kind.removeprefix("aten::").removesuffix(_SCATTER), None)
    views = [getattr(packet, name) for name in packet.overloads()] if packet else []
    return scatter[1:2] == [("src", "Tensor")] and any(
        _arguments(view) == [scatter[0], *scatter[2:]] and view.is_view for view in views
    )


def in_place_form(node: Node) -> str | None:
    """The kind of the op that does the same in place, on its first operand; None if there is none."""
    found = schema(node)
    return None if found is None else _in_place_form(found.name, found.overload)


@cache
def _in_place_form(name: str, overload: str) -> str | None:
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
    """Whether nobody reads the old value after the new one is made, or can see that both are one tensor."""
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
    """Whether the node reads no elements of its operand."""
    found = schema(node) if node.kind().startswith("aten::") else None
    return node.kind() == LIST or (found is not None and found.aliases and not found.writes)


def _write(graph: Graph, way: _Way, old: Value, new: Value, refusals: Refusals) -> None:
    """Makes the ops write to the input; the readers of the new value now read the input."""
    place = way.first_written
    if way.last is not None:
        made = insert(graph, place, str(in_place_form(place)), inputs(place))
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
    """Removes the node, and the views before it that nobody else reads."""
    makers = [v.node() for v in inputs(node)]
    node.destroy()
    for maker in {m.output().unique(): m for m in makers if m.outputsSize() == 1}.values():
        if maker.kind() != GROUP and _is_view(maker) and not maker.output().uses():
            _remove(maker)
