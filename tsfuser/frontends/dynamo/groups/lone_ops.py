"""Equal ops that no group has taken are one launch, if kernels can be batched.

In: a typed graph with groups, before `make_batches`. Out: the same graph, where each of several equal
pointwise ops side by side is a group: `make_batches` puts them in one batch. Example: a step of plain SGD,
which is one op per parameter. Before and after, if there were more of them:

    %a = aten::add(%p, %g, %rate)          %a = prim::CudaFusionGroup(%p, %g)
    %b = aten::add(%q, %h, %rate)          %b = prim::CudaFusionGroup(%q, %h)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from .... import options
from ....graph.rows import Knowledge, row_of
from ....graph.wrapper import (
    Graph,
    Node,
    constant_of,
    facts,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
)
from ....grouping.groups import Group
from ....grouping.outline import outline
from ....grouping.support import examine
from .add_together import counts_calls
from .batched_launches import LEAST, moves

#: Op, device, dtype, constant arguments: what makes ops equal.
_Kind = tuple[str, str | None, str | None, str]


def group_lone_ops(graph: Graph, is_possible: Callable[[str], bool]) -> list[Group]:
    """Changes the graph's top block; returns the new groups. `is_possible`: as of `make_batches`."""
    knowledge, made = Knowledge(), []
    for nodes in _stretches(graph, knowledge, is_possible):
        alike: dict[_Kind, list[Node]] = {}
        for node in nodes:
            alike.setdefault(_kind(node), []).append(node)
        chosen = [node for found in alike.values() if len(found) >= LEAST for node in found]
        made += [Group(outline(graph, [node]), written=False) for node in chosen]
    return made


def _stretches(
    graph: Graph, knowledge: Knowledge, is_possible: Callable[[str], bool]
) -> Iterator[list[Node]]:
    """The lone ops of each stretch of nodes that are groups, constants, or such ops."""
    kinds = [_role(node, knowledge, is_possible) for node in nodes_in(graph)]
    for is_inside, found in itertools.groupby(zip(nodes_in(graph), kinds), lambda pair: pair[1] is not None):
        if is_inside:
            yield [node for node, kind in found if kind == "lone"]


def _role(node: Node, knowledge: Knowledge, is_possible: Callable[[str], bool]) -> str | None:
    if moves(node):
        return "other"
    found = row_of(node)
    if found is None or found[0].family != "pointwise" and found[0].sizes != "broadcast":
        return None
    verdict = examine(node, knowledge, options.state.skip_kinds)
    possible = verdict.reason is None and not verdict.loose and is_possible(verdict.device or "cpu")
    return "lone" if possible and not found[0].is_view and not counts_calls(node) else None


def _kind(node: Node) -> _Kind:
    known = facts(node.outputsAt(0).type())
    constants = [repr(constant_of(v)) if is_constant(v) else is_tensor(v) for v in inputs(node)]
    return node.kind(), known.device, known.dtype, str(constants)
