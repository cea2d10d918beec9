"""A join of the operands of an earlier join, and more, reads that join's result.

In: a typed graph without writes, before it is differentiated. Out: the same, in place. Example:

    %x = aten::cat([%a, %b], 1);  ...;  %y = aten::cat([%a, %b, %c], 1)
    ->  %x = aten::cat([%a, %b], 1);  ...;  %y = aten::cat([%x, %c], 1)

DenseNet joins all results of a block anew for each of its layers: each of the tensors would have a gradient
of each layer, and a sum of its own. Now the gradients of all of them are added at once, in the same order.
"""

from __future__ import annotations

from ..graph.wrapper import LIST, Graph, Node, Value, constant_of, facts, inputs, is_constant, nodes_of

CAT = "aten::cat"


def nest_joins(graph: Graph) -> None:
    """Rewrites the joins; each reads the longest of those before it that it begins with."""
    joins: list[tuple[Node, list[Value]]] = []  # with the tensors that the program lists
    for node in nodes_of(graph, (CAT,)):
        if node.inputsAt(0).node().kind() != LIST or not is_constant(node.inputsAt(1)):
            continue
        tensors = inputs(node.inputsAt(0).node())
        earlier = [join for join in joins if _begins_with(node, tensors, *join)]
        joins.append((node, tensors))
        if earlier:
            join, some = max(earlier, key=lambda each: len(each[1]))
            items = graph.create(LIST, [join.output(), *tensors[len(some) :]], 1).insertBefore(node)
            items.output().setType(node.inputsAt(0).type())
            node.replaceInput(0, items.output())


def _begins_with(node: Node, tensors: list[Value], other: Node, some: list[Value]) -> bool:
    """Whether it joins the same tensors along the same dim, which have one dtype: an integer that is a float
    in the earlier result might have lost digits."""
    if not 1 < len(some) < len(tensors) or constant_of(node.inputsAt(1)) != constant_of(other.inputsAt(1)):
        return False
    if [v.unique() for v in tensors[: len(some)]] != [v.unique() for v in some]:
        return False
    dtypes = {facts(v.type()).dtype for v in some}
    return len(dtypes) == 1 and None not in dtypes
