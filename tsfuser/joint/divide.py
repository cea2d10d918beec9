"""A joint graph in two.

In: a joint graph, and the values that the forward saves. Out: the graphs of forward and backward, which are
new. Example: `Cut` in cut.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Refusal
from ..graph.wrapper import Graph, Node, Value, inputs, outputs
from .names import add_input
from .node_facts import PARAM
from .reverse import Joint
from .roles import Roles


@dataclass(frozen=True)
class Cut:
    """Forward and backward. The forward returns the program's `results`, then values that are only saved. The
    backward gets a gradient for each of the results `asked`, then the inputs `saved_inputs` of the forward,
    then its outputs `saved_outputs`: numbers all. It returns the gradients of the inputs `differentiated`."""

    forward: Graph
    backward: Graph
    results: int
    asked: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    differentiated: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """A `value` that the backward may compute again, and what the forward has `instead`, of equal numbers:
    unless one of the `parts` is saved that it is computed of."""

    value: Value
    instead: Value
    parts: tuple[Value, ...] = ()


def divided(joint: Joint, roles: Roles, saved: set[int], written: Sequence[Written] = ()) -> Cut:
    """`saved`: the numbers of inputs and other values of the joint graph, which is changed for what is
    `written`."""
    saved_inputs = [i for i, v in enumerate(roles.given) if v.unique() in saved]
    made = [v for node in roles.nodes for v in outputs(node) if v.unique() in saved]
    late = [node for node in roles.acting if roles.is_late(node)]
    backward = part(
        roles, [*roles.grads, *(roles.given[i] for i in saved_inputs), *made], roles.gradients, late
    )
    written = [w for w in written if saved.isdisjoint(part.unique() for part in w.parts)]
    for w in written:
        w.value.replaceAllUsesWith(w.instead)
    forwards = {w.value.unique(): w.instead for w in written}
    made = [forwards.get(v.unique(), v) for v in made]
    returned = [forwards.get(v.unique(), v) for v in roles.results]
    places = {v.unique(): i for i, v in reversed(list(enumerate(returned)))}
    for value in made:
        if value.unique() not in places:
            places[value.unique()] = len(returned)
            returned.append(value)
    early = [node for node in roles.acting if not roles.is_late(node)]
    return Cut(
        part(roles, roles.given, returned, early),
        backward,
        joint.results,
        joint.asked,
        tuple(saved_inputs),
        tuple(places[v.unique()] for v in made),
        joint.differentiated,
    )


def part(roles: Roles, given: Sequence[Value], returned: Sequence[Value], acting: Sequence[Node]) -> Graph:
    """A graph of the nodes that lead from values to others."""
    graph = Graph()
    known: dict[int, Value] = {}
    for value in given:
        known.setdefault(value.unique(), add_input(graph, value))
    copy = Copy(graph, graph.return_node(), known)
    needed = {v.unique() for v in returned}.union(v.unique() for node in acting for v in outputs(node))
    wanted = []
    for node in reversed(roles.nodes):
        made = {v.unique() for v in outputs(node)} - known.keys()
        if not made.isdisjoint(needed) or node in acting:
            wanted.append(node)
            needed.update(v.unique() for v in inputs(node))
    for node in reversed(wanted):
        copy.add(node)
    for value in returned:
        graph.registerOutput(copy.of(value))
    return graph


class Copy:
    """Values of one graph in another, before `place`. `known`: by their numbers there, the values here."""

    def __init__(self, graph: Graph, place: Node, known: dict[int, Value]):
        self.graph, self.place, self.known = graph, place, known

    def add(self, node: Node) -> None:
        made = self.graph.createClone(node, self.of).insertBefore(self.place)
        for value, copied in zip(outputs(node), outputs(made)):
            self.known.setdefault(value.unique(), copied)

    def of(self, value: Value) -> Value:
        """The value here; of a constant, a copy. Raises Refusal for an input that is not known here."""
        if value.unique() not in self.known:
            if value.node().kind() == PARAM:
                raise Refusal("a value is needed that is not saved")
            self.add(value.node())
        return self.known[value.unique()]
