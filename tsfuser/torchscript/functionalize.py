"""Turns in-place ops into their functional forms, where no one can see the difference (behaviour.md 1.3).

Before: `y = x * 2; y += 1`. After: `y = x * 2; z = y + 1`. `x += 1` on a graph input stays: the caller sees
it."""

from __future__ import annotations

from .. import _C
from .effects import Effects
from .graph import Graph, all_blocks

KINDS = tuple(
    f"aten::{name}_"
    for name in """
        add sub mul div sigmoid tanh celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh
        leaky_relu prelu relu6 relu rrelu selu silu dropout
""".split()
)


def functionalize(graph: Graph) -> Graph:
    """Rewrites the in-place nodes of `KINDS` whose target is made in the graph and aliased by nothing else;
    torch's alias analysis decides. A graph about which that analysis is wrong is left alone."""
    kinds = frozenset(KINDS)
    wanted = any(node.kind() in kinds for block in all_blocks(graph) for node in block.nodes())
    if wanted and not Effects(graph).misled:
        _C.remove_tensor_mutation(graph, list(KINDS))
    return graph
