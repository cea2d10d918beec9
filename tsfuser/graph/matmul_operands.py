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
which adds the bias. The backward's product with the weight, `aten::matmul` with a matrix, and `tsfuser::rows`
for the weight's gradient would each make the copy; so would the gradients of `matmul`, which are ops of ours
(csrc_stubs/torchscript/matmul_gradients.cpp). There the profiled strides of a gradient say little, since
another group may store it in another layout (training/gradient_layout.py). So what a group computes is
stored for them in the layout that they read, which costs nothing.

In: a graph with types. Out: the same graph, with copies where the profiled strides ask for them, but of
tensors that something in the graph may write to. The result of a product does not depend on the strides of
its operands, and other strides in a later call cost a copy, no more. Of the last two dims the one stays
inside whose neighbours are nearer in memory: products read either."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .effects import Effects, may_return_operand
from .functionalize import fresh_kinds
from .rows import row_of
from .worth import LEAST, shape
from .wrapper import (
    Graph,
    Node,
    Value,
    all_blocks,
    constant_before,
    constant_of,
    inputs,
    insert,
    is_constant,
    is_tensor,
    nodes_of,
)

PRODUCT, LINEAR, ROWS, PACKED = "aten::matmul", "aten::linear", "tsfuser::rows", "tsfuser::packed"
WITH_ROOM = "tsfuser::with_room"  # the same, with zeros behind it where a group stores it (operand_room.py)
#: The gradients of a product of two operands; the other operand and the gradient come first.
BACKWARD_SELF, BACKWARD_OTHER = "tsfuser::matmul_backward_self", "tsfuser::matmul_backward_other"
GRADIENTS = (BACKWARD_SELF, BACKWARD_OTHER)
#: Whose layout a gradient has: of the last two dims, a copy keeps the one inside that is inside.
_LIKE = 3
#: Products, and the same of operands that may have room, which may return a part of a larger tensor.
OF_ROOM = {
    PRODUCT: "tsfuser::product_of_room",
    BACKWARD_SELF: "tsfuser::backward_self_of_room",
    BACKWARD_OTHER: "tsfuser::backward_other_of_room",
}
PLAIN = {of_room: kind for kind, of_room in OF_ROOM.items()}
PRODUCTS = (*OF_ROOM, *PLAIN)


def pack_operands(graph: Graph) -> Graph:
    """Inserts the copies, and drops those that have nothing to copy."""
    effects = None
    if all(graph.findNode(kind, True) is None for kind in (*PRODUCTS, LINEAR)):
        return graph
    drop_copies(graph, (PACKED,))
    asked = [
        (number, node, k)
        for number, block in enumerate(all_blocks(graph))
        for node in block.nodes()
        for k in _copied_operands(node)
    ]
    blocks_of: dict[tuple, set[int]] = {}
    for number, node, k in asked:
        blocks_of.setdefault(_identity(node.inputsAt(k)), set()).add(number)
    packed: dict[tuple, Value] = {}
    for number, node, k in asked:
        value = node.inputsAt(k)
        effects = effects or Effects(graph)
        if effects.is_written(value):
            continue
        same = _identity(value)
        # readers in several blocks, as autodiff's formulas have them, read what stands before all of them
        maker = _maker(value)
        everywhere = len(blocks_of[same]) > 1 and maker.kind() != "prim::Param"
        place = same if everywhere else (number, *same)
        if place not in packed:
            made = _insert_behind(graph, maker, value) if everywhere else insert(graph, node, PACKED, [value])
            packed[place] = made.output()
            if not _is_scattered(value) and not needs_copy(value):
                packed[place].setType(value.type())
        node.replaceInput(k, packed[place])
    for number, block in enumerate(all_blocks(graph) if packed else ()):
        for node in nodes_of(block, (*GRADIENTS, *map(OF_ROOM.get, GRADIENTS))):
            same = _identity(node.inputsAt(_LIKE))
            copy = packed.get((number, *same), packed.get(same))
            if copy is not None and copy.node().isBefore(node):
                node.replaceInput(_LIKE, copy)
    return graph


