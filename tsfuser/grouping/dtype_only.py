"""Group outputs that are used only for their dtype: the group returns the dtype, an int, instead."""

from __future__ import annotations

import torch

from ..graph.cleanup import is_needed
from ..graph.effects import remove_dead_code
from ..graph.wrapper import Graph, Node, graph_outputs

_INT = torch._C.IntType.get()


def replace_dtype_only_outputs(graph: Graph, group: Node) -> None:
    """Turns those outputs of the group that serve `prim::dtype` alone into ints."""
    subgraph = group.g("Subgraph")
    found = False
    for i in reversed(range(group.outputsSize())):
        value = group.outputsAt(i)
        readers = [use.user for use in value.uses()]
        if not readers or any(n.kind() != "prim::dtype" for n in readers) or is_needed(subgraph, i):
            continue
        asked = subgraph.create("prim::dtype", [graph_outputs(subgraph)[i]], 1)
        asked.output().setType(_INT)
        subgraph.registerOutput(subgraph.appendNode(asked).output())
        number = group.addOutput()
        number.setType(_INT)
        for node in readers:
            node.output().replaceAllUsesWith(number)
            node.destroy()
        group.eraseOutput(i)
        subgraph.eraseOutput(i)
        found = True
    if found:
        remove_dead_code(subgraph)
