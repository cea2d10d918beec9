"""Layout hints: `tsfuser::laid_out(%x, [0, 2, 1, 3])` asks a group to store %x with its dims in that order.

Outside a group the op returns its operand.
"""

from __future__ import annotations

from .wrapper import Graph, all_blocks, nodes_of

LAID_OUT = "tsfuser::laid_out"


def drop_layout_hints(graph: Graph) -> None:
    """Drops the hints that are in no group."""
    for block in all_blocks(graph):
        for node in nodes_of(block, (LAID_OUT,)):
            node.output().replaceAllUsesWith(node.inputsAt(0))
            node.destroy()
