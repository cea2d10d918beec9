"""Results of norms that the backward computes again, from the norm's operand and statistics, which it reads
anyway.

In: AOTAutograd's joint graph, in which a norm returns its result, mean and 1 / standard deviation. Between
`expand` and `collapse` the result is written as elementwise ops, and the partitioner may choose to compute
them twice. Before:

    y, mean, rstd = native_layer_norm(x, [8], w, b, 1e-5);  silu(y)
    silu_backward(g, y);  native_layer_norm_backward(..., x, [8], mean, rstd, w, b)
becomes in the backward
    silu_backward(g, (x - mean) * rstd * w + b);  native_layer_norm_backward(..., x, [8], mean, rstd, w, b)
and in the forward, which no longer saves `y`, the norm stays as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..fx.insert import Insert, is_alike

aten = torch.ops.aten

_NORM, _RESULT = "tsfuser_norm", "tsfuser_result_of_norm"  # in `meta`: the number of a norm
_EXACT = (torch.float32, torch.float64)  # dtypes in which statistics are not rounded to 16 bits


class _Ops(Insert):
    """Inserts the ops that compute the result of a norm."""

    def scaled(self, x: fx.Node, mean: fx.Node | None, rstd: fx.Node, weight: Any, bias: Any) -> fx.Node:
        """`(x - mean) * rstd * weight + bias`. `mean`, `weight` and `bias` may be None."""
        y = x if mean is None else self(aten.sub.Tensor, x, mean)
        y = self(aten.mul.Tensor, y, rstd)
        y = y if weight is None else self(aten.mul.Tensor, y, weight)
        return y if bias is None else self(aten.add.Tensor, y, bias)

    def viewed(self, value: fx.Node | None, sizes: list[int]) -> fx.Node | None:
        return None if value is None else self(aten.view.default, value, sizes)


def _layer_norm(ops: _Ops, statistics: list[fx.Node], x, shape, weight=None, bias=None, eps=0) -> fx.Node:
    mean, rstd = statistics
    return ops.scaled(x, mean, rstd, weight, bias)


def _rms_norm(ops: _Ops, statistics: list[fx.Node], x, shape, weight=None, eps=0) -> fx.Node:
    (rstd,) = statistics
    return ops.scaled(x, None, rstd, weight, None)


def _batch_norm(ops: _Ops, statistics: list[fx.Node], x, weight, bias, *others) -> fx.Node:
    sizes = [1, -1, *[1] * (_dims(x) - 2)]
    return ops.scaled(x, *(ops.viewed(v, sizes) for v in (*statistics, weight, bias)))


def _group_norm(ops: _Ops, statistics: list[fx.Node], x, weight, bias, n, c, size, groups, eps):
    """Computes on [N, C, ...] viewed as [N, groups, C / groups, ...]. None if sizes vary."""
    _, channels, *rest = x.meta["val"].shape
    if not all(type(s) is int for s in (channels, *rest)):
        return None
    ones = [1] * len(rest)
    split = ops.viewed(x, [-1, groups, channels // groups, *rest])
    parameters = (ops.viewed(v, [1, groups, channels // groups, *ones]) for v in (weight, bias))
    y = ops.scaled(split, *(ops.viewed(v, [-1, groups, 1, *ones]) for v in statistics), *parameters)
    return ops.viewed(y, [-1, channels, *rest])


#: norm -> its gradient, how many statistics it gives, and what makes its result of them
_NORMS: dict[Any, tuple[Any, int, Callable[..., fx.Node | None]]] = {
    aten.native_layer_norm.default: (aten.native_layer_norm_backward.default, 2, _layer_norm),
    aten._fused_rms_norm.default: (aten._fused_rms_norm_backward.default, 1, _rms_norm),
    aten.native_group_norm.default: (aten.native_group_norm_backward.default, 2, _group_norm),
    aten._native_batch_norm_legit_functional.default: (
        aten.native_batch_norm_backward.default,
        2,
        _batch_norm,
    ),
}


#: Where norms and their gradients have the norm's operand.
_OPERAND = dict.fromkeys(_NORMS, 0) | {gradient: 1 for gradient, *_ in _NORMS.values()}


def operand_of(node: fx.Node) -> fx.Node | None:
    """The operand of a norm, also for the norm's gradient; None for other nodes."""
    return node.args[_OPERAND[node.target]] if node.target in _OPERAND else None


def is_gradient(node: fx.Node) -> bool:
    """Whether the node is the gradient of a norm."""
    return _OPERAND.get(node.target) == 1


