"""The part of a backward that a call needs: some gradients may be missing, or not be asked for.

In eager each op has a node of autograd, which runs where a gradient comes for its result, and where one is
asked for that it leads to. It unpacks what it has saved, and frees that. A joint graph has one node for all
of its ops, which keeps to the same by two things that are made here.

- `partial` leaves out what only missing gradients lead to, as zeros would not do where a derivative is
  infinite or NaN: of `(cos(x), log(x))` with a gradient for the first result alone, 0 / x is NaN at 0. And it
  leaves out what leads to no gradient that is asked for. Example, without `%gb`:

      %a = aten::neg(%ga);  %b = aten::div(%gb, %x);  %g = aten::add(%a, %b, %1)   ->   %g = aten::neg(%ga)

- `readers` says what is saved for which gradients. Of the same backward: nothing for `%ga`, %x for `%gb`. So
  a write to %x is no error where `%gb` is missing, nor is a second backward, for `%gb`, behind one for `%ga`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph.worth import shape
from ..graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    constant_before,
    constant_of,
    facts,
    graph_inputs,
    graph_outputs,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
    outputs,
)
from .divide import Copy
from .node_facts import elements_read

_TUPLE, _SUM = "prim::TupleConstruct", "aten::add"
_NOTHING: frozenset[int] = frozenset()

Places = frozenset[int]


def partial(
    graph: Graph, present: Sequence[bool], asked: Sequence[bool]
) -> tuple[Graph, list[int], list[int]]:
    """The part, by the places of its inputs among those of `graph`; and the places of missing gradients that
    are zeros in it, as an op reads them together with others.

    The first inputs are gradients, of which those `present` are there. The backward returns a tuple. What is
    not `asked` of it, or is made of missing gradients alone, is None there."""
    leading = _leading(graph, len(present))
    there = {i for i, is_present in enumerate(present) if is_present}
    given = _with_zeros(graph, leading, there)
    returned = inputs(graph_outputs(graph)[0].node())
    wanted = [v if a and _is_there(leading, v, there) else None for v, a in zip(returned, asked, strict=True)]
    needed = _needed(graph, leading, given, [v for v in wanted if v is not None])
    places = [i for i, v in enumerate(graph_inputs(graph)) if v.unique() in needed]
    part, known = Graph(), dict[int, Value]()
    for i in places:
        value = graph_inputs(graph)[i]
        known[value.unique()] = part.addInput()
        known[value.unique()].setType(value.type())
    copy = Copy(part, part.return_node(), known)
    for node in nodes_in(graph):
        if node.kind() == CONSTANT or not any(v.unique() in needed for v in outputs(node)):
            continue
        lone = _lone_operand(node, leading, given)
        if lone is None:
            copy.add(node)
        else:
            known[node.output().unique()] = copy.of(lone)
    results = [constant_before(part, part.return_node(), None) if v is None else copy.of(v) for v in wanted]
    packed = part.create(_TUPLE, results, 1).insertBefore(part.return_node())
    packed.output().setType(torch._C.TupleType([v.type() for v in results]))
    part.registerOutput(packed.output())
    torch._C._jit_pass_erase_shape_information(part)
    return part, places, sorted(given - there)


def readers(graphs: Sequence[Graph], gradients: int) -> list[int]:
    """Of backwards with the same inputs: for each choice of gradients that lead to an op, and of results that
    its operands lead to, the places of these, and those of the tensors of which such ops read elements, and
    of others, which they ask for sizes or the like. Each list begins with its length. Places of saved values
    count from the first one on.

    Operands, as eager's node unpacks all that it has saved, whichever of its results are asked for."""
    found: dict[tuple[Places, Places], tuple[set[int], set[int]]] = {}
    for graph in graphs:
        leading, saved = _leading(graph, gradients), graph_inputs(graph)[gradients:]
        reached, read = _reached(graph), _Read(saved)
        for node in nodes_in(graph):
            if not (its := _of_all(leading, outputs(node))):
                read.note(node)
            elif node.kind() != _TUPLE:
                late = [v for v in inputs(node) if v.unique() in leading]
                elements, others = found.setdefault((its, _of_all(reached, late)), (set(), set()))
                elements |= read.elements(node)
                others |= read.all(node)
    flat: list[int] = []
    for (its, results), (elements, others) in found.items():
        for places in (its, results, elements, others - elements):
            flat += [len(places), *sorted(places)]
    return flat


