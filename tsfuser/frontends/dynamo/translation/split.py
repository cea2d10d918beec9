"""Cuts an FX graph around nodes that cannot be part of a torch._C.Graph.

In: a module, and those nodes. Out: a module of submodules, in the order of the nodes: pieces that can be
translated, and pieces with the nodes between them. Example: `a; b; f; c`, where f is Python's, gives three:
`a; b`, `f` and `c`.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from dataclasses import dataclass

from torch import fx
from torch.fx.passes.split_module import split_module


@dataclass
class Pieces:
    """`module` calls its submodules. Those in `names` have only nodes that can be translated."""

    module: fx.GraphModule
    names: frozenset[str]

    def translatable(self) -> Iterator[tuple[str, fx.GraphModule]]:
        """The pieces in `names`."""
        return (pair for pair in self._pieces() if pair[0] in self.names)

    def left(self) -> Iterator[tuple[str, fx.GraphModule]]:
        """The others."""
        return (pair for pair in self._pieces() if pair[0] not in self.names)

    def _pieces(self) -> Iterator[tuple[str, fx.GraphModule]]:
        for node in self.module.graph.find_nodes(op="call_module"):
            yield node.target, getattr(self.module, node.target)


def split(module: fx.GraphModule, foreign: Container[fx.Node]) -> Pieces:
    """The pieces, in the order of the graph."""
    piece: dict[fx.Node, int] = {}
    outside: set[int] = set()
    current = 0
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in piece:
            piece[node] = piece[node.args[0]]  # a tuple and its items are in one piece
            continue
        if (node in foreign) != (current in outside):
            current += 1
            if node in foreign:
                outside.add(current)
        piece[node] = current
    whole = split_module(module, module, lambda node: piece[node], keep_original_order=True)
    count = max(piece.values(), default=-1) + 1
    names = frozenset(f"submod_{k}" for k in range(count) if k not in outside)
    return Pieces(whole, names)