def is_result(node: fx.Node) -> bool:
    """Whether the node replaces the result of a norm."""
    return _RESULT in node.meta


def drop_running_statistics(joint: fx.GraphModule) -> None:
    """Removes the running statistics from the operands of gradients of batch norms in training, which do not
    use them. Otherwise their new values would be saved, and would be more than updates of buffers. They stay
    if there is no weight: then eager's kernels take a dtype from them."""
    changed = False
    for node in joint.graph.nodes:
        if node.target is aten.native_batch_norm_backward.default and not node.kwargs:
            weight, training = node.args[2], node.args[7]
            if weight is not None and training is True and node.args[3:5] != (None, None):
                node.args = (*node.args[:3], None, None, *node.args[5:])
                changed = True
    if changed:
        joint.recompile()


def expand(joint: fx.GraphModule) -> None:
    """Writes the results of norms that have gradients in the graph as elementwise ops."""
    for number, node in enumerate([n for n in joint.graph.nodes if n.target in _NORMS]):
        gradient, count, make = _NORMS[node.target]
        items = {item.args[1]: item for item in node.users if item.target is operator.getitem}
        statistics = [items.get(k + 1) for k in range(count)]
        if 0 in items and _is_known(node, statistics, gradient):
            _expand(node, number, items[0], statistics, make)
    joint.graph.eliminate_dead_code()
    joint.recompile()


def _is_known(norm: fx.Node, statistics: list[fx.Node | None], gradient: Any) -> bool:
    """Whether the backward reads the norm's operand and unrounded statistics, and torch may save results."""
    x = norm.args[0]
    return (
        norm.meta.get("recompute") is None
        and not norm.kwargs
        and isinstance(x, fx.Node)
        and all(s is not None and s.meta["val"].dtype in _EXACT for s in statistics)
        and any(user.target is gradient and all(s in user.args for s in statistics) for user in x.users)
    )


def _expand(norm: fx.Node, number: int, result: fx.Node, statistics: list, make: Callable) -> None:
    ops = _Ops(max(result, *statistics).next, norm)
    made = make(ops, statistics, *norm.args)
    if made is not None and made.meta["val"].dtype != result.meta["val"].dtype:
        made = ops(aten._to_copy.default, made, dtype=result.meta["val"].dtype)
    if made is None or not is_alike(made.meta["val"], result.meta["val"]):
        return
    norm.meta[_NORM] = made.meta[_RESULT] = number
    result.replace_all_uses_with(made)
    if [user.target for user in made.users].count(aten.relu.default) == 1:
        _mask_by_operand(made)


def _mask_by_operand(result: fx.Node) -> None:
    """Makes the gradient of a relu read the relu's operand, a norm's result, whose sign is enough. So the
    result of the relu need not be saved. Not in float16: there a value above 0 may have been rounded to 0."""
    (relu,) = result.users if len(result.users) == 1 else (None,)
    if relu is None or result.meta["val"].dtype is torch.float16:
        return
    for user in list(relu.users):
        if user.target is aten.threshold_backward.default and user.args[1] is relu and user.args[2] == 0:
            user.update_arg(1, result)


def collapse(forward: fx.GraphModule) -> None:
    """Undoes `expand` in the forward."""
    norms = {n.meta[_NORM]: n for n in forward.graph.nodes if _NORM in n.meta and n.target in _NORMS}
    for made in [n for n in forward.graph.nodes if _RESULT in n.meta]:
        norm = norms.get(made.meta[_RESULT])
        if norm is not None:
            with forward.graph.inserting_after(norm):
                result = forward.graph.call_function(operator.getitem, (norm, 0))
            result.meta = {k: v for k, v in made.meta.items() if k != _RESULT}
            made.replace_all_uses_with(result)
    forward.graph.eliminate_dead_code()
    forward.recompile()


def keep_unrounded(backward: fx.GraphModule) -> None:
    """Removes the rounding to 16 bits of the results that the backward computes: the forward's norm rounds
    its result where it is stored, and groups/roundings.py does so here."""
    for made in backward.graph.nodes:
        if _RESULT in made.meta and made.target is aten._to_copy.default:
            made.target = torch.ops.tsfuser.unrounded.default
            made.args, made.kwargs = (made.args[0], made.kwargs["dtype"]), {}
    backward.recompile()


def _dims(node: fx.Node) -> int:
    return node.meta["val"].dim()
