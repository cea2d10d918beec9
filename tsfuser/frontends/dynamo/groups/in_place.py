"""Groups that write directly to the graph's inputs, instead of a copy at the end of the graph.

In: a typed graph with groups, and the copies to inputs that end the program. Out: the same graph, in which
the group that computes a new value stores it over the old one, if nobody reads the old one later; and the
copies that are left. Example: parameters and states of an optimizer are written once. Before:

    %new = prim::CudaFusionGroup(%parameter, %gradient)              parameter.copy_(new) at the end
becomes, with `tsfuser::store(%parameter, %sum)` as the last node of the group,
    %parameter' = prim::CudaFusionGroup(%parameter, %gradient)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .... import log
from ....errors import Refusal
from ....graph.wrapper import CONSTANT, GROUP, Graph, Node, Value, inputs, is_tensor, outputs, schema
from ....grouping.passes import identity
from ....ir.call import Call
from ....planning.parse import parse
from ....planning.planner import group_device
from .expected import expected_arguments

_STORE = "tsfuser::store"

Update = tuple[int, int]
_Place = tuple[int, int]  # numbers of an input of a group, and of the output that is stored there


def write_in_place(
    graph: Graph, updates: Sequence[Update], results: Collection[int | None], numbers: Mapping[int, int]
) -> list[Update]:
    """Changes groups; returns the updates that are left: (input, output that is copied to it). `results`: the
    outputs that are returned. `numbers`: those of `expected_calls`."""
    wanted = _candidates(graph, updates, results)
    possible: dict[object, tuple[_Place, ...]] = {}
    done: set[Update] = set()
    for group, found in wanted.items():
        done.update(_store(graph, group, found, numbers, possible))
    return [update for update in updates if update not in done]


def _candidates(
    graph: Graph, updates: Sequence[Update], results: Collection[int | None]
) -> dict[Node, list[Update]]:
    """group -> the updates that it may do, as far as the rest of the graph allows."""
    nodes = list(graph.nodes())
    places = {v.unique(): at for at, node in enumerate(nodes) for v in outputs(node)}
    given, returned = list(graph.inputs()), list(graph.outputs())
    sources = [returned[source].unique() for _, source in updates]
    found: dict[int, list[Update]] = {}
    for target, source in updates:
        old, new = given[target], returned[source]
        if new.node().kind() != GROUP or source in results or sources.count(new.unique()) > 1:
            continue
        at = places[new.unique()]
        shared = sharing(nodes, old)
        used_later = any(not shared.isdisjoint(v.unique() for v in inputs(node)) for node in nodes[at + 1 :])
        viewed = any(v.unique() in shared and v.unique() != old.unique() for v in inputs(nodes[at]))
        if is_alike(old, new) and not used_later and not viewed and shared.isdisjoint(sources):
            if len(new.uses()) == 1:  # another reader might read it after the next group has written
                found.setdefault(at, []).append((target, source))
    return {nodes[at]: list(group) for at, group in found.items()}


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


def is_alike(old: Value, new: Value) -> bool:
    """Whether both tensors have the same dtype, device and, in the traced call, sizes."""
    a, b = old.type(), new.type()
    if not (is_tensor(old) and is_tensor(new)) or None in (a.sizes(), a.dtype(), a.device()):
        return False
    return (a.sizes(), a.dtype(), a.device()) == (b.sizes(), b.dtype(), b.device())


def _store(
    graph: Graph,
    group: Node,
    updates: Sequence[Update],
    numbers: Mapping[int, int],
    possible: dict[object, tuple[_Place, ...]],
) -> list[Update]:
    """Makes the group store as many of its results as it can in one kernel; returns those updates."""
    args = expected_arguments(group, numbers)
    if args is None:
        return []
    arguments, made = ([v.unique() for v in side(group)] for side in (inputs, outputs))
    given, returned = list(graph.inputs()), list(graph.outputs())
    places: dict[_Place, Update] = {}
    for target, source in updates:
        old, new = given[target].unique(), returned[source].unique()
        if old in arguments:  # an input that is not read may differ in a later call
            places[arguments.index(old), made.index(new)] = target, source
    before = group.g("Subgraph")
    key = (identity(before), args, tuple(places))
    if key not in possible:
        possible[key] = _possible(before, tuple(places), args)
    if possible[key]:
        group.g_("Subgraph", _storing(before, possible[key]))
    return [places[place] for place in possible[key]]


def _possible(subgraph: Graph, places: tuple[_Place, ...], args: tuple) -> tuple[_Place, ...]:
    """The places to which a group with such arguments can store: all of them, or as many as can be added one
    after the other."""
    if not _is_refused(_storing(subgraph, places), args):
        return places
    found: tuple[_Place, ...] = ()
    for place in places:
        if not _is_refused(_storing(subgraph, (*found, place)), args):
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


def _is_refused(subgraph: Graph, args: tuple) -> bool:
    call = Call(args)
    try:
        parse(subgraph, call, group_device(call))
    except Refusal as refusal:
        log.write("partition", f"a group does not write in place: {refusal}", "")
        return True
    return False
