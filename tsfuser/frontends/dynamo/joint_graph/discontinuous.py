"""Values that the backward must not compute again, since they are compared with a saved result.

In: AOTAutograd's joint graph. Out: the same graph, in which some nodes are marked: those that
`graph/compared.py` finds. The partitioner then saves them, or something smaller that depends on them.
Example, the gradient of `y = exp(x); m = amax(y, [1], True)`: `y` is marked, and `eq(y, m)` is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....graph import compared
from ....graph.compared import Step, met_again
from ....ops import table, without_row
from ..fx.strides import is_view

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def save_compared(joint: fx.GraphModule, results: int) -> None:
    """Marks nodes, in their `meta`. The first `results` outputs are those of the forward."""
    nodes = list(joint.graph.nodes)
    returned = list(nodes[-1].args[0])
    forward, needed = (_ancestors(part) for part in (returned[:results], returned[results:]))
    at = {node: k for k, node in enumerate(nodes)}
    for k, reader in met_again([_step(node, at, node in needed) for node in nodes]):
        if not _is_again_as_a_whole(nodes[k], nodes[reader], forward):
            nodes[k].meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _step(node: fx.Node, at: dict[fx.Node, int], is_needed: bool) -> Step | None:
    if node.op != "call_function":
        return None
    operands = tuple(at[operand] for operand in node.all_input_nodes)
    jumps = tuple(at[operand] for operand in compared_operands(node)) if is_needed else ()
    return Step(operands, jumps, is_elementwise(node), selects(node))


def _ancestors(nodes: Iterable[object]) -> set[fx.Node]:
    """The nodes, and all on which they depend."""
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


# ---- checkpoints


def _is_again_as_a_whole(value: fx.Node, node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether a checkpoint has the backward compute again all that leads from the value to the node."""
    if not _is_again(value):
        return False
    leading = _ancestors([node]) & forward
    found, waiting = {value}, [value]
    while waiting:
        new = leading.intersection(waiting.pop().users) - found
        found |= new
        waiting += new
    return all(map(_is_again, found))


def _is_again(node: fx.Node) -> bool:
    """Whether a checkpoint computes the node again. torch saves those that a later checkpoint reads."""
    number = node.meta.get("ac_graph_id", 0)
    return (
        node.meta.get("recompute") in _AGAIN
        and not node.meta.get("has_backward_hook", False)
        and all(user.meta.get("ac_graph_id", number) <= number for user in node.users)
    )


# ---- facts of nodes


def compared_operands(node: fx.Node) -> list[fx.Node]:
    """The floating operands in which the node jumps."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    row = _row(node)
    found = node.meta.get("val")
    gives_whole_numbers = isinstance(found, torch.Tensor) and not _is_floating(node)
    if not (gives_whole_numbers or "rounding_mode" in node.kwargs or (row is not None and row.jumps)):
        return []
    given = zip(node.target._schema.arguments, node.args)
    operands = [a for argument, a in given if not argument.name.startswith("grad")]
    return [a for a in operands if isinstance(a, fx.Node) and _is_floating(a)]


def _row(node: fx.Node) -> table.Row | None:
    name, _, overload = node.target.name().partition(".")
    return table.find(name, overload)


def _is_floating(node: fx.Node) -> bool:
    found = node.meta.get("val")
    return isinstance(found, torch.Tensor) and (found.is_floating_point() or found.is_complex())


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on an element of each operand. True also of views."""
    if node.target is operator.getitem:
        return is_elementwise(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    row = _row(node)
    if row is not None:
        return compared.is_elementwise(row)
    return is_view(node) or torch.Tag.pointwise in node.target.tags


def selects(node: fx.Node) -> bool:
    """Whether elements of the result may be elements of an operand."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    row = _row(node)
    if row is not None:
        return compared.selects(row)
    return is_view(node) or node.target.name().partition(".")[0] in without_row.SELECTS
