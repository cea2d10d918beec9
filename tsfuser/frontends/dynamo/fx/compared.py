"""What `graph/compared.py` asks of a node, here of one of an FX graph of ATen ops.

In: a node whose operands carry `meta["val"]`. Out: the facts of a `Step`. Example: `amax` selects, `exp` is
elementwise, and `eq(x, y)` compares both of its operands.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ....graph import compared
from ....ops import table, without_row
from .strides import is_view


def compared_operands(node: fx.Node) -> list[fx.Node]:
    """The floating operands in which the node jumps."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    row = _row(node)
    found = node.meta.get("val")
    gives_whole_numbers = isinstance(found, torch.Tensor) and not _is_floating(node)
    if not (gives_whole_numbers or "rounding_mode" in node.kwargs or (row is not None and row.jumps)):
        return []
    given = zip(node.target._schema.arguments, node.args)
    operands = [a for argument, a in given if not argument.name.startswith("grad")]
    return [a for a in operands if isinstance(a, fx.Node) and _is_floating(a)]


def _row(node: fx.Node) -> table.Row | None:
    name, _, overload = node.target.name().partition(".")
    return table.find(name, overload)


def _is_floating(node: fx.Node) -> bool:
    found = node.meta.get("val")
    return isinstance(found, torch.Tensor) and (found.is_floating_point() or found.is_complex())


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on an element of each operand. True also of views."""
    if node.target is operator.getitem:
        return is_elementwise(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    row = _row(node)
    if row is not None:
        return compared.is_elementwise(row)
    return is_view(node) or torch.Tag.pointwise in node.target.tags


def selects(node: fx.Node) -> bool:
    """Whether elements of the result may be elements of an operand."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    row = _row(node)
    if row is not None:
        return compared.selects(row)
    return is_view(node) or node.target.name().partition(".")[0] in without_row.SELECTS
