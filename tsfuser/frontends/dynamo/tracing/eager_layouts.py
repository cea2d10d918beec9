"""Ops whose traced strides are not those of torch's kernels: its fake kernels or decompositions are wrong.

In: the operands of such an op. Out: ops that give the same values, and that are traced with the strides that
eager has; NotImplemented if the op itself is. So what a program gets, and what reads strides, has eager's.
Example, of x with channels last, which `roll` keeps:

    roll(x, [1], [2])
becomes
    cat([slice(x, 2, n - 1, n), slice(x, 2, 0, n - 1)], 2)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.proxy_tensor import decompose

aten = torch.ops.aten


def _roll(x: Tensor, shifts, dims=()):
    """As eager's kernel makes it. Without dims, it rolls a dense copy."""
    if _is_traced_right(x) or not dims or len(dims) != len(shifts):
        return NotImplemented
    for shift, dim in zip(shifts, dims):
        size = x.size(dim)
        start = (size - shift) % size
        x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x


def _channel_shuffle(x: Tensor, groups: int):
    """Eager's kernel keeps channels_last."""
    kept = suggest_memory_format(x)
    if _is_traced_right(x) or kept == torch.contiguous_format or x.size(1) % groups != 0:
        return NotImplemented
    parts = x.unflatten(1, (groups, -1)).transpose(1, 2)
    return parts.flatten(1, 2).contiguous(memory_format=kept)


def _padded(pad: Any, x: Tensor, padding):
    """Eager's kernel keeps channels_last_3d."""
    kept = suggest_memory_format(x)
    if _is_traced_right(x) or kept == torch.contiguous_format:
        return NotImplemented
    with decompose({}):  # the op itself
        return pad(x, padding).contiguous(memory_format=kept)


def _pixel_shuffle(op: Any, x: Tensor, factor: int):
    """On the CPU alone, eager's kernels keep channels_last, as torch's decomposition does."""
    return NotImplemented if x.device.type == "cpu" else decomposition_table[op](x, factor).contiguous()


def _rrelu(x: Tensor, noise: Tensor, *args, **kwargs):
    """Eager's kernels give a dense result on the CPU and on CUDA."""
    if _is_usual(x):
        return NotImplemented
    with decompose({}):  # the op itself
        result, noise = aten.rrelu_with_noise_functional.default(x, noise, *args, **kwargs)
    return result.contiguous(), noise


def _is_traced_right(x: Tensor) -> bool:
    return x.device.type != "cpu" or _is_usual(x)


def _is_usual(x: Tensor) -> bool:
    return x.is_contiguous() or any(size == 0 for size in x.shape)


EAGER_LAYOUTS: dict[Any, Callable[..., Any]] = {
    aten.roll.default: _roll,
    aten.channel_shuffle.default: _channel_shuffle,
    **{pad: partial(_padded, pad) for pad in (aten.reflection_pad3d.default, aten.replication_pad3d.default)},
    **{op: partial(_pixel_shuffle, op) for op in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default)},
    aten.rrelu_with_noise_functional.default: _rrelu,
}
