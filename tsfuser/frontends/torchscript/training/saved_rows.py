"""The operand of a linear layer is saved in the layout that its products read.

A linear layer reads rows that lie together in memory. A group that makes its operand in another layout, as of
`transpose(0, 1)`, stores a copy for it (graph/matmul_operands.py). The product of the backward, for the
weight's gradient, reads the rows again, and would copy what was saved. Before:

    forward:  %h = aten::_autocast_to_reduced_precision(%x, ...);  %y = aten::linear(%h, %w, %b);  saves %h
after:
    forward:  ...;  %p = tsfuser::packed(%h);  %y = aten::linear(%p, %w, %b);  saves %p

In: `SavedValues` of a differentiable graph, and the outputs that are saved for the backward alone and not
computed there again. Out: its forward, changed in place. The backward asks what is saved for its values and
sizes only. The pass that packs operands drops the copy where nothing would be copied."""

from __future__ import annotations

from collections.abc import Collection

from ....graph.matmul_operands import LINEAR, PACKED
from ....graph.rows import row_of
from .saved import SavedValues


def save_rows(saved: SavedValues, dropped: Collection[int]) -> None:
    """Inserts the copies."""
    forward = saved.forward
    results = {value.unique() for value in list(forward.outputs())[: saved.real]}
    for number, value, _ in list(saved.of_outputs()):
        if number < saved.real or number in dropped or row_of(value.node()) is None:
            continue
        if value.unique() in results:  # a backward raises if the program writes to it
            continue
        readers = [use.user for use in value.uses() if use.user.kind() == LINEAR and use.offset == 0]
        if readers:
            packed = forward.create(PACKED, [value], 1).insertAfter(value.node()).output()
            for reader in readers:
                reader.replaceInput(0, packed)
            forward.return_node().replaceInput(number, packed)
