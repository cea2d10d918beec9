"""Casts of the gradients of weights are batched: one launch runs several.

In: a backward's typed graph with groups, before `make_batches`. Out: the same graph, in which these groups
are neighbours, so that `make_batches` makes a batch of them. Such a group makes one result of the graph from
one tensor that is smaller and that nobody else reads. Under autocast each weight has one, a cast of its
gradient. Before and after, if there were more of them:

    %a = aten::mm(%g, %x)                 %a = aten::mm(%g, %x)
    %p = prim::CudaFusionGroup(%a)        %b = aten::mm(%h, %y)
    %b = aten::mm(%h, %y)                 %p = prim::CudaFusionGroup(%a)
    %q = prim::CudaFusionGroup(%b)        %q = prim::CudaFusionGroup(%b)

The tensors that wait are smaller than the results, and a batch makes no more than `_TOGETHER` bytes of
results. So the tensors that are in memory at the same time grow by less than that.
"""

from __future__ import annotations

from collections.abc import Callable

from ....graph.wrapper import GROUP, Graph, Node, inputs, is_tensor, outputs
from ....grouping.passes import operations
from .batched_launches import LEAST, device_of, moves
from .memory import bytes_of

_TOGETHER = 1 << 25  # about as much as distributed training sends at a time


def gather_casts(graph: Graph, is_possible: Callable[[str], bool]) -> None:
    """Changes the graph. `is_possible`: that of `make_batches`."""
    for part in _parts(graph, is_possible):
        for node in part[:-1] if len(part) >= LEAST else ():
            node.moveBefore(part[-1])


def _parts(graph: Graph, is_possible: Callable[[str], bool]) -> list[list[Node]]:
    """The groups of one kind that may wait for each other, in order."""
    parts: list[list[Node]] = []
    last: dict[tuple[str, str], list[Node]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for node in graph.nodes():
        if not _may_wait(node) or not is_possible(device_of(node)):
            continue
        kind = device_of(node), operations(node.g("Subgraph"))
        own = bytes_of(node.output())
        sizes[kind] = sizes.get(kind, _TOGETHER) + own
        if sizes[kind] > _TOGETHER:
            last[kind], sizes[kind] = [], own
            parts.append(last[kind])
        last[kind].append(node)
    return parts


def _may_wait(node: Node) -> bool:
    if node.kind() != GROUP or not moves(node) or len(inputs(node)) != 1 or len(outputs(node)) != 1:
        return False
    read, made = node.input(), node.output()
    if not is_tensor(read) or read.node().kind() == "prim::Param" or len(read.uses()) != 1:
        return False
    return all(u.user.kind() == "prim::Return" for u in made.uses()) and 0 < bytes_of(read) <= bytes_of(made)
