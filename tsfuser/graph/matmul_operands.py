"""Operands of products of matrices, copied into the layout that the products read: by the group that makes
them, and once for all products.

`aten::matmul` of tensors with batch dims copies an operand whose batch dims are not one walk through memory,
such as the heads of an attention: `view(n, t, h, d).transpose(1, 2)`. Each product makes that copy anew,
slowly, and nothing is fused with it. Before:

    %k : BFloat16(8, 12, 64, 512, strides=[786432, 64, 1, 768]);  %s = aten::matmul(%q, %k)
becomes
    %m = tsfuser::packed(%k);  %s = aten::matmul(%q, %m)

`aten::linear` of such an operand, as of `transpose(0, 1)` of a batch, is a product for each of the batch,
with a weight that is read anew for each, and adds the bias by another kernel. Of a copy it is one product,
which adds the bias.

In: a graph with types. Out: the same graph, with copies where the profiled strides ask for them, but of
tensors that something in the graph may write to. The result of a product does not depend on the strides of
its operands, and other strides in a later call cost a copy, no more. Of the last two dims the one stays
inside whose neighbours are nearer in memory: products read either."""

from __future__ import annotations

from math import prod

from .effects import Effects
from .worth import LEAST, shape
from .wrapper import Graph, Node, Value, all_blocks, inputs, insert

PRODUCT, LINEAR, PACKED = "aten::matmul", "aten::linear", "tsfuser::packed"


def pack_operands(graph: Graph) -> Graph:
    """Inserts the copies."""
    effects = None
    if graph.findNode(PRODUCT, True) is None and graph.findNode(LINEAR, True) is None:
        return graph
    for block in all_blocks(graph):
        packed: dict[int, Value] = {}
        for node in list(block.nodes()):
            for k in _copied_operands(node):
                value = node.inputsAt(k)
                effects = effects or Effects(graph)
                if not effects.is_written(value):
                    if value.unique() not in packed:
                        packed[value.unique()] = insert(graph, node, PACKED, [value]).output()
                    node.replaceInput(k, packed[value.unique()])
    return graph


def _copied_operands(node: Node) -> list[int]:
    """Positions of the operands of which a product is made of a copy."""
    if node.kind() == PRODUCT and _are_batches(*inputs(node)):
        return [k for k, value in enumerate(inputs(node)) if needs_copy(value)]
    return [0] if node.kind() == LINEAR and _is_scattered(node.inputsAt(0)) else []


def _is_scattered(value: Value) -> bool:
    """Whether the rows of the tensor do not lie one behind another, and the elements of each do."""
    sizes, strides = shape(value)
    if sizes is None or len(sizes) < 3 or prod(sizes) < LEAST or strides[-1] != 1:
        return False
    return not _is_one_walk(sizes[:-1], strides[:-1])


def _is_one_walk(sizes: list[int], strides: list[int]) -> bool:
    """Whether dims of these sizes and strides could be one."""
    dims = [pair for pair in zip(sizes, strides) if pair[0] != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in zip(dims, dims[1:]))


def _are_batches(a: Value, b: Value) -> bool:
    """Whether both have the same batch dims."""
    first, second = shape(a)[0], shape(b)[0]
    return first is not None and second is not None and len(first) > 2 and first[:-2] == second[:-2]


def needs_copy(value: Value) -> bool:
    """Whether a product copies the operand (ATen/native/LinearAlgebra.cpp, `_matmul_impl` and
    `prepare_batch_matrix_for_cublas`)."""
    sizes, strides = shape(value)
    if prod(sizes) < LEAST:
        return False
    (rows, columns), (down, along) = sizes[-2:], strides[-2:]
    if not (along == 1 and down >= columns or down == 1 and along >= rows):
        return True
    return not _is_one_walk(sizes[:-2], strides[:-2])