class _Read:
    """The saved values that values without a gradient depend on."""

    def __init__(self, saved: Sequence[Value]):
        tensors = [(i, v) for i, v in enumerate(saved) if is_tensor(v)]
        self._elements = {v.unique(): frozenset((i,)) for i, v in tensors}
        self._all = dict(self._elements)

    def note(self, node: Node) -> None:
        for known, made in ((self._elements, self.elements(node)), (self._all, self.all(node))):
            known.update((v.unique(), made) for v in outputs(node))

    def elements(self, node: Node) -> Places:
        held = inputs(node) if node.kind().startswith("prim::List") else elements_read(node)
        return _of_all(self._elements, held)

    def all(self, node: Node) -> Places:
        return _of_all(self._all, inputs(node))


def _of_all(known: dict[int, Places], values: Sequence[Value]) -> Places:
    return _NOTHING.union(*(known.get(v.unique(), _NOTHING) for v in values))


def _leading(graph: Graph, gradients: int) -> dict[int, Places]:
    """The places of the gradients that values depend on."""
    leading = {v.unique(): frozenset((i,)) for i, v in enumerate(graph_inputs(graph)[:gradients])}
    for node in nodes_in(graph):
        if found := _of_all(leading, inputs(node)):
            leading.update((v.unique(), found) for v in outputs(node))
    return leading


def _reached(graph: Graph) -> dict[int, Places]:
    """The places of the results that depend on values."""
    reached: dict[int, Places] = {}
    packed = graph_outputs(graph)[0].node()
    for i, value in enumerate(inputs(packed)):
        reached[value.unique()] = reached.get(value.unique(), _NOTHING) | {i}
    for node in reversed(nodes_in(graph)):
        found = _NOTHING if node == packed else _of_all(reached, outputs(node))
        for value in inputs(node):
            reached[value.unique()] = reached.get(value.unique(), _NOTHING) | found
    return reached


def _is_there(leading: dict[int, Places], value: Value, given: set[int]) -> bool:
    """Whether the value can be computed of the gradients `given`."""
    found = leading.get(value.unique(), _NOTHING)
    return not found or not found.isdisjoint(given)


def _with_zeros(graph: Graph, leading: dict[int, Places], there: set[int]) -> set[int]:
    """The gradients that are `there`, and missing ones that have to be zeros: an op reads what they lead to,
    and what others do."""
    given = set(there)
    for node in nodes_in(graph):
        late = [v for v in inputs(node) if leading.get(v.unique())]
        lacking = [v for v in late if not _is_there(leading, v, given)]
        if lacking and len(lacking) < len(late) and node.kind() != _TUPLE and not _is_sum(node):
            return _with_zeros(graph, leading, given | _of_all(leading, lacking))
    return given


def _needed(graph: Graph, leading: dict[int, Places], given: set[int], wanted: Sequence[Value]) -> set[int]:
    needed = {v.unique() for v in wanted}
    for node in reversed(nodes_in(graph)):
        if any(v.unique() in needed for v in outputs(node)):
            lone = _lone_operand(node, leading, given)
            needed.update(v.unique() for v in (inputs(node) if lone is None else [lone]))
    return needed


def _is_sum(node: Node) -> bool:
    """Whether the node adds two gradients of one value, of one shape."""
    if node.kind() != _SUM or not all(map(is_tensor, inputs(node)[:2])):
        return False
    *terms, factor = inputs(node)
    shapes = [(facts(v.type()).rank, shape(v)[0]) for v in (*terms, node.output())]
    is_plain = is_constant(factor) and constant_of(factor) == 1
    return is_plain and shapes[0][0] is not None and all(its == shapes[0] for its in shapes)


def _lone_operand(node: Node, leading: dict[int, Places], given: set[int]) -> Value | None:
    """Of a sum the operand that is there, if the other is not."""
    if not _is_sum(node) or not all(leading.get(v.unique()) for v in inputs(node)[:2]):
        return None
    found = [v for v in inputs(node)[:2] if _is_there(leading, v, given)]
    return found[0] if len(found) == 1 else None
