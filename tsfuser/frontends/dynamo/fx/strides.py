"""The ops that depend on the strides of their operands, not only on the elements.

In: a node of an FX graph. Out: whether it is such an op. `as_strided(x, [4], [2])` reads other elements if
`x` has other strides; a custom op may do anything with the strides that it sees. torch's inner kernels
(`_cudnn_rnn`) rely on the layout that their callers have given to the operands.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ....ops import table, without_row

#: Namespaces of ops that compute the same from operands of any strides, with the exceptions below.
_KNOWN = ("aten", "prims", "tsfuser")
#: How the names of ops begin that programs do not call themselves.
_INNER = ("aten::_", "aten::native_")


def reads_strides(node: fx.Node) -> bool:
    """Whether the node may read the strides of its operands, or where they begin in their memory. Ops from
    outside torch may; so may Python's functions, and ops that call others."""
    op = node.target
    if op is operator.getitem or not node.op.startswith("call_"):
        return False
    if not isinstance(op, torch._ops.OpOverload):
        return True
    if op.namespace not in _KNOWN:
        return True
    return is_one_of(without_row.READ_STRIDES, node) and not _is_bit_cast(node)


def _is_bit_cast(node: fx.Node) -> bool:
    """Whether the node reads each element as one of another dtype: other sizes of elements merge and split
    those that memory has side by side."""
    return (
        node.target is torch.ops.aten.view.dtype
        and node.args[0].meta["val"].itemsize == node.args[1].itemsize
    )


def relies_on_strides(node: fx.Node) -> bool:
    """Whether the node may give a wrong result for operands of other strides than the traced ones, though it
    does not show their strides: an inner kernel of torch; or an op that draws random numbers, in the order of
    the operand's elements in memory."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or is_view(node):
        return False
    name = op._schema.name
    if table.find(name, op._schema.overload_name) is not None or name in without_row.KEEP_LAYOUT:
        return False
    return name.startswith(_INNER) or torch.Tag.nondeterministic_seeded in op.tags


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares the memory of its first operand."""
    if node.target is operator.getitem:
        return is_view(node.args[0])
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def is_one_of(names: frozenset[str], node: fx.Node) -> bool:
    """Whether the node calls one of these ops, which have their overloads: "aten::view.dtype"."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() in names