def _is_repeated_cast(node: Node) -> bool:
    """Whether autocast makes the same cast for each product anew."""
    return node.kind().startswith("aten::_autocast_to_") and all(map(is_constant, inputs(node)[1:]))


def _identity(value: Value) -> tuple:
    """The same for the results of equal casts of one tensor."""
    cast = value.node()
    if not _is_repeated_cast(cast):
        return (value.unique(),)
    return (cast.kind(), cast.inputsAt(0).unique(), *map(constant_of, inputs(cast)[1:]))


def _maker(value: Value) -> Node:
    """The node that makes the value; for a repeated cast, the node that makes its operand."""
    return value.node().inputsAt(0).node() if _is_repeated_cast(value.node()) else value.node()


def _insert_behind(graph: Graph, maker: Node, value: Value) -> Node:
    """The copy of `value` right behind its `maker`, with a cast of its own where there is one."""
    copy = graph.create(PACKED, [value], 1).insertAfter(maker)
    if maker != value.node():
        constants = [constant_before(graph, copy, constant_of(v)) for v in inputs(value.node())[1:]]
        cast = insert(graph, copy, value.node().kind(), [value.node().inputsAt(0), *constants])
        cast.output().setType(value.type())
        copy.replaceInput(0, cast.output())
    return copy


def drop_copies(graph: Graph, kinds: Sequence[str] = (PACKED, WITH_ROOM)) -> None:
    """Drops copies, outside of groups, of tensors that were row-major already: their readers read these."""
    for block in all_blocks(graph):
        for node in nodes_of(block, kinds):
            value = node.inputsAt(0)
            if shape(value)[0] is not None and not is_copied(value):
                node.output().replaceAllUsesWith(value)
                node.destroy()


def is_copied(value: Value) -> bool:
    """Whether a product would read a copy of it, as its matrices or rows lie apart."""
    sizes, _ = shape(value)
    return sizes is not None and len(sizes) > 2 and (_is_scattered(value) or needs_copy(value))


def _copied_operands(node: Node) -> list[int]:
    """Positions of the operands that the product reads from a copy."""
    kind = PLAIN.get(node.kind(), node.kind())
    if kind in OF_ROOM:
        pair = inputs(node)[:2]
        if kind == BACKWARD_OTHER and _rank(node.inputsAt(3)) == 2:
            rows = [0, 1]  # the product sums over the batch
        elif are_batches(*pair):
            return [k for k, value in enumerate(pair) if needs_copy(value)]
        else:
            rows = [0] if _rank(pair[1]) == 2 else []
    else:
        rows = [0] if kind in (LINEAR, ROWS) else []
    return [k for k in rows if _is_scattered(node.inputsAt(k)) or _is_read_in_rows(node.inputsAt(k))]


def _rank(value: Value) -> int:
    """How many dims a tensor had; 0 where that is not known, or there is none."""
    return len(shape(value)[0] or ()) if is_tensor(value) else 0


def _is_read_in_rows(value: Value) -> bool:
    """Whether a product for a gradient reads the value, and a group can store it row by row."""
    readers = (PLAIN.get(use.user.kind(), use.user.kind()) for use in value.uses())
    return any(kind in (ROWS, BACKWARD_OTHER) for kind in readers) and _is_computed(value)


def _is_computed(value: Value) -> bool:
    """Whether the value is a tensor of some size that a group can compute, perhaps cast then."""
    sizes, _ = shape(value)
    if sizes is None or len(sizes) < 3 or prod(sizes) < LEAST:
        return False
    maker = value.node()
    while (found := row_of(maker)) and not found[0].is_view and may_return_operand(maker):
        maker = maker.inputsAt(0).node()
    return found is not None and maker.kind() in fresh_kinds()


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


def are_batches(a: Value, b: Value) -> bool:
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
