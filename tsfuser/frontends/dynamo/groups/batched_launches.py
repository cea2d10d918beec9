"""Batches: groups that do the same to different tensors, like those of an optimizer's parameters, become
neighbours in the graph with a common number. C++ launches their kernels when it reaches the last group of a
batch, one launch for all of them (csrc_stubs/group/waiting.h).

In: a typed graph with groups, none of which writes to its inputs yet. Out: the same graph, in which
neighbouring groups may be in another order. Before and after, if there were more of them:

    %a = prim::CudaFusionGroup_0(%x)        %a = prim::CudaFusionGroup_0[batch=0](%x)
    %c = prim::CudaFusionGroup_1(%a)        %b = prim::CudaFusionGroup_2[batch=0](%y)
    %b = prim::CudaFusionGroup_2(%y)        %c = prim::CudaFusionGroup_1(%a)

Nothing moves across a node that is neither a group, nor a constant, nor arithmetic of 0-dim tensors. So
the tensors that are in memory at one time grow by those that neighbouring groups read, at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from ....graph.effects import PURE, draws, effect
from ....graph.wrapper import (
    CONSTANT,
    GROUP,
    Block,
    Graph,
    Node,
    all_blocks,
    facts,
    inputs,
    is_tensor,
    outputs,
    schema,
)
from ....grouping.outline import reorder
from ....grouping.passes import operations

LEAST = 4  # groups in a batch: fewer are not worth kernels of their own

#: What the groups of a batch have in common: how many groups must run before them, their device, their ops.
_Kind = tuple[int, str, str]


def make_batches(graph: Graph, is_possible: Callable[[str], bool]) -> None:
    """Changes the graph. `is_possible`: whether kernels for a device can be batched."""
    numbers = itertools.count()
    for block in all_blocks(graph):
        order: list[Node] = []
        for stretch in _stretches(block):
            if len(stretch) < LEAST or not moves(stretch[0]):
                order += stretch
                continue
            groups = [node for node in stretch if node.kind() != CONSTANT]
            kinds = _kinds(groups)
            first = {kind: -k for k, kind in enumerate(reversed(kinds.values()))}
            groups.sort(key=lambda node: (kinds[node][0], first[kinds[node]]))
            order += [node for node in stretch if node.kind() == CONSTANT] + groups
            for kind, found in itertools.groupby(groups, kinds.__getitem__):
                _mark(list(found), kind, is_possible, numbers)
        reorder(block, order)


def _stretches(block: Graph | Block) -> Iterator[list[Node]]:
    """The block's nodes, cut into stretches of nodes that may move and of others."""
    for _, nodes in itertools.groupby(block.nodes(), moves):
        yield list(nodes)


def moves(node: Node) -> bool:
    """Whether it may change places with its neighbours."""
    if node.kind() == CONSTANT:
        return True
    return (node.kind() == GROUP or _is_scalar_op(node)) and effect(node) == PURE and not draws(node)


def _is_scalar_op(node: Node) -> bool:
    """Whether the op computes a 0-dim tensor of others, and of numbers: as an optimizer's count of steps. It
    is no view, which something else may write to."""
    found = schema(node) if node.kind().startswith("aten::") else None
    tensors = [v for v in (*inputs(node), *outputs(node)) if is_tensor(v)]
    known = all(facts(v.type()).rank == 0 for v in tensors)
    return found is not None and not found.aliases and node.outputsSize() == 1 and bool(tensors) and known


def _kinds(groups: list[Node]) -> dict[Node, _Kind]:
    """The kinds of neighbouring groups and ops. No group reads the result of another one of its kind."""
    level: dict[int, int] = {}
    kinds = {}
    for node in groups:
        own = max((level.get(v.unique(), 0) for v in inputs(node)), default=0)
        level.update((v.unique(), own + 1) for v in outputs(node))
        kinds[node] = own, device_of(node), operations(node.g("Subgraph")) if node.kind() == GROUP else ""
    return kinds


def device_of(group: Node) -> str:
    """The device of the group's tensors. "cpu" counts only if all of them are on the CPU."""
    found = [facts(v.type()).device for v in inputs(group) if is_tensor(v)]
    return next((device for device in found if device not in (None, "cpu")), "cpu")


def _mark(
    groups: list[Node], kind: _Kind, is_possible: Callable[[str], bool], numbers: Iterator[int]
) -> None:
    if kind[2] and len(groups) >= LEAST and is_possible(kind[1]):
        number = next(numbers)
        for node in groups:
            node.i_("batch", number)
