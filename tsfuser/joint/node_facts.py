"""Facts of one node of a joint graph: what it reads the elements of, what it may give a view of.

Example: `aten::size(%x, %0)` reads no elements, and is free; `aten::t(%x)` gives a view of %x.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..graph.effects import may_return_operand
from ..graph.rows import row_of
from ..graph.worth import shape
from ..graph.wrapper import LIST, Node, Value, facts, inputs, is_tensor, outputs, schema
from ..ops import without_row

UNPACK, PARAM = "prim::ListUnpack", "prim::Param"


def viewed(node: Node) -> Value | None:
    """The value of which the node may give a view, or which it may hand on; None if it makes something new.
    For an item of a list, that is the list."""
    if node.kind() == UNPACK or (node.inputsSize() and node.kind() != LIST and may_return_operand(node)):
        return node.inputsAt(0)
    return None


def root(value: Value) -> Value:
    """What the value may be a view of, or itself."""
    while (of := viewed(value.node())) is not None:
        value = of
    return value


def row_major(value: Value) -> bool | None:
    """Whether it was in the call that was seen; None where that is not known."""
    sizes, strides = shape(value)
    if sizes is None or strides is None:
        return None
    return torch.empty_strided(sizes, strides, device="meta").is_contiguous()


def _copies(node: Node) -> bool:
    """Whether a node that may give a view gave something new in the call that was seen."""
    found, operand, result = row_of(node), node.inputsAt(0), node.outputsAt(0)
    if found is None or not is_tensor(operand) or not is_tensor(result):
        return False
    if retypes(node):
        return True
    (sizes, strides), (wanted, steps) = shape(operand), shape(result)
    if sizes is None or wanted is None:
        return False
    if found[0].reshapes:
        return not _can_be_viewed(tuple(sizes), tuple(strides), tuple(wanted))
    if found[0].sizes == "first":
        return any(size != 1 and a != b for size, a, b in zip(sizes, strides, steps))
    return not found[0].is_view and sizes != wanted


def copies_input(node: Node) -> bool:
    """Whether a node that may give a view gave a copy in the call that was seen, as of the order of elements:
    of an input, of which eager saves the copy then."""
    return may_copy(node) and root(node.inputsAt(0)).node().kind() == PARAM and _copies(node)


def may_copy(node: Node) -> bool:
    """Whether the node gives a view, or a copy where memory has another order."""
    found = row_of(node)
    return found is not None and viewed(node) is not None and (found[0].reshapes or found[0].sizes == "first")


def retypes(node: Node) -> bool:
    """Whether a node that may give a view makes a tensor of another dtype or device, which is new."""
    found = row_of(node)
    if found is None or found[0].is_view:
        return False
    operand, result = node.inputsAt(0), node.outputsAt(0)
    if not is_tensor(operand) or not is_tensor(result):
        return False
    before, after = facts(operand.type()), facts(result.type())
    return (before.dtype, before.device) != (after.dtype, after.device)


@lru_cache(maxsize=4096)
def _can_be_viewed(sizes: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Torch takes .1 ms to say so; networks ask the same of each layer."""
    try:
        torch.empty_strided(sizes, strides, device="meta").view(wanted)
        return True
    except RuntimeError:
        return False


def is_free(node: Node) -> bool:
    if viewed(node) is not None:
        return not _copies(node)
    if any(map(is_tensor, outputs(node))):
        return False
    return node.kind().startswith("prim::") or not any(map(is_tensor, elements_read(node)))


def elements_read(node: Node) -> list[Value]:
    """The tensors of which the node reads more than sizes, dtype, device and layout; of lists that are made
    for it, the items."""
    if node.kind().startswith("prim::") or node.kind() in without_row.ASKS:
        return []
    its_schema = schema(node)
    names = its_schema.arguments if its_schema else ()
    unread = _unread(node, names)
    read = [v for i, v in enumerate(inputs(node)) if i >= len(names) or names[i] not in unread]
    items = [item for v in read for item in (inputs(v.node()) if v.node().kind() == LIST else [v])]
    return [v for v in items if v.type().kind() != "NoneType"]


def _unread(node: Node, names: Sequence[str]) -> set[str]:
    if node.kind() in without_row.LIKE_SELF:
        return {names[0]}
    if node.kind() in without_row.LIKE_SECOND:
        return {names[1]}
    found = row_of(node)
    return {found[0].asked, found[0].dtype_from} if found is not None else set()


def holds_tensors(value: Value) -> bool:
    """Whether it is a tensor, a list of tensors, or may be one."""
    type_ = value.type()
    while type_.kind() in ("ListType", "OptionalType"):
        type_ = type_.getElementType()
    return type_.kind() == "TensorType"
