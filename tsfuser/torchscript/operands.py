"""Operands of products of matrices, copied into the layout that the products read: by the group that makes them, and once for all products.

`aten::matmul` of tensors with batch dims copies an operand whose batch dims are not one walk through memory, such as the heads of an attention:
`view(n, t, h, d).transpose(1, 2)`. Each product makes that copy anew, slowly, and nothing is fused with it. Before:

    %k : BFloat16(8, 12, 64, 512, strides=[786432, 64, 1, 768]);  %s = aten::matmul(%q, %k)
becomes
    %r = aten::transpose(%k, -1, -2);  %c = aten::clone(%r, 0);  %m = aten::transpose(%c, -1, -2);  %s = aten::matmul(%q, %m)

In: a graph with types. Out: the same graph, with copies where the profiled strides ask for them, but of tensors that something in the graph may write to.
The result of a product does not depend on the strides of its operands, and other strides in a later call cost a copy, no more. The dim whose neighbours
are neighbours in memory stays so: products read either."""

from __future__ import annotations

from ..ops.casts import ROW_MAJOR
from .effects import Effects
from .graph import Graph, Node, Value, all_blocks, constant_of, inputs, insert, is_constant

PRODUCT = "aten::matmul"
_LEAST = 1 << 12  # elements of what is worth another kernel's launch


def pack_operands(graph: Graph) -> Graph:
    """Inserts the copies."""
    effects = None
    for block in all_blocks(graph):
        packed: "dict[int, Value]" = {}
        for node in [n for n in block.nodes() if n.kind() == PRODUCT and _are_batches(*inputs(n))]:
            for k, value in enumerate(inputs(node)):
                if not needs_copy(value):
                    continue
                effects = effects or Effects(graph)
                if not effects.is_written(value):
                    if value.unique() not in packed:
                        packed[value.unique()] = _packed(graph, node, value)
                    node.replaceInput(k, packed[value.unique()])
    return graph


def is_packing(node: Node) -> bool:
    """Whether the node copies a tensor, as it was profiled, into another layout: a group may do nothing else."""
    if node.kind() != "aten::clone" or not is_constant(node.inputsAt(1)) or constant_of(node.inputsAt(1)) != ROW_MAJOR:
        return False
    sizes, strides = _shape(node.inputsAt(0))
    return sizes is None or not _is_row_major(sizes, strides)


def _shape(value: Value) -> "tuple[list[int] | None, list[int] | None]":
    """Sizes and strides as they were profiled; None where one is not known."""
    sizes, strides = value.type().sizes(), value.type().strides()
    return (None, None) if sizes is None or strides is None else (sizes, strides)


def _is_row_major(sizes: "list[int]", strides: "list[int]") -> bool:
    step = 1
    for size, stride in reversed([pair for pair in zip(sizes, strides) if pair[0] != 1]):
        if stride != step:
            return False
        step *= size
    return True


def _are_batches(a: Value, b: Value) -> bool:
    """Whether both have the same batch dims."""
    first, second = _shape(a)[0], _shape(b)[0]
    return first is not None and second is not None and len(first) > 2 and first[:-2] == second[:-2]


def needs_copy(value: Value) -> bool:
    """Whether a product copies the operand (ATen/native/LinearAlgebra.cpp, `_matmul_impl` and `prepare_batch_matrix_for_cublas`)."""
    sizes, strides = _shape(value)
    count = 1
    for size in sizes:
        count *= size
    if count < _LEAST:
        return False
    (rows, columns), (down, along) = sizes[-2:], strides[-2:]
    if not (along == 1 and down >= columns or down == 1 and along >= rows):
        return True
    batch = [pair for pair in zip(sizes[:-2], strides[:-2]) if pair[0] != 1]
    return any(outer != size * inner for (_, outer), (size, inner) in zip(batch, batch[1:]))


def _packed(graph: Graph, place: Node, value: Value) -> Value:
    graph.setInsertPoint(place)
    sizes, (down, along) = _shape(value)[0], _shape(value)[1][-2:]
    turned = down < along and sizes[-2] > 1

    def turn(value: Value) -> Value:
        ends = [graph.insertConstant(d) for d in (-1, -2)]
        return insert(graph, place, "aten::transpose", [value, *ends]).output() if turned else value

    before = turn(value)
    copy = insert(graph, place, "aten::clone", [before, graph.insertConstant(ROW_MAJOR)]).output()
    after = turn(copy)
    graph.setInsertPoint(graph.return_node())
    return after
