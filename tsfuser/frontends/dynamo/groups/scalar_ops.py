"""Arithmetic of 0-dim CPU tensors that no other group has taken becomes groups for the CPU.

In: a typed graph with groups. Out: the same graph, in which two or more such ops that read each other are one
group. The groups of tensors take in such arithmetic only if nobody else reads it. Ops that write, ops that
draw random numbers, and unknown ops stay in their order. Example: ASGD keeps a rate per
parameter, which a step computes for the next step, by eight ops:

    %a = aten::mul(%step, %c)              %rate = prim::CudaFusionGroup(%step)
    %b = aten::pow(%a, %power)
    %rate = aten::reciprocal(%b)
"""

from __future__ import annotations

from collections.abc import Iterable

from .... import options
from ....graph.effects import PURE, Effects, draws, effect
from ....graph.rows import Knowledge, row_of
from ....graph.wrapper import Graph, Node, ids, is_constant, nodes_in, operands, outputs, use_count
from ....grouping.cluster import Item, arrange, clusters
from ....grouping.groups import Group
from ....grouping.outline import outline, reorder
from ....grouping.support import examine

_LEAST = 3  # ops: a call of a group takes as long as one or two of torch's


def group_scalar_ops(graph: Graph) -> list[Group]:
    """Changes the graph's top block; returns the new groups."""
    nodes, knowledge = nodes_in(graph), Knowledge()
    wanted = [_is_scalar_op(node, knowledge) for node in nodes]
    if sum(wanted) < _LEAST:
        return []
    maker = {key: i for i, node in enumerate(nodes) for key in ids(outputs(node))}
    held = Effects(graph).order(nodes)
    items = [_item(node, wanted[i], maker, held.get(i, ())) for i, node in enumerate(nodes)]
    found = [members for members in clusters(items, horizontal=False) if len(members) >= _LEAST]
    pieces = arrange(items, found) if found else None
    if pieces is None:
        return []
    reorder(graph, [nodes[i] for piece in pieces for i in piece])
    return [Group(outline(graph, [nodes[i] for i in members]), written=False) for members in found]


def _is_scalar_op(node: Node, knowledge: Knowledge) -> bool:
    found = row_of(node)
    if found is None or found[0].is_view or effect(node) != PURE or draws(node):
        return False
    verdict = examine(node, knowledge, options.state.skip_kinds)
    return verdict.reason is None and verdict.loose


def _item(node: Node, fusible: bool, maker: dict[int, int], held: Iterable[int]) -> Item:
    """`held`: the positions that must come before for the sake of effects."""
    read = operands(node)
    after = tuple(sorted({*held, *(maker[key] for key in ids(read) if key in maker)}))
    if not fusible:
        return Item(after)
    makes = tuple((v.unique(), use_count(v)) for v in outputs(node))
    return Item(after, "cpu", False, tuple(v.unique() for v in read if not is_constant(v)), makes)
