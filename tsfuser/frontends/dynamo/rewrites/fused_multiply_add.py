"""`prims.fma(a, b, c)`, a product and a sum that are rounded once, as ops of ATen that have rows.

TorchDynamo of torch 2.13 writes `addcmul_`, `addcdiv_` and `add_` with a `value` or an `alpha` so, as
optimizers call them. In: a node. Out: the same value, by an op whose kernel rounds once, too. Example:

    fma(mul(x, y), 0.5, c)
becomes, on the CPU, where eager's addcmul multiplies in this order,
    addcmul(c, x, y, value=0.5)
and, on CUDA, where it multiplies x by y first,
    add(c, mul(x, y), alpha=0.5)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..fx.insert import ORIGIN, Insert, is_alike

aten = torch.ops.aten

#: What TorchDynamo has taken apart: the op of the first factor -> the op of all.
_WHOLE = {aten.mul.Tensor: aten.addcmul.default, aten.div.Tensor: aten.addcdiv.default}


def as_aten(node: fx.Node) -> bool:
    """Replaces the node; always possible."""
    insert = Insert(before=node, like=node, kept=(*ORIGIN, "seq_nr"))
    made = _rounded_once(insert, *node.args) if _is_floating(node) else None
    if made is None or made.meta["val"].dtype != node.meta["val"].dtype or not _is_same(made, node):
        made = insert(aten.add.Tensor, insert(aten.mul.Tensor, *node.args[:2]), node.args[2])
    node.replace_all_uses_with(made)
    return True


def _rounded_once(insert: Insert, a: Any, b: Any, c: Any) -> fx.Node | None:
    if not (isinstance(a, fx.Node) and isinstance(c, fx.Node)):
        return None
    if not _is_floating(a) or not _is_floating(c):
        return None
    if isinstance(b, fx.Node) and isinstance(b.meta["val"], torch.Tensor):
        return insert(aten.addcmul.default, c, a, b) if _is_floating(b) else None
    whole = _WHOLE.get(a.target) if a.meta["val"].device.type == "cpu" and len(a.users) == 1 else None
    if whole is not None and all(isinstance(x, fx.Node) and _is_floating(x) for x in a.args):
        return insert(whole, c, *a.args, value=b)
    return insert(aten.add.Tensor, c, a, alpha=b)


def _is_floating(node: fx.Node) -> bool:
    found = node.meta.get("val")
    return isinstance(found, torch.Tensor) and found.dtype.is_floating_point


def _is_same(made: fx.Node, node: fx.Node) -> bool:
    return is_alike(made.meta["val"], node.meta["val"])
