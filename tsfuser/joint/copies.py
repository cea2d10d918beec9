"""Copies of inputs that the forward may save instead of larger values.

Eager saves an input only where a derivative reads it; the program may write to the others. In: a joint
graph. Out: the same graph, in which elementwise ops read a copy of each such input, and both (`Written`). The
cut may save the copy; where it does not, the forward reads the input again. Before, and what the cut may make
of it:

    %m = aten::add(%scores, %mask);  %y = aten::softmax(%m)     saves %y, in float32
    %c = aten::clone(%mask);  %m = ...;  %y = ...               saves %scores, in 16 bits, and %c
"""

from __future__ import annotations

from ..graph.compared import is_elementwise
from ..graph.rows import row_of
from ..graph.wrapper import Node, is_tensor, nodes_in, outputs
from .divide import Written
from .node_facts import viewed
from .reverse import Joint
from .roles import Roles
from .terms import Term, Writer


def copy_inputs(joint: Joint, by_eager: dict[int, frozenset[int]]) -> list[Written]:
    """`by_eager`: what eager saves (`Roles.read_directly`)."""
    roles, writer = Roles(joint), Writer(joint.graph)
    first = next(iter(nodes_in(joint.graph)), None)
    made = []
    for value in roles.given:
        if first is None or not is_tensor(value) or value.unique() in by_eager:
            continue
        readers = [(use.user, use.offset) for use in value.uses() if _reads(use.user, roles)]
        if any(_leads_to_computed(node) for node, _ in readers):
            writer.place = writer.lines = first
            copy = Term(writer, value).clone().value
            copy.setType(value.type())
            for node, place in readers:
                node.replaceInput(place, copy)
            made.append(Written(copy, value, (copy,)))
    return made


def _reads(node: Node, roles: Roles) -> bool:
    """Whether the backward might compute the node again."""
    return bool(outputs(node)) and not roles.is_late(node) and (_is_view(node) or _is_computed(node))


def _leads_to_computed(node: Node) -> bool:
    if not _is_view(node):
        return _is_computed(node)
    return any(_is_computed(use.user) or _is_view(use.user) for v in outputs(node) for use in v.uses())


def _is_view(node: Node) -> bool:
    return any(map(is_tensor, outputs(node))) and viewed(node) is not None


def _is_computed(node: Node) -> bool:
    found = row_of(node)
    return found is not None and is_elementwise(found[0])
