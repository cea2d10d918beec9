"""Lists, tuples and dicts stand right before their first reader.

Before: `%l = prim::ListConstruct(%a, %b)`, a branch that does `aten::mul_(%a, 0.5)`, `%y = aten::cat(%l, 0)`.
After: the list is made behind the branch. In: a graph that no other pass changes after it. Out: the same
graph.

Torch's dead code elimination runs behind this. From the last node to the first, it keeps a write to a value
that is read further below, but does not look into lists: it drops the write of the graph above. A reader may
write to the list itself, so the list stays before the first one."""

from __future__ import annotations

from .wrapper import LIST, Block, Graph, Node, all_blocks, end_of, operands

_KINDS = frozenset((LIST, "prim::TupleConstruct", "prim::DictConstruct"))


def sink_containers(graph: Graph) -> None:
    """Moves them."""
    for block in all_blocks(graph):
        _sink_in(block)


def _sink_in(block: Graph | Block) -> None:
    first: dict[int, Node] = {}  # value -> what reads it first
    behind = end_of(block)
    for node in reversed(list(block.nodes())):
        place = behind
        if node.kind() in _KINDS:
            place = first.get(node.output().unique(), end_of(block))
        for value in operands(node):
            known = first.get(value.unique())
            first[value.unique()] = known if known and place != behind and known.isBefore(place) else node
        if place == behind:
            behind = node
        else:
            node.moveBefore(place)
