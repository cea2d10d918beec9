"""The operands of products of matrices are saved in the layout that the products read.

A product needs rows that lie together in memory; a product of batches also needs batch dims that are one walk
through memory. A group that makes its operand in another layout, as of `transpose(0, 1)` or of the heads of
an attention, stores a copy for it (graph/matmul_operands.py). The products of the backward read the operand
again, and each would copy what was saved. Before:

    forward:  %h = aten::_autocast_to_reduced_precision(%x, ...);  %y = aten::linear(%h, %w, %b);  saves %h
after:
    forward:  ...;  %p = tsfuser::packed(%h);  %y = aten::linear(%p, %w, %b);  saves %p

In: `SavedValues` of a differentiable graph, and the outputs that are saved for the backward alone and not
computed there again. Out: its forward, changed in place. Of a saved tensor the backward needs only its
values, its sizes, and whether its matrices lie by rows or by columns, which the copy of a batch leaves as it
is. The pass that packs operands drops the copy where nothing would be copied."""

from __future__ import annotations

from collections.abc import Collection

from ....graph.matmul_operands import LINEAR, PACKED, PRODUCT
from ....graph.rows import row_of
from ....graph.wrapper import Node, Value, graph_outputs
from .saved import SavedValues, is_of_an_input


def save_rows(saved: SavedValues, dropped: Collection[int]) -> None:
    """Inserts the copies."""
    forward = saved.forward
    results = {value.unique() for value in graph_outputs(forward)[: saved.real]}
    for number, value, _ in list(saved.of_outputs()):
        if number < saved.real or number in dropped or row_of(value.node()) is None:
            continue
        if value.unique() in results:  # a backward raises if the program writes to it
            continue
        readers = _products(value)
        if readers:
            packed = forward.create(PACKED, [value], 1).insertAfter(value.node()).output()
            for reader, offset in readers:
                reader.replaceInput(offset, packed)
            forward.return_node().replaceInput(number, packed)


def _products(value: Value) -> list[tuple[Node, int]]:
    """The products that read the value, and where. For products of batches, an operand that the program may
    write to is saved unchanged."""
    found = [(use.user, use.offset) for use in value.uses()]
    batches = [] if is_of_an_input(value) else [(n, k) for n, k in found if n.kind() == PRODUCT]
    return [(n, k) for n, k in found if n.kind() == LINEAR and k == 0] + batches
