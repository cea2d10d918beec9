"""Weights that autocast casts are cast together, if they are small or kept for the backward.

In: a forward's typed graph with groups, before `make_batches`. Out: the same graph, where each such cast,
which no group has taken, is a group at the front: `make_batches` puts them in one batch. Before and after, if
there were more of them:

    %c = aten::_to_copy(%w, ...)          %c = prim::CudaFusionGroup(%w)
    %y = aten::mm(%x, %c)                 %d = prim::CudaFusionGroup(%v)
    %d = aten::_to_copy(%v, ...)          %y = aten::mm(%x, %c)
    %z = aten::mm(%y, %d)                 %z = aten::mm(%y, %d)

A large weight that is let go once it is read, as in an inference, is cast where it is read.

TorchScript has an op of ours for this, with a backward of its own (csrc_stubs/torchscript/weight_casts.cpp
says why). Here forward and backward are a whole graph each, so that batches do it: they take the groups that
cast gradients, too (gradient_casts.py), whatever else these compute, and nothing has to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable

from .... import options
from ....graph.effects import may_return_operand
from ....graph.rows import Knowledge
from ....graph.wrapper import Graph, Node, Value, facts, inputs, outputs
from ....grouping.outline import outline
from ....grouping.support import examine
from .batched_launches import LEAST, device_of
from .memory import bytes_of

_CAST, _INPUTS = "aten::_to_copy", "prim::Param"
_SMALL = 1 << 14  # bytes, as of a bias


def cast_at_front(graph: Graph, is_possible: Callable[[str], bool]) -> list[Node]:
    """Changes the graph, and returns its new groups. `is_possible`: as of `make_batches`."""
    knowledge = Knowledge()
    casts: dict[tuple[str, str | None], list[Node]] = {}
    for node in graph.nodes():
        if _is_of_weight(node) and is_possible(device_of(node)):
            if examine(node, knowledge, options.state.skip_kinds).reason is None:
                kind = device_of(node), facts(node.output().type()).dtype
                casts.setdefault(kind, []).append(node)
    made = [outline(graph, [node]) for alike in casts.values() if len(alike) >= LEAST for node in alike]
    for group in made:
        group.moveBefore(next(iter(graph.nodes())))
    return made


def _is_of_weight(node: Node) -> bool:
    """Whether the node casts an input of the graph to fewer bits, and nothing is lost if it does so early."""
    if node.kind() != _CAST or inputs(node)[0].node().kind() != _INPUTS:
        return False
    old, new = inputs(node)[0].type().dtype(), node.output().type().dtype()
    if old is None or new is None or not old.is_floating_point or new.itemsize >= old.itemsize:
        return False
    return 0 < bytes_of(node.output()) <= _SMALL or _is_returned(node.output())


def _is_returned(value: Value) -> bool:
    """Whether the value leaves the graph, or a view of it does."""
    return any(
        use.user.kind() == "prim::Return"
        or (may_return_operand(use.user) and any(map(_is_returned, outputs(use.user))))
        for use in value.uses()
    )
