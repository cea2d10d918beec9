"""Groups that write directly to the graph's inputs, instead of a copy at the end of the graph.

In: a typed graph with groups, and the copies to inputs that end the program. Out: the same graph, in which
the group that computes a new value stores it over the old one, if nobody reads the old one later; and the
copies that are left. So does a group whose value is changed further by ops with an in-place form (ways.py).
Example: parameters and states of an optimizer are written once. Before:

    %new = prim::CudaFusionGroup(%parameter, %gradient)              parameter.copy_(new) at the end
becomes, with `tsfuser::store(%parameter, %sum)` as the last node of the group,
    %parameter' = prim::CudaFusionGroup(%parameter, %gradient)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .... import log
from ....errors import Refusal
from ....graph.wrapper import CONSTANT, GROUP, Graph, Node, Value, inputs, outputs, schema
from ....grouping.passes import identity
from ....ir.call import Call
from ....planning.parse import parse
from ....planning.planner import group_device
from .expected import expected_arguments
from .ways import is_alike, is_read, made_from

_STORE = "tsfuser::store"
ADD_AT = "tsfuser::add_at"

Update = tuple[int, int]
_Place = tuple[int, int]  # numbers of an input of a group, and of the output that is stored there


class _Wanted(NamedTuple):
    """A value that a group may store over an input. `is_last`: with that, the update is done."""

    update: Update
    old: Value
    new: Value
    is_last: bool


def write_in_place(
    graph: Graph, updates: Sequence[Update], results: Collection[int | None], numbers: Mapping[int, int]
) -> list[Update]:
    """Changes groups; returns the updates that are left: (input, output that is copied to it). `results`: the
    outputs that are returned. `numbers`: those of `expected_calls`."""
    possible: dict[object, tuple[_Place, ...]] = {}
    done: set[Update] = set()
    for group, found in _candidates(graph, updates, results).items():
        done.update(_store(group, found, numbers, possible))
    return [update for update in updates if update not in done]


def _candidates(
    graph: Graph, updates: Sequence[Update], results: Collection[int | None]
) -> dict[Node, list[_Wanted]]:
    """group -> what it may store, as far as the rest of the graph allows. That may be a value from which ops
    with an in-place form make the new one."""
    nodes = list(graph.nodes())
    places = {v.unique(): at for at, node in enumerate(nodes) for v in outputs(node)}
    given, returned = list(graph.inputs()), list(graph.outputs())
    found: dict[int, list[_Wanted]] = {}
    for update in updates:
        old, new = given[update[0]], returned[update[1]]
        value = made_from(new)[-1]
        if value.node().kind() != GROUP or not is_alike(old, value):
            continue
        if is_read(value) and old.type().strides() != value.type().strides():
            continue  # a view of the value may be one that the input does not have
        at = places[value.unique()]
        shared, its_views = sharing(nodes, old), sharing(nodes, value)
        others = {returned[source].unique() for target, source in updates if (target, source) != update}
        leaving = others | {returned[k].unique() for k in results if k is not None}
        used_later = any(not shared.isdisjoint(v.unique() for v in inputs(node)) for node in nodes[at + 1 :])
        viewed = any(v.unique() in shared and v.unique() != old.unique() for v in inputs(nodes[at]))
        if not used_later and not viewed and shared.isdisjoint(others) and its_views.isdisjoint(leaving):
            found.setdefault(at, []).append(_Wanted(update, old, value, value.unique() == new.unique()))
    return {nodes[at]: wanted for at, wanted in found.items()}


def sharing(nodes: Sequence[Node], value: Value) -> set[int]:
    """The values that may share the memory of an input: the input, and views of it."""
    found = {value.unique()}
    for node in nodes:
        if node.kind() in (GROUP, CONSTANT) or found.isdisjoint(v.unique() for v in inputs(node)):
            continue
        known = schema(node)
        if known is None or known.aliases:
            found.update(v.unique() for v in outputs(node))
    return found


def stored_over(value: Value) -> int | None:
    """The `unique()` of the group's input over which the value is stored; None if it has its own memory."""
    node = value.node()
    if node.kind() != GROUP:
        return None
    subgraph = node.g("Subgraph")
    store = list(subgraph.outputs())[value.offset()].node()
    if store.kind() not in (_STORE, ADD_AT):
        return None
    places = [v.unique() for v in subgraph.inputs()]
    return node.inputsAt(places.index(store.inputsAt(0).unique())).unique()


def _store(
    group: Node,
    wanted: Sequence[_Wanted],
    numbers: Mapping[int, int],
    possible: dict[object, tuple[_Place, ...]],
) -> list[Update]:
    """Makes the group store as many of these values as it can in one kernel; returns the updates that are
    complete then."""
    before = group.g("Subgraph").copy()
    count = group.inputsSize()
    # equal groups share a kernel, in whatever order their updates come
    wanted = sorted(wanted, key=lambda item: item.new.offset())
    for item in wanted:
        if item.old.unique() not in [v.unique() for v in inputs(group)]:
            before.addInput().setType(item.old.type())
            group.addInput(item.old)
    args = expected_arguments(group, numbers)
    arguments, made = ([v.unique() for v in side(group)] for side in (inputs, outputs))
    places = {(arguments.index(w.old.unique()), made.index(w.new.unique())): w for w in wanted}
    chosen: tuple[_Place, ...] = ()
    if args is not None:
        key = (identity(before), args, tuple(places))
        if key not in possible:
            possible[key] = _possible(before, tuple(places), args)
        chosen = possible[key]
    if chosen:
        group.g_("Subgraph", _storing(before, chosen))
    for k in reversed(range(count, group.inputsSize())):
        if all(k != argument for argument, _ in chosen):
            group.removeInput(k)
            if chosen:
                group.g("Subgraph").eraseInput(k)
    return [places[place].update for place in chosen if places[place].is_last]


def _possible(subgraph: Graph, places: tuple[_Place, ...], args: tuple) -> tuple[_Place, ...]:
    """The places to which a group with such arguments can store: all of them, or those that can be added
    one after the other."""
    if not is_refused(_storing(subgraph, places), args):
        return places
    found: tuple[_Place, ...] = ()
    for place in places:
        if not is_refused(_storing(subgraph, (*found, place)), args):
            found += (place,)
    return found


def _storing(before: Graph, places: tuple[_Place, ...]) -> Graph:
    """A copy of the group's graph that stores its results at these places."""
    subgraph = before.copy()
    for argument, result in places:
        old, new = list(subgraph.inputs())[argument], list(subgraph.outputs())[result]
        node = subgraph.create(_STORE, [old, new], 1)
        node.copyMetadata(new.node())
        subgraph.appendNode(node)
        node.output().setType(old.type())
        subgraph.return_node().replaceInput(result, node.output())
    return subgraph


def is_refused(subgraph: Graph, args: tuple) -> bool:
    call = Call(args)
    try:
        parse(subgraph, call, group_device(call))
    except Refusal as refusal:
        log.write("partition", f"a group does not write in place: {refusal}", "")
        return True
    return False
