"""Ops that do the same with the same operands are one: rules ask twice for the same, and so do programs.

In: a joint graph. Out: the same graph, and what has become what. Before:

    %a = aten::sin(%x);  %b = aten::sin(%x);  %y = aten::mul(%a, %b)
becomes
    %a = aten::sin(%x);  %y = aten::mul(%a, %a)

Two results of the graph, or what shares memory with them, stay two tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

import torch

from ..graph.effects import PURE, WRITES, draws, effect, secretly_written
from ..graph.wrapper import LIST, Node, Value, constant_of, inputs, is_constant, outputs, schema
from ..ops import without_row
from .reverse import Joint
from .roles import Roles

#: Tags of ops whose sizes or numbers differ from call to call.
_UNLIKE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def merge_equal_ops(joint: Joint, leave_results: bool = False) -> dict[int, int]:
    """By the number of a value that is gone, that of the one in its place. `leave_results`: what shares
    memory with a result is not read in the place of anything else."""
    roles = Roles(joint)
    returned = _roots(roles, (*roles.results, *roles.gradients))
    written = _roots(roles, [v for node in roles.nodes for v in secretly_written(node)])
    first: dict[Hashable, tuple[Node, bool]] = {}
    merged: dict[int, int] = {}
    for node in roles.nodes:
        if _writes(node):
            first.clear()
        if not _is_pure(node) or (written and not written.isdisjoint(_roots(roles, inputs(node)))):
            continue
        leaves = not returned.isdisjoint(_roots(roles, outputs(node)))
        if leaves and leave_results:
            continue
        known, its_leaves = first.setdefault(_what(node), (node, leaves))
        if known is node or (leaves and its_leaves):
            continue
        for old, new in zip(outputs(node), outputs(known)):
            merged[old.unique()] = new.unique()
            old.replaceAllUsesWith(new)
        if leaves:
            first[_what(known)] = known, True
        node.destroy()
    return merged


def _roots(roles: Roles, values: Sequence[Value]) -> frozenset[int]:
    return frozenset().union(*map(roles.roots, values))


def _writes(node: Node) -> bool:
    """Whether the node may write to anything. Ops of others say to what."""
    found = schema(node)
    if found is not None:
        return found.writes
    return node.kind().startswith("prim::") and effect(node) == WRITES


def _is_pure(node: Node) -> bool:
    """Whether the node's results depend on its operands only. Each reader of an allocation needs its own."""
    kind = node.kind()
    if kind == LIST or not outputs(node) or node.attributeNames():
        return False
    if kind.startswith("prims::"):
        found = schema(node)
        is_pure = found is not None and not found.writes
    else:
        is_pure = effect(node) == PURE and not draws(node)
    return is_pure and kind not in without_row.EMPTY and _is_alike_each_time(kind)


@cache
def _is_alike_each_time(kind: str) -> bool:
    space, _, name = kind.partition("::")
    packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
    overloads = packet.overloads() if packet is not None else ()
    return all(_UNLIKE.isdisjoint(getattr(packet, o).tags) for o in overloads)


def _what(node: Node) -> Hashable:
    """Equal for nodes that do the same with the same operands."""
    return node.kind(), len(outputs(node)), tuple(map(_key, inputs(node)))


def _key(value: Value) -> Hashable:
    """Equal for equal operands. `1`, `1.0` and `True` have different keys, and so have 0.0 and -0.0."""
    if is_constant(value):
        found = constant_of(value)
        return value.type().kind(), repr(tuple(found) if isinstance(found, list) else found)
    if value.node().kind() == LIST:
        return LIST, tuple(map(_key, inputs(value.node())))
    return value.unique()
