"""Statistics of the values that the forward saves, not of these before they were rounded to 16 bits.

A group computes in float32, and rounds what it stores. If a norm in the same group read the value before
that, the backward, which reads the saved one, would take the mean of other numbers from it: `x - mean` would
be wrong by a rounding. Before, in a forward that saves %x:

    %x = aten::mul(%a, %b);  %y, %mean, %rstd = aten::native_layer_norm(%x, ...)
becomes
    %x = aten::mul(%a, %b);  %r = tsfuser::rounded(%x)
    %y, %mean, %rstd = aten::native_layer_norm(%r, ...)

In: the graph of a forward with types, and the values that it saves. Out: the same graph, changed in place.
What is not saved stays unrounded in forward and backward, which is nearer to the exact result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..ir.dtypes import NARROW
from .rows import row_of
from .wrapper import LIST, Graph, Node, Value, facts, insert, is_tensor, outputs

_MAY_BE_NARROW = {None, *(dtype.name for dtype in NARROW)}
_ROUNDED = "tsfuser::rounded"


def round_saved(graph: Graph, saved: Iterable[Value]) -> None:
    """Has reductions and norms read what is saved as it is saved. Where no dtype is known it may have 16
    bits: to round others changes nothing."""
    for value in {v.unique(): v for v in saved}.values():
        if (
            is_tensor(value)
            and facts(value.type()).dtype in _MAY_BE_NARROW
            and row_of(value.node()) is not None
        ):
            round_for(graph, value, leads_to_statistics)


def round_for(graph: Graph, value: Value, is_for: Callable[[Node], bool]) -> None:
    """Has those of its readers that `is_for` names read the value rounded; what stores it rounds it."""
    readers = {use.user for use in value.uses() if use.user.kind() != "prim::Return"}
    readers = {node for node in readers if is_for(node)}
    if readers:
        first = insert(graph, value.node(), _ROUNDED, [value])
        first.moveAfter(value.node())
        first.output().setType(value.type())
        for reader in readers:
            reader.replaceInputWith(value, first.output())


def leads_to_statistics(reader: Node) -> bool:
    """Whether the node is a reduction or norm, or one depends on its result before that is stored."""
    seen, waiting = set[Node](), [reader]
    while waiting:
        node = waiting.pop()
        row = row_of(node)
        if node in seen or (row is None and node.kind() != LIST):
            continue
        if row is not None and not (row[0].smooth or row[0].is_view):
            return True
        seen.add(node)
        waiting += [use.user for value in outputs(node) for use in value.uses()]
    return False
