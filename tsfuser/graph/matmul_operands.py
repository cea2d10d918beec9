"""Operands of products of matrices, copied into the layout that the products read: by the group that makes
them, and once for all products.

`aten::matmul` of tensors with batch dims copies an operand whose batch dims are not one walk through memory,
such as the heads of an attention: `view(n, t, h, d).transpose(1, 2)`. Each product makes that copy anew,
slowly, and nothing is fused with it. Before:

    %k : BFloat16(8, 12, 64, 512, strides=[786432, 64, 1, 768]);  %s = aten::matmul(%q, %k)
becomes
    %m = tsfuser::packed(%k);  %s = aten::matmul(%q, %m)

In: a graph with types. Out: the same graph, with copies where the profiled strides ask for them, but of
tensors that something in the graph may write to. The result of a product does not depend on the strides of
its operands, and other strides in a later call cost a copy, no more. Of the last two dims the one stays
inside whose neighbours are nearer in memory: products read either."""

from __future__ import annotations

from math import prod

from .effects import Effects
from .wrapper import Graph, Node, Value, all_blocks, inputs, insert

PRODUCT, PACKED, COPY = "aten::matmul", "tsfuser::packed", "aten::clone"
_LEAST = 1 << 12  # elements of what is worth another kernel's launch


def pack_operands(graph: Graph) -> Graph:
    """Inserts the copies."""
    effects = None
    for block in all_blocks(graph):
        packed: dict[int, Value] = {}
        for node in [n for n in block.nodes() if n.kind() == PRODUCT and _are_batches(*inputs(n))]:
            for k, value in enumerate(inputs(node)):
                if not needs_copy(value):
                    continue
                effects = effects or Effects(graph)
                if not effects.is_written(value):
                    if value.unique() not in packed:
                        packed[value.unique()] = insert(graph, node, PACKED, [value]).output()
                    node.replaceInput(k, packed[value.unique()])
    return graph


def is_packing(node: Node) -> bool:
    """Whether the node copies a tensor into another layout, which torch is slow at: a group may do nothing
    else."""
    if node.kind() == COPY:
        strides = [_shape(value) for value in (node.inputsAt(0), node.output())]
        return None not in strides[0] + strides[1] and _walk(*strides[0]) != _walk(*strides[1])
    return node.kind() == PACKED


def _walk(sizes: list[int], strides: list[int]) -> list[int] | None:
    """The strides of dims of more than one element; None for a small tensor."""
    return [step for size, step in zip(sizes, strides) if size != 1] if prod(sizes) >= _LEAST else None


def _shape(value: Value) -> tuple[list[int] | None, list[int] | None]:
    """Sizes and strides as they were profiled; None where one is not known."""
    sizes, strides = value.type().sizes(), value.type().strides()
    return (None, None) if sizes is None or strides is None else (sizes, strides)


def _are_batches(a: Value, b: Value) -> bool:
    """Whether both have the same batch dims."""
    first, second = _shape(a)[0], _shape(b)[0]
    return first is not None and second is not None and len(first) > 2 and first[:-2] == second[:-2]


def needs_copy(value: Value) -> bool:
    """Whether a product copies the operand (ATen/native/LinearAlgebra.cpp, `_matmul_impl` and
    `prepare_batch_matrix_for_cublas`)."""
    sizes, strides = _shape(value)
    if prod(sizes) < _LEAST:
        return False
    (rows, columns), (down, along) = sizes[-2:], strides[-2:]
    if not (along == 1 and down >= columns or down == 1 and along >= rows):
        return True
    batch = [pair for pair in zip(sizes[:-2], strides[:-2]) if pair[0] != 1]
    return any(outer != size * inner for (_, outer), (size, inner) in zip(batch, batch[1:]))
