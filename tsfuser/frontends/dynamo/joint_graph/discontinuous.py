"""What is compared with a saved result must be that from which the result was computed.

In: AOTAutograd's joint graph. Out: the same graph, in which some nodes are marked: the backward must not
compute them again. A kernel of the backward may give a value another last bit than the kernel of the forward.
That matters where an op that jumps compares the value with a saved one that depends on it. Example, the
gradient of `y = exp(x); m = amax(y, [1], True)`:

    equal = eq(y, m);  gradient = where(equal, g / sum(equal, [1], True), 0)

`m` is saved. If the backward computed `y` again, perhaps no element of a row would be equal to `m`. So `y` is
marked. The partitioner then saves `y`, or something smaller that depends on it, as `equal`.

Marked are the last values on which both sides of a comparison depend. Any other op that jumps compares with a
number: the gradient of relu with 0. Its operand is equal to that number by more than chance only if an op
combines a value with elements of this value, as `y - m` does, or `y - relu(y)`. Then `y` is marked, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import combinations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....ops import table, without_row

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_ELEMENTWISE = ("activations", "arithmetic", "gradients", "joins", "paddings", "pointwise", "selection")


def save_compared(joint: fx.GraphModule, results: int) -> None:
    """Marks nodes, in their `meta`. The first `results` outputs are those of the forward."""
    nodes = list(joint.graph.nodes)
    returned = list(nodes[-1].args[0])
    forward, needed = (_ancestors(part) for part in (returned[:results], returned[results:]))
    jumping = {node: operands for node in nodes if node in needed and (operands := _compared(node))}
    if not jumping:
        return
    ways = _Ways(nodes, _lead_elementwise_to(jumping, nodes))
    for node in nodes:
        for value in ways.met_again(node, jumping.get(node, ())):
            if not _is_again_as_a_whole(value, node, forward):
                value.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _lead_elementwise_to(jumping: dict[fx.Node, list[fx.Node]], nodes: list[fx.Node]) -> set[fx.Node]:
    """The operands in which nodes jump, and what these depend on through elementwise nodes."""
    found = {operand for operands in jumping.values() for operand in operands}
    for node in reversed(nodes):
        if node in found and _is_elementwise(node):
            found.update(node.all_input_nodes)
    return found


class _Ways:
    """In what ways values reach nodes. A set of values is an int with a bit for each node, in order."""

    def __init__(self, nodes: list[fx.Node], leading: set[fx.Node]):
        self._nodes, self._leading = nodes, leading
        self._at = {node: k for k, node in enumerate(nodes)}
        count = len(nodes)
        self._any, self._elementwise, self._selected = [0] * count, [0] * count, [0] * count
        for k, node in enumerate(nodes):
            if node.op == "call_function":
                operands = [self._at[operand] for operand in node.all_input_nodes]
                own = 1 << k
                self._any[k] = own | _union(self._any, operands)
                reaching, selected = _union(self._elementwise, operands), _union(self._selected, operands)
                if _is_elementwise(node):
                    self._elementwise[k] = own | reaching
                    self._selected[k] = selected | (reaching if _selects(node) else 0)
                else:
                    self._elementwise[k] = own
                    self._selected[k] = reaching | selected if _selects(node) else 0

    def met_again(self, node: fx.Node, compared: Iterable[fx.Node]) -> list[fx.Node]:
        """The last values that reach the node on two ways that matter. It jumps in `compared`."""
        met = 0
        for a, b in combinations([self._at[operand] for operand in compared], 2):
            met |= self._any[a] & self._any[b]
        if node in self._leading:
            for a, b in combinations([self._at[operand] for operand in node.all_input_nodes], 2):
                met |= self._elementwise[a] & self._selected[b] | self._selected[a] & self._elementwise[b]
        return list(self._last(met, self._any[self._at[node]])) if met else []

    def _last(self, values: int, ways: int) -> Iterator[fx.Node]:
        """Those of the values that others on the ways read."""
        later = ways >> (values & -values).bit_length() << (values & -values).bit_length()
        readers = [self._nodes[k] for k in _members(later & ~values)]
        read = {self._at[operand] for reader in readers for operand in reader.all_input_nodes}
        return (self._nodes[k] for k in sorted(read) if values >> k & 1)


def _union(sets: list[int], members: Iterable[int]) -> int:
    found = 0
    for k in members:
        found |= sets[k]
    return found


def _members(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low


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


def _compared(node: fx.Node) -> list[fx.Node]:
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
    name, _, overload = node.target.name().partition(".")  # type: ignore[union-attr]
    return table.find(name, overload)


def _is_floating(node: fx.Node) -> bool:
    found = node.meta.get("val")
    return isinstance(found, torch.Tensor) and (found.is_floating_point() or found.is_complex())


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on an element of each operand. True also of views."""
    if node.target is operator.getitem:
        return _is_elementwise(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    row = _row(node)
    if row is not None:
        return row.smooth or row.is_view or row.family in _ELEMENTWISE
    return _is_view(node) or torch.Tag.pointwise in node.target.tags


def _is_view(node: fx.Node) -> bool:
    return any(r.alias_info is not None for r in node.target._schema.returns)  # type: ignore[union-attr]


def _selects(node: fx.Node) -> bool:
    """Whether elements of the result may be elements of an operand."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    row = _row(node)
    if row is not None:
        return row.selects or row.is_view or row.joins or row.family == "paddings"
    return _is_view(node) or node.target.name().partition(".")[0] in without_row.SELECTS
