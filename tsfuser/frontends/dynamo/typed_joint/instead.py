"""What only the backward computes in another form: the result of a norm of its statistics, say.

In: a forward and a backward that torch has extracted of one joint graph, and two nodes of that of equal
numbers (`joint/divide.py`, `Written`). Out: the forward, which has the other of them. A node of the joint
graph has its name in both.

The forward's norm rounds its result to 16 bits where it is stored. The backward does not round what it
computes again: groups/roundings.py does so where that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from ..fx.recomputed import keep_name

_CAST = torch.ops.aten._to_copy.default


def compute_instead(forward: fx.GraphModule, pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Readers of the first of each pair read the second."""
    named = {node.name: node for node in forward.graph.nodes}
    for made, instead in pairs:
        old = named.get(made.name)
        if old is not None:
            new = _copied(instead, named)
            keep_name(old, new)
            old.replace_all_uses_with(new)
    if pairs:
        forward.graph.eliminate_dead_code()
        forward.graph.lint()
        forward.recompile()


def _copied(node: fx.Node, named: dict[str, fx.Node]) -> fx.Node:
    """The node in the other graph, copied there with all that leads to it."""
    if node.name not in named:
        operands = {operand: _copied(operand, named) for operand in node.all_input_nodes}
        last = max(operands.values())
        with last.graph.inserting_after(last):
            named[node.name] = last.graph.node_copy(node, operands.__getitem__)
    return named[node.name]


def keep_unrounded(backward: fx.GraphModule, made: Iterable[fx.Node]) -> None:
    """These are not rounded, where the backward computes them."""
    names = {node.name for node in made}
    for node in backward.graph.find_nodes(op="call_function", target=_CAST):
        if node.name in names:
            node.target = torch.ops.tsfuser.unrounded.default
            node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}
    backward.recompile()
