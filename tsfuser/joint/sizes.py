"""Sums of gradients over broadcast dims, where nothing was broadcast.

In: a joint graph. A rule sums each share of a gradient to the sizes of the operand, as the op may have
broadcast it. Out: the same graph without those whose operand surely has these sizes, of whatever length.
Example, for `y = sin(x) * w` and what follows from `z = sin(y) * w`:

    %g = aten::mul(%grad_z, %w);  %n = aten::size(%sin_y);  %s = aten::_grad_sum_to_size(%g, %n)    ->  %g

The sizes of a value are named by the values that are broadcast together in it: both %g and %sin_y are as
large as %x and %w together. Only sin(x) may be smaller. Queries are of the values that names are made of.
"""

from __future__ import annotations

from ..graph.copied_reshapes import SUMMED
from ..graph.effects import remove_dead_code
from ..graph.rows import row_of
from ..graph.wrapper import Node, Value, graph_inputs, graph_outputs, inputs, is_tensor, nodes_in, outputs
from .reverse import Joint

_SIZE, _BROADCAST = "aten::size", "prim::BroadcastSizes"
_MOST = 16  # values in a name


def drop_idle_sums(joint: Joint) -> None:
    """Sums that change nothing go, and what only they read. A gradient that is given is as large as its
    result: autograd sees to that."""
    names = _Names(joint)
    queries: dict[int, Value] = {}
    for node in nodes_in(joint.graph):
        if node.kind() == _SIZE and node.inputsSize() == 1:
            _share(node, names, queries)
        elif node.kind() == SUMMED and names.of(node.inputsAt(0)) == names.of(node.inputsAt(1)):
            node.output().replaceAllUsesWith(node.inputsAt(0))
            node.destroy()
            continue
        names.note(node)
    remove_dead_code(joint.graph)


def _share(node: Node, names: _Names, queries: dict[int, Value]) -> None:
    """Has the query of a value that is as large as one other ask that, once for all of them."""
    name = names.of(node.inputsAt(0))
    if len(name) == 1:
        (base,) = name
        if base in queries:
            node.output().replaceAllUsesWith(queries[base])
        else:
            node.replaceInput(0, names.values[base])
            queries[base] = node.output()


class _Names:
    """The names of sizes, by the numbers of values: tensors, and lists of sizes."""

    def __init__(self, joint: Joint):
        results, given = graph_outputs(joint.graph), graph_inputs(joint.graph)
        self._like = dict(
            zip(
                (v.unique() for v in given[len(given) - len(joint.asked) :]),
                map(results.__getitem__, joint.asked),
            )
        )
        self._known: dict[int, frozenset[int]] = {}
        self.values: dict[int, Value] = {}  # those that names are made of

    def of(self, value: Value) -> frozenset[int]:
        """What a value of whose sizes nothing is known has is a name of its own."""
        value = self._like.get(value.unique(), value)
        self.values.setdefault(value.unique(), value)
        return self._known.get(value.unique(), frozenset((value.unique(),)))

    def note(self, node: Node) -> None:
        """Gives the results their names."""
        if node.kind() in (_SIZE, _BROADCAST):
            sources = inputs(node) if node.kind() == _BROADCAST else inputs(node)[: node.inputsSize() == 1]
            self._name(node.output(), sources)
        elif node.kind() == SUMMED:
            self._name(node.output(), inputs(node)[1:])
        elif (found := row_of(node)) is not None:
            tensors = [v for v in inputs(node) if is_tensor(v)]
            for value in outputs(node):
                rule = found[0].sizes
                rule = rule if isinstance(rule, str) else rule[value.offset()]
                if rule in ("broadcast", "first"):
                    self._name(value, tensors if rule == "broadcast" else tensors[:1])

    def _name(self, value: Value, sources: list[Value]) -> None:
        name = frozenset().union(*map(self.of, sources))
        if 0 < len(name) <= _MOST:
            self._known[value.unique()] = name
