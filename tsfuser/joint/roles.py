"""What each node and value of a joint graph is: part of the forward or of the backward, a view, compared.

In: a `Joint`. Out: `Roles`, which the cut asks. Example, for the joint graph of `y = sin(x)`,

    %y = aten::sin(%x);  %c = aten::cos(%x);  %g = aten::mul(%grad_y, %c)

sin is early, as the forward computes it in any case; mul is late, as it depends on a gradient; cos is
neither: it may be computed on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.compared import Step, met_again, step_of
from ..graph.effects import PURE, effect
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Node,
    Value,
    graph_inputs,
    graph_outputs,
    inputs,
    nodes_in,
    outputs,
)
from .node_facts import copies_input, elements_read, is_free, retypes, viewed
from .reverse import Joint


class Roles:
    """`nodes`: all but constants. `given`: the inputs of the forward; `grads`: the gradients that the
    backward gets, of the `results` asked; `gradients`: those that it gives."""

    def __init__(self, joint: Joint):
        self.nodes = [node for node in nodes_in(joint.graph) if node.kind() != CONSTANT]
        values, made = graph_inputs(joint.graph), graph_outputs(joint.graph)
        first = len(values) - len(joint.asked)
        self.given, self.grads = values[:first], values[first:]
        self.results, self.gradients = made[: joint.results], made[joint.results :]
        self._late = {v.unique() for v in self.grads}
        for node in self.nodes:
            if any(v.unique() in self._late for v in inputs(node)):
                self._late.update(v.unique() for v in outputs(node))
        self._free = {v.unique() for node in self.nodes if is_free(node) for v in outputs(node)}
        #: Nodes that do something besides what they return.
        self.acting = [node for node in self.nodes if effect(node) != PURE]
        doing = [v for node in self.acting if not self.is_late(node) for v in outputs(node)]
        self._early = self.leading_to([*self.results, *doing])
        self._roots: dict[int, frozenset[int]] = {}
        for node in self.nodes:
            self._note_roots(node)
        self._served = self._gradients_served()

    def is_late(self, node: Node) -> bool:
        """Whether the node depends on a gradient."""
        return any(map(self.has_gradient, outputs(node)))

    def has_gradient(self, value: Value) -> bool:
        """Whether the value depends on a gradient."""
        return value.unique() in self._late

    def is_early(self, node: Node) -> bool:
        """Whether the forward computes the node in any case."""
        if any(v.unique() in self._early for v in outputs(node)):
            return True
        return effect(node) != PURE and not self.is_late(node)

    def is_free(self, node: Node) -> bool:
        """Whether it costs nothing to compute the node twice: it gives a view, or a number or list, and reads
        no elements of tensors for that."""
        return any(v.unique() in self._free for v in outputs(node))

    def roots(self, value: Value) -> frozenset[int]:
        """The numbers of the values that it may be a view of, or hold; else its own."""
        return self._roots.get(value.unique()) or frozenset((value.unique(),))

    def leading_to(self, values: Sequence[Value]) -> set[int]:
        """The numbers of values, and of all that they are computed of."""
        found = {v.unique() for v in values}
        for node in reversed(self.nodes):
            if any(v.unique() in found for v in outputs(node)):
                found.update(v.unique() for v in inputs(node))
        return found

    def served(self, value: Value) -> frozenset[int]:
        """The numbers of the gradients that the backward gets for which it reads the value, or what is made
        of it."""
        return self._served.get(value.unique(), frozenset())

    def read_directly(self) -> dict[int, frozenset[int]]:
        """Roots of the values of which a derivative reads elements: eager saves those, or views of them; and
        for which gradients."""
        found: dict[int, frozenset[int]] = {}
        for node in self.nodes:
            if not self.is_early(node):
                served = _of_all(self._served, outputs(node))
                for root in (root for v in elements_read(node) for root in self.roots(v)):
                    found[root] = found.get(root, served) | served
        return found

    def compared(self) -> set[int]:
        """The numbers of values that must not be computed twice, as they are compared with others."""
        values = [*self.given, *self.grads]
        numbers = {v.unique(): k for k, v in enumerate(values)}
        steps: list[Step | None] = [None] * len(values)
        needed = self.leading_to(self.gradients)
        for node in self.nodes:
            jumps = any(v.unique() in needed for v in outputs(node))
            steps.append(step_of(node, numbers, jumps))
            numbers.update((v.unique(), len(steps) - 1) for v in outputs(node))
        made = dict(enumerate(self.nodes, len(values)))
        return {v.unique() for k, _ in met_again(steps) if k in made for v in outputs(made[k])}

    def _gradients_served(self) -> dict[int, frozenset[int]]:
        served = {v.unique(): frozenset((i,)) for i, v in enumerate(self.grads)}
        for node in self.nodes:
            if self.is_late(node):
                _add(served, outputs(node), _of_all(served, inputs(node)))
        for node in reversed(self.nodes):
            read = [v for v in inputs(node) if not self.has_gradient(v)]
            _add(served, read, _of_all(served, outputs(node)))
        return served

    def _note_roots(self, node: Node) -> None:
        source = None if retypes(node) or copies_input(node) else viewed(node)
        held = inputs(node) if node.kind() == LIST else [source] if source is not None else []
        if held:
            roots = frozenset().union(*map(self.roots, held))
            self._roots.update((v.unique(), roots) for v in outputs(node))


def _of_all(known: dict[int, frozenset[int]], values: Sequence[Value]) -> frozenset[int]:
    return frozenset().union(*(known.get(v.unique(), ()) for v in values))


def _add(known: dict[int, frozenset[int]], values: Sequence[Value], more: frozenset[int]) -> None:
    for value in values:
        known[value.unique()] = known.get(value.unique(), frozenset()) | more
