"""The ops whose results depend on the strides of an operand, not only on its elements.

In: a node of an FX graph. Out: whether it is such an op, so that its operands must keep their layout.
Example: `as_strided(x, [4], [2])` reads other elements if `x` has other strides.
"""

from __future__ import annotations

import torch
from torch import fx

from ....ops import without_row


def reads_strides(node: fx.Node) -> bool:
    """Whether the node reads the strides of its operands, or where they begin in their memory."""
    return is_one_of(without_row.READ_STRIDES, node)


def is_one_of(names: frozenset[str], node: fx.Node) -> bool:
    """Whether the node calls one of these ops, which have their overloads: "aten::view.dtype"."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() in names
