"""Operands of products of the forward may have room behind them where only backwards see them, too.

In: the cut, and the backward of second derivatives. Out: the same forward, with notes on its products, which
`graph/operand_room.py` reads. Then an operand that is saved is stored once, with its room. A program that
gets the tensor, or a backward that views it as other dims, could tell.
"""

from __future__ import annotations

from ..graph.operand_room import is_reshaped, may_be_parts
from ..graph.wrapper import Graph, Value, graph_inputs, graph_outputs, nodes_in, outputs
from .divide import Cut
from .node_facts import viewed


def use_room(parts: Cut, again: Cut) -> None:
    """Notes which operands and results may have room."""
    forward, made = parts.forward, graph_outputs(parts.forward)
    seen = [*graph_inputs(forward), *made[: parts.results]]
    for way in (parts, again):
        given = graph_inputs(way.backward)[len(way.asked) + len(way.saved_inputs) :]
        seen += [made[i] for i, value in zip(way.saved_outputs, given) if is_reshaped(value)]
    shared = _shared(forward, seen)
    may_be_parts(forward, lambda value: value.unique() not in shared)


def _shared(graph: Graph, values: list[Value]) -> set[int]:
    """The numbers of the values and of all that may share memory with them."""
    found = {v.unique() for v in values}
    views = [(of, outputs(node)) for node in nodes_in(graph) if (of := viewed(node)) is not None]
    for of, made in reversed(views):  # a view leads to what it is of, then that to all its views
        if any(v.unique() in found for v in made):
            found.add(of.unique())
    for of, made in views:
        if of.unique() in found:
            found.update(v.unique() for v in made)
    return found
