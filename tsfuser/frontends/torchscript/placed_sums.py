"""Additions to new zeros at places that an index names, as an op that groups have.

In: a graph of a scripted program, with types. Out: the same graph. Example, the messages along the edges of a
graph network, summed up by nodes:

    out = x.new_zeros([9, 4]);  out.index_add_(0, edges, m)
becomes
    out = tsfuser::sums_by_place(m, [9, 4], 0, edges, True)

A group makes few sums by reductions (ops/place_sums.py), on whose order nothing depends. Many sums, which
torch's op makes faster, stay with that op, which `sums_by_place` calls outside of groups.
"""

from __future__ import annotations

from ...graph.wrapper import (
    LIST,
    Graph,
    Node,
    Value,
    all_nodes_of,
    constant_before,
    constant_of,
    facts,
    inputs,
    is_constant,
    schema,
)
from ...ops.table import FLOATING

SUMS = "tsfuser::sums_by_place"
PARTS = {
    f"aten::{name}": name.startswith("index")
    for name in "index_add index_add_ scatter_add scatter_add_".split()
}
_ZEROS = {"aten::new_zeros": 1, "aten::zeros": 0}  # kind -> the position of the sizes


def make_sums(graph: Graph) -> None:
    """Changes the graph."""
    for node in all_nodes_of(graph, tuple(PARTS)):
        if _adds_to_zeros(node):
            _replace(graph, node)


def _adds_to_zeros(node: Node) -> bool:
    """Whether the node adds, times 1, to new zeros, of whose elements nobody else knows before."""
    zeros, dim, index, source, *alpha = inputs(node)
    known, made = facts(source.type()), facts(zeros.type())
    found = schema(node)
    return (
        found is not None
        and found.overload == ""
        and is_constant(dim)
        and all(is_constant(a) and constant_of(a) == 1 for a in alpha)
        and zeros.node().kind() in _ZEROS
        and zeros.node().owningBlock() == node.owningBlock()  # each turn of a loop has its own
        and known == made
        and known.dtype in FLOATING
        and facts(index.type()).device == known.device
        and _is_first(node)
    )


def _is_first(node: Node) -> bool:
    """Whether all others that read the zeros come behind the node, which then changes them in place."""
    zeros = node.inputsAt(0)
    others = [use.user for use in zeros.uses() if use.user != node]
    if len(others) + 1 < len(zeros.uses()) or (others and not node.kind().endswith("_")):
        return False
    return all(node.isBefore(other) for other in others)


def _replace(graph: Graph, node: Node) -> None:
    zeros, dim, index, source, *_ = inputs(node)
    maker, checks = zeros.node(), PARTS[node.kind()]
    of_parts = None if checks else _index_of_parts(index, source, constant_of(dim))
    flags = [constant_before(graph, node, flag) for flag in (checks or of_parts is not None, checks)]
    sizes = maker.inputsAt(_ZEROS[maker.kind()])
    made = graph.create(SUMS, [source, sizes, dim, of_parts or index, *flags], 1)
    made.copyMetadata(node)
    made.insertBefore(node)
    made.output().setType(zeros.type())
    node.output().replaceAllUsesWith(made.output())
    node.destroy()
    zeros.replaceAllUsesWith(made.output())
    maker.destroy()


def _index_of_parts(index: Value, source: Value, dim: int) -> Value | None:
    """The index of one dim that is expanded to the sizes of the source; None where that is not known."""
    expanded, rank = index.node(), facts(source.type()).rank
    if expanded.kind() != "aten::expand_as" or expanded.inputsAt(1) != source or not rank:
        return None
    part, dim = expanded.inputsAt(0).node(), dim % rank
    if part.kind() not in ("aten::view", "aten::reshape", "aten::unsqueeze"):
        return None
    given, shape = part.inputsAt(0), _constants(part.inputsAt(1))
    if facts(given.type()).rank != 1:
        return None
    along = [-1 if d == dim else 1 for d in range(rank)]
    if part.kind() == "aten::unsqueeze":
        return given if rank == 2 and shape in ([[1], [-1]] if dim == 0 else [[0], [-2]]) else None
    return given if shape == along else None


def _constants(value: Value) -> list[int] | None:
    """A constant number or list of numbers, as a list."""
    items = inputs(value.node()) if value.node().kind() == LIST else [value]
    if not all(is_constant(item) for item in items):
        return None
    found = [constant_of(item) for item in items]
    return list(found[0]) if len(found) == 1 and isinstance(found[0], (list, tuple)) else found
