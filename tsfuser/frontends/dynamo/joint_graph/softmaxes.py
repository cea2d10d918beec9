"""Results of softmax that the backward computes again, from the operand and two numbers per row.

In: AOTAutograd's joint graph. Between `expand` and `collapse` a softmax is written as elementwise ops and
reductions, and the partitioner may choose to compute them twice. It does so if the operand is cast to float32
only for the softmax, as under autocast: then 16 bits per element are saved instead of 32. So are those of a
teacher's logits, which get no gradient, but whose softmax the gradient of the loss reads. It does so, too, if
the operand is in memory in any case, as logits in 16 bits are, which a product has made. Before:

    y = _softmax(_to_copy(scores, float32), -1, False)
    _softmax_backward_data(g, y, -1, float32)
becomes in the forward, which saves `scores`, `largest` and `scale`,
    x = _to_copy(scores, float32); largest = amax(x); e = exp(x - largest)
    scale = reciprocal(sum(e)); y = e * scale
and in the backward
    _softmax_backward_data(g, exp(_to_copy(scores, float32) - largest) * scale, -1, float32)

If the backward still reads the result, `collapse` writes the forward as a softmax again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..fx.insert import Insert, is_alike

aten = torch.ops.aten

_RESULT = "tsfuser_result_of_softmax"  # in `meta`: the op, and its arguments after the operand
_EXACT = (torch.float32, torch.float64)  # dtypes in which statistics are not rounded to 16 bits
_NARROW = (torch.bfloat16, torch.float16)  # those to which log_softmax rounds once, at its end
_SOFTMAX, _LOG_SOFTMAX = aten._softmax.default, aten._log_softmax.default
_GRADIENTS = {
    _SOFTMAX: aten._softmax_backward_data.default,
    _LOG_SOFTMAX: aten._log_softmax_backward_data.default,
}


def reads_result(node: fx.Node) -> bool:
    """Whether the node is a gradient that reads the result of a softmax, and may compute it instead."""
    return node.target in _GRADIENTS.values()


def expand(joint: fx.GraphModule) -> None:
    """Writes softmaxes as elementwise ops and reductions."""
    for node in [n for n in joint.graph.nodes if n.target in _GRADIENTS]:
        if _is_known(node):
            _expand(node)
    joint.graph.eliminate_dead_code()
    joint.recompile()


def _is_known(node: fx.Node) -> bool:
    """Whether the result is not rounded to 16 bits, or a log_softmax, and rows are not empty."""
    x, dim, _ = node.args
    found = node.meta["val"]
    return (
        node.meta.get("recompute") is None
        and isinstance(x, fx.Node)
        and (found.dtype in _EXACT or (node.target is _LOG_SOFTMAX and found.dtype in _NARROW))
        and found.dim() > 0
        and statically_known_true(found.shape[dim] > 0)
    )


def _expand(node: fx.Node) -> None:
    x, dim, to_float = node.args
    dtype = node.meta["val"].dtype
    ops = Insert(node, node)
    wide = ops(aten._to_copy.default, x, dtype=torch.float32) if to_float or dtype in _NARROW else x
    shifted = ops(aten.sub.Tensor, wide, ops(aten.amax.default, wide, [dim], True))
    power = ops(aten.exp.default, shifted)
    total = ops(aten.sum.dim_IntList, power, [dim], True)
    if node.target is _SOFTMAX:
        made = ops(aten.mul.Tensor, power, ops(aten.reciprocal.default, total))
    else:
        made = ops(aten.sub.Tensor, shifted, ops(aten.log.default, total))
    if dtype in _NARROW:
        made = ops(aten._to_copy.default, made, dtype=dtype)
    if is_alike(made.meta["val"], node.meta["val"]):
        made.meta[_RESULT] = (node.target, dim, to_float)
        node.replace_all_uses_with(made)


def collapse(forward: fx.GraphModule) -> None:
    """Undoes `expand` in the forward for softmaxes that save only their result."""
    for made in [n for n in forward.graph.nodes if _RESULT in n.meta]:
        op, dim, to_float = made.meta[_RESULT]
        narrow = made.meta["val"].dtype in _NARROW
        wide, inside = _parts(made.args[0] if narrow else made, op)
        if any(user not in inside | {made} for node in inside - {made} for user in node.users):
            continue
        operand = wide.args[0] if to_float or narrow else wide
        with forward.graph.inserting_before(made):
            softmax = forward.graph.call_function(op, (operand, dim, to_float))
        softmax.meta = {k: v for k, v in made.meta.items() if k != _RESULT}
        made.replace_all_uses_with(softmax)
    forward.graph.eliminate_dead_code()
    forward.recompile()


def _parts(made: fx.Node, op: Any) -> tuple[fx.Node, set[fx.Node]]:
    """The operand of the ops that `_expand` has made, in the result's dtype, and all nodes from there to
    `made`."""
    shifted = made.args[0].args[0] if op is _SOFTMAX else made.args[0]
    wide, largest = shifted.args
    scale = made.args[1]
    total = scale.args[0]
    return wide, {made, scale, total, total.args[0], shifted, largest}
