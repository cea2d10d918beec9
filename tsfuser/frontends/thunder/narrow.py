"""16-bit ops put together again.

In: the FX graph of a region. Out: the same graph, each 16-bit op in one node. thunder takes `a * b` of
bfloat16 apart:

    up_a, up_b = a.to(float32), b.to(float32); product = up_a * up_b; down = product.to(bfloat16)

That is what torch's kernel of `a * b` does, result for result. As one node it is rounded like any other
16-bit value of a group: once, where it is stored, and not between two ops. A float op whose result has other
readers, or other operands than such casts, is no 16-bit op: a cast of it rounds, if it is not one that
roundings.py has found to be thunder's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_UNROUNDED = torch.ops.tsfuser.unrounded.default

_NARROW = (torch.float16, torch.bfloat16)
#: Ops that step to the next number of their dtype, of which float32 has more.
_STEPS = {aten.nextafter.default}


def narrow(module: fx.GraphModule) -> None:
    """Changes the module's graph."""
    graph = module.graph
    for down in list(graph.nodes):
        made = _whole(down) if _cast_to(down) in _NARROW else None
        if made is not None:
            down.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    module.recompile()


def _whole(down: fx.Node) -> fx.Node | None:
    """What is equal to the cast `down` without a value of float32 in between; None for no such cast."""
    dtype, wide = _cast_to(down), down.args[0]
    if _cast_to(wide) is torch.float32 and _dtype(wide.args[0]) is dtype:
        return wide.args[0]
    if not is_float_op(wide) or any(_cast_to(user) is not dtype for user in wide.users):
        return None
    operands = {operand: _operand(operand, dtype) for operand in wide.all_input_nodes}
    if None in operands.values() or dtype not in map(_dtype, operands.values()):
        return None
    with down.graph.inserting_before(down):
        op = down.graph.node_copy(wide, lambda operand: operands[operand])
    op.meta = dict(down.meta)
    return op


def _operand(operand: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """What a 16-bit op has in the place of this operand of a float op."""
    if _cast_to(operand) is torch.float32 and _dtype(operand.args[0]) is dtype:
        return operand.args[0]
    return operand if _dtype(operand) is torch.bool else None


def is_float_op(node: fx.Node) -> bool:
    """Whether each element of the node's float32 result depends on one element of each operand, and is not
    the next number of the dtype."""
    if node.target in _STEPS:
        return False
    return _dtype(node) is torch.float32 and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _cast_to(node: Any) -> torch.dtype | None:
    """The dtype that `node` casts to, where it does nothing else."""
    target = node.target if isinstance(node, fx.Node) else None
    if target is _UNROUNDED:
        return node.args[1]
    return node.kwargs["dtype"] if target is aten._to_copy.default and set(node.kwargs) == {"dtype"} else None


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None
