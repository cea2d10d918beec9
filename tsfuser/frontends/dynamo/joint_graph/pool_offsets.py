"""Places of the largest elements of a max pooling, which the forward saves in 8 bits instead of 64.

In: AOTAutograd's joint graph. Out: the same graph, in which the backward reads the numbers of elements in
their windows, and sizes of the operand. Before:

    y, indices = max_pool2d_with_indices(x, [2, 2])
    max_pool2d_with_indices_backward(g, x, [2, 2], ..., indices)
or the same of `adaptive_max_pool2d`, to a size that divides that of x, becomes
    y, offsets = tsfuser::max_pool(x, [2, 2], ...)
    tsfuser::max_pool_backward(g, offsets, x's sizes, [2, 2], ...)

The gradient of a relu before it lets pass what reaches elements larger than 0. Only the largest element of a
window is reached, and that is its result. So the backward asks the result, which is smaller, and saved anyway
where a convolution reads it:

    threshold_backward(max_pool_backward(g, offsets, ...), x, 0)
becomes
    max_pool_backward(threshold_backward(g, y, 0), offsets, ...)

Each window's gradient reaches one element. So the sum over images, as of a convolution's bias, is that of the
windows' gradients:

    sum(max_pool_backward(g, offsets, ...), [0, 2, 3])   ->   sum(g, [0, 2, 3])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

from ....ops.pool_windows import has_windows
from ..fx.insert import PART, Insert, is_alike, size_of

aten = torch.ops.aten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GRADIENTS = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.adaptive_max_pool2d.default: aten.adaptive_max_pool2d_backward.default,
}


def save_offsets(joint: fx.GraphModule) -> None:
    """Changes the joint graph."""
    pools = [n for pool in _GRADIENTS for n in joint.graph.find_nodes(op="call_function", target=pool)]
    if not pools:
        return
    for node in pools:
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if {0, 1} == results.keys() and len(node.users) == 2:
            _change(node, results[0], results[1])
    joint.recompile()


def _change(node: fx.Node, values: fx.Node, indices: fx.Node) -> None:
    """Does nothing where others read the indices, or groups do not have such windows."""
    gradients, x = list(indices.users), node.args[0]
    if not gradients or not all(_is_gradient(user, node, indices) for user in gradients):
        return
    value, windows = x.meta["val"], _windows(node, gradients[0])
    if windows is None or not has_windows(windows[0], *windows[2:4]) or value.dtype not in _DTYPES:
        return
    if not gathers_well(value, windows[1]):
        return
    forward = Insert(node, node, PART)
    pooled = forward(torch.ops.tsfuser.max_pool.default, x, *windows)
    made, offsets = (forward(operator.getitem, pooled, k) for k in range(2))
    values.replace_all_uses_with(made)
    for gradient in gradients:
        sizes = [size_of(x, d) for d in range(value.dim())]
        arguments = (gradient.args[0], offsets, sizes, *windows)
        found = Insert(gradient, gradient, PART)(torch.ops.tsfuser.max_pool_backward.default, *arguments)
        gradient.replace_all_uses_with(found)
        _ask_results(found, x, made)
        _add_up_windows(found)
    for old in (*gradients, values, indices, node):
        node.graph.erase_node(old)


def _windows(node: fx.Node, gradient: fx.Node) -> tuple | None:
    """Sizes, steps, paddings and dilations of the windows, and whether they are rounded up; of a pooling to a
    given size None where that does not divide the tensor's, or sizes are not known."""
    if node.target is not aten.adaptive_max_pool2d.default:
        kernel, stride, padding, dilation = (_pair(words) for words in gradient.args[2:6])
        return kernel, stride or kernel, padding, dilation, gradient.args[6]
    sizes, parts = node.args[0].meta["val"].shape[-2:], _pair(node.args[1])
    if not all(type(n) is int and n > 0 for n in (*sizes, *parts)) or any(
        s % p for s, p in zip(sizes, parts)
    ):
        return None
    kernel = [s // p for s, p in zip(sizes, parts)]
    return kernel, kernel, [0, 0], [1, 1], False


def _ask_results(gradient: fx.Node, x: fx.Node, result: fx.Node) -> None:
    """Has a threshold behind the `gradient` of pooling `x` compare the results."""
    user = next(iter(gradient.users), None)
    if user is None or len(gradient.users) > 1 or user.target is not aten.threshold_backward.default:
        return
    if user.args[:2] == (gradient, x) and is_alike(gradient.meta["val"], user.meta["val"]):
        passed = Insert(gradient, gradient, PART)(user.target, gradient.args[0], result, user.args[2])
        gradient.args = (passed, *gradient.args[1:])
        user.replace_all_uses_with(gradient)
        user.graph.erase_node(user)


def _add_up_windows(gradient: fx.Node) -> None:
    """Has sums over images add up the gradients of windows."""
    rank = gradient.meta["val"].dim()
    for user in list(gradient.users):
        dims = user.args[1] if user.target is aten.sum.dim_IntList else None
        if dims and {rank - 2, rank - 1} <= {dim % rank for dim in dims}:
            user.replace_input_with(gradient, gradient.args[0])


def _is_gradient(user: fx.Node, node: fx.Node, indices: fx.Node) -> bool:
    """Whether the node is the gradient of that pooling, and lies in memory as its own gradient does."""
    expected = (_GRADIENTS[node.target], node.args[0], indices)
    if user.target is not expected[0] or (user.args[1], user.args[-1]) != expected[1:]:
        return False
    result, gradient = user.meta["val"], user.args[0].meta["val"]
    return suggest_memory_format(gradient) == suggest_memory_format(result)


def gathers_well(x: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether a group makes the gradient as fast as torch, which adds each window's to a place in memory. A
    CPU reads no vectors of bytes that lie apart, as do those of windows beside one another in rows, and many
    windows share an element where they do not skip any."""
    return x.device.type == "cuda" or (suggest_memory_format(x) is torch.channels_last and min(stride) > 1)


def _pair(words: Sequence[int]) -> list[int]:
    """The numbers for both dims."""
    return list(words) * 2 if len(words) == 1 else list(words)
