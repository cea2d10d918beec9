"""Statistics of what the forward saves, not of what that was before it was rounded to 16 bits.

A group computes in float32, and rounds what it stores. If a norm in the same group read the value before
that, the backward, which reads the saved one, would take the mean of other numbers from it: `x - mean` would
be wrong by a rounding.

In: the forward of a cut. Out: the same, changed in place. Before:

    %x = aten::mul(%a, %b);  %y, %mean, %rstd = aten::native_layer_norm(%x, ...);  return (%y, %x, ...)
becomes
    %x = aten::mul(%a, %b);  %r = tsfuser::rounded(%x)
    %y, %mean, %rstd = aten::native_layer_norm(%r, ...);  return (%y, %x, ...)

What is not saved stays unrounded on both sides, which is nearer to the exact result.
"""

from __future__ import annotations

from ..graph.rows import row_of
from ..graph.wrapper import Node, Value, facts, graph_outputs, insert, is_tensor, outputs
from ..ir.dtypes import NARROW
from .divide import Cut

_NARROW = {dtype.name for dtype in NARROW}
_ROUNDED = "tsfuser::rounded"


def round_saved(parts: Cut) -> None:
    """Changes the forward."""
    made = graph_outputs(parts.forward)
    saved = {made[j].unique(): made[j] for j in parts.saved_outputs}
    for value in saved.values():
        if is_tensor(value) and facts(value.type()).dtype in _NARROW and row_of(value.node()) is not None:
            _round(parts, value)


def _round(parts: Cut, value: Value) -> None:
    readers = {use.user for use in value.uses() if _leads_to_statistics(use.user)}
    if readers:
        first = insert(parts.forward, value.node(), _ROUNDED, [value])
        first.moveAfter(value.node())
        first.output().setType(value.type())
        for reader in readers:
            reader.replaceInputWith(value, first.output())


def _leads_to_statistics(reader: Node) -> bool:
    """Whether reductions and norms depend on what the node computes, or are it, before anything stores it."""
    seen, waiting = set[Node](), [reader]
    while waiting:
        node = waiting.pop()
        row = row_of(node)
        if node in seen or row is None:
            continue
        if not (row[0].smooth or row[0].is_view):
            return True
        seen.add(node)
        waiting += [use.user for value in outputs(node) for use in value.uses()]
    return False
