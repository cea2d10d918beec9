"""Casts that make new tensors, as ops that always do.

`aten::to` may give its operand. So torch's alias analysis takes the cast of a parameter for memory that a
batch norm may write to, as its statistics could be that parameter; and no group holds it. In: a graph whose
dtypes are facts. Out: the same graph, changed in place. Before and after, of a float32 tensor:

    %c = aten::to(%bias, 15, 0, 0, None)    ->    %c = aten::_to_copy(%bias, 15, None, None, None, 0, None)
"""

from __future__ import annotations

from ..graph.wrapper import Graph, constant_before, inputs, insert, nodes_of, schema
from .node_facts import retypes

_CAST, _DTYPE = "aten::to", ["self", "dtype", "non_blocking", "copy", "memory_format"]


def write_as_copies(graph: Graph) -> None:
    """Those to another dtype, which is known."""
    for node in nodes_of(graph, (_CAST,)):
        found = schema(node)
        if found is not None and list(found.arguments) == _DTYPE and retypes(node):
            value, dtype, non_blocking, _, memory_format = inputs(node)
            nothing = constant_before(graph, node, None)
            operands = [value, dtype, nothing, nothing, nothing, non_blocking, memory_format]
            made = insert(graph, node, "aten::_to_copy", operands).output()
            made.setType(node.output().type())
            node.output().replaceAllUsesWith(made)
            node.destroy()
