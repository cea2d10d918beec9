"""Values that the backward must not compute again, since they are compared with a saved result.

In: AOTAutograd's joint graph. Out: the same graph, in which some nodes are marked: those that
`graph/compared.py` finds. The partitioner then saves them, or something smaller that depends on them.
Example, the gradient of `y = exp(x); m = amax(y, [1], True)`: `y` is marked, and `eq(y, m)` is saved.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....graph.compared import Step, met_again
from ..fx.compared import compared_operands, is_elementwise, selects

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
