"""Bools beside tensors become ints, as TorchScript's scalars are no bools.

In: a node. Out: whether it has changed. Example:

    eq(mask, True)       becomes    eq(mask, 1)
    mul(mask, True)                 _to_copy(mul(mask, 1), dtype=bool)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..fx.insert import PART, Insert, evaluate

aten = torch.ops.aten

#: What they give for bools is what they give for ints, as bools.
_AS_INTS = {
    getattr(getattr(aten, name), overload)
    for name in ("add", "mul", "bitwise_and", "bitwise_or", "bitwise_xor")
    for overload in ("Tensor", "Scalar")
}
#: Eager rejects a bool, but not while it is traced. So it does for an `alpha`, unless the result is of bools.
_REJECTING = {aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar}


def without_bools(node: fx.Node) -> bool:
    """Changes the node unless it would give something else."""
    op, result = node.target, node.meta.get("val")
    if not isinstance(op, torch._ops.OpOverload) or not isinstance(result, torch.Tensor) or op in _REJECTING:
        return False
    given: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
    rejected = () if result.dtype == torch.bool else ("alpha",)
    bools = {p: x for p, x in given.items() if type(x) is bool and _may_be_number(op, p, rejected)}
    if not bools:
        return False
    _give(node, {place: int(x) for place, x in bools.items()})
    made = evaluate(node)
    if made.dtype == result.dtype:
        return True
    if result.dtype != torch.bool or op not in _AS_INTS:
        _give(node, bools)
        return False
    node.meta["val"] = made
    cast = Insert(before=node.next, like=node, kept=PART)(aten._to_copy.default, node, dtype=torch.bool)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return True


def _may_be_number(op: torch._ops.OpOverload, place: int | str, rejected: tuple[str, ...]) -> bool:
    """Whether the argument, of this position or name, is a tensor or a number, and no flag."""
    argument = next(a for k, a in enumerate(op._schema.arguments) if place in (k, a.name))
    type_ = argument.type
    if type_.kind() == "OptionalType":
        type_ = type_.getElementType()
    return type_.kind() in ("NumberType", "TensorType") and argument.name not in rejected


def _give(node: fx.Node, arguments: dict[Any, Any]) -> None:
    for place, value in arguments.items():
        if isinstance(place, int):
            node.update_arg(place, value)
        else:
            node.update_kwarg(place, value)
