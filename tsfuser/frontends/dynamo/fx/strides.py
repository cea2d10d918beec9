"""The ops whose results depend on the strides of an operand, not only on its elements.

In: a node of an FX graph. Out: whether it is such an op, so that its operands must keep their layout.
Example: `as_strided(x, [4], [2])` reads other elements if `x` has other strides.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_OPS = frozenset(
    (
        aten.as_strided.default,
        aten._reshape_alias.default,
        aten.view.dtype,
        aten.sym_stride.int,
        aten.sym_storage_offset.default,
    )
)


def reads_strides(node: fx.Node) -> bool:
    """Whether the node reads the strides of its operands, or where they begin in their memory."""
    return node.target in _OPS
