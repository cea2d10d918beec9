"""Gradients of products that the program does not get lie in memory as their operands.

In: a joint graph. Out: the same graph. Example: the keys of an attention are turned, so their gradient is
turned back, and what reads it would read it column by column:

    %g = tsfuser::matmul_backward_other(%q, %grad, None, %turned, False);  aten::mm(aten::t(%g), ...)
    ->  %g = tsfuser::matmul_backward_other(%q, %grad, None, %turned, True);  ...

Eager has that for matrices, not for batches of them; so it is not where the program may see it: a gradient of
the graph has the layout of the last product before it.
"""

from __future__ import annotations

from ..graph.matmul_operands import BACKWARD_OTHER, BACKWARD_SELF
from ..graph.wrapper import Graph, Node, Value, constant_before, facts, is_tensor, nodes_of, outputs
from ..ops.unsupported import heavy_kinds

_IN_LAYOUT = 4  # the number of the argument


def lay_out_gradients(graph: Graph) -> None:
    """Says so of each such gradient."""
    products = frozenset(heavy_kinds())
    for node in nodes_of(graph, (BACKWARD_SELF, BACKWARD_OTHER)):
        if not _may_be_seen(node.output(), graph.return_node(), products):
            node.replaceInput(_IN_LAYOUT, constant_before(graph, node, True))


def _may_be_seen(gradient: Value, end: Node, products: frozenset[str]) -> bool:
    """Whether the graph may return what has the layout of this gradient."""
    seen, waiting = set[int](), [gradient]
    while waiting:
        for user in [use.user for use in waiting.pop().uses()]:
            if user == end:
                return True
            made = [v for v in outputs(user) if _has_layout(v) and user.kind() not in products]
            waiting += [v for v in made if v.unique() not in seen]
            seen.update(v.unique() for v in made)
    return False


def _has_layout(value: Value) -> bool:
    return is_tensor(value) and facts(value.type()).rank not in (0, 1)
