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

and readers of `new` read the input, after that. An input that is changed several times in a row is written
each time, as far as nobody reads an older value later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....graph.wrapper import GROUP, Graph, Node, Value, inputs, insert, outputs
from ....grouping.support import Refusals
from .in_place import Update, sharing, stored_over
from .ways import Way, in_place_form, is_alike, is_read, is_view, made_from, view_of, way


def update_in_place(
    graph: Graph, updates: Sequence[Update], results: Collection[int | None], refusals: Refusals
) -> list[Update]:
    """Changes ops of the graph's top block, whose nodes must stay in their order from then on; returns the
    updates that are left: (input, output that is copied to it). `results`: outputs that are returned."""
    left = list(updates)
    for update in updates:
        old, new = list(graph.inputs())[update[0]], list(graph.outputs())[update[1]]
        *made, base = made_from(new)
        if not is_alike(old, new) or old.unique() not in (base.unique(), stored_over(base)):
            continue
        done = bool(made)
        for value in reversed(made):
            step = way(base, value)
            done = step is not None and _may_be_lost(graph, step, (old, base, value), update, left, results)
            if not done:
                break
            _write(graph, step, base, value, refusals)
        if done:
            left.remove(update)
    return left


def _may_be_lost(
    graph: Graph,
    step: Way,
    values: tuple[Value, Value, Value],
    update: Update,
    updates: Sequence[Update],
    results: Collection[int | None],
) -> bool:
    """Whether nobody reads the old value after the new one is made, or can see that both are one tensor.
    `values`: the input, what the step changes, which is in the input's memory, and what it makes."""
    (given, old, new), nodes, returned = values, list(graph.nodes()), list(graph.outputs())
    own = {v.unique() for node in (*step.scatters, step.first_written) for v in outputs(node)}
    shared, its_views = sharing(nodes, given) | sharing(nodes, old), sharing(nodes, new)
    others = [u for u in updates if u != update]
    sources = {returned[source].unique() for _, source in others}
    leaving = sources | {returned[k].unique() for k in results if k is not None}
    if update[0] in [target for target, _ in others] or not its_views.isdisjoint(leaving):
        return False
    if not shared.isdisjoint(sources) or any(v.unique() in shared for v in step.others):
        return False
    if is_read(new) and given.type().strides() != new.type().strides():
        return False  # a view of the new value may be one that the input does not have
    at = next(k for k, node in enumerate(nodes) if _made(node) == _made(step.first_written))
    return not any(
        not own & set(_made(node)) and not is_view(node) and any(v.unique() in shared for v in inputs(node))
        for node in nodes[at:]
    )


def _made(node: Node) -> tuple[int, ...]:
    return tuple(v.unique() for v in outputs(node))


def _write(graph: Graph, step: Way, old: Value, new: Value, refusals: Refusals) -> None:
    """Makes the ops write to the input; the readers of the new value now read the input."""
    place = step.first_written
    if step.last is not None:
        made = insert(graph, place, str(in_place_form(place)), inputs(place))
    else:
        target, source, *where = inputs(place)
        view = insert(graph, place, str(view_of(place)), [target, *where])
        with graph.insert_point_guard(place):
            blocking = graph.insertConstant(False)
        made = insert(graph, place, "aten::copy_", [view.output(), source, blocking])
    refusals.add(made, refusals.reason(place))
    new.replaceAllUsesWith(old)
    for node in (*step.scatters, step.last):
        if node is not None:
            _remove(node)


def _remove(node: Node) -> None:
    """Removes the node, and the views before it that nobody else reads."""
    makers = [v.node() for v in inputs(node)]
    node.destroy()
    for maker in {m.output().unique(): m for m in makers if m.outputsSize() == 1}.values():
        if maker.kind() != GROUP and is_view(maker) and not maker.output().uses():
            _remove(maker)
