"""Results of a differentiable graph that have no gradient in eager, though autodiff gives them one; and the
gradients of results that nobody reads.

In: the forward. Out: the numbers of its outputs that are statistics of `aten::native_batch_norm`, and of what
is computed of these alone. Example: 1 and 2 of

    %y, %mean, %rstd = aten::native_batch_norm(%x, ...);  %m = aten::mul(%mean, %2);  return (%y, %m, %rstd)

Autodiff writes the gradient of a result that has none as `prim::AutogradZero`. Of an op of several results:

    %z = prim::AutogradZero();  %g = prim::GradOf[name="aten::native_batch_norm"](%grad_y, %z, %z)

Torch cannot tell whether %g is zero then, and asks in each call. The branches that answer the question are
empty once the zeros of the graph are one, and its interpreter fails at them. So %z leaves the operands.
"""

from __future__ import annotations

from ....graph.rows import row_of
from ....graph.wrapper import Graph, Node, all_blocks, blocks, graph_outputs, inputs, nodes_in, outputs
from .saved import SavedValues


def still_outputs(forward: Graph) -> set[int]:
    """Such numbers, of what the program sees and of what is kept."""
    still: set[int] = set()
    for node in nodes_in(forward):
        found = row_of(node)
        if found is not None and found[0].without_gradient:
            still.update(node.outputsAt(k).unique() for k in found[0].without_gradient)
        elif still and _reads_only(node, still):
            still.update(value.unique() for value in outputs(node))
    return {j for j, value in enumerate(graph_outputs(forward)) if value.unique() in still}


def _reads_only(node: Node, still: set[int]) -> bool:
    """Whether the node reads some of `still`, and no other tensors."""
    given = [value for value in inputs(node) if "Tensor" in value.type().annotation_str]
    return bool(given) and all(value.unique() in still for value in given)


def leave_zeros(saved: SavedValues) -> None:
    """Takes gradients that are zero, and are not read, from the operands of derivatives."""
    zeros = saved.zeros()
    for node in saved.backward.findAllNodes("prim::GradOf", False):
        given = [value.unique() for value in inputs(node)]
        if zeros.intersection(given):
            unread = zeros - _read_inside(node)
            for k in reversed(range(len(given))):
                if given[k] in unread:
                    node.removeInput(k)


def _read_inside(node: Node) -> set[int]:
    return {
        value.unique()
        for block in blocks(node)
        for inner in all_blocks(block)
        for reader in (*nodes_in(inner), inner.returnNode())
        for value in inputs(reader)
    }
