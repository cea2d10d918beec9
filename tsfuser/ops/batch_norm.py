"""Batch normalisation, in and outside training.

In: a batch whose dim 1 counts the channels. Out: the batch with each channel's mean and variance taken out.
In training they come from the batch, and running statistics, where there are any, follow them in place
(Ioffe, Szegedy, Batch Normalization, 2015).
"""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import UINT8
from ..ir.fusion import Empty, Value
from .channels import (
    STATISTICS,
    check_channels,
    check_not_empty,
    check_pair,
    moved_towards,
    of_channels,
    scaled,
    scaled_by_running,
    statistics,
)
from .reduction import without
from .table import FLOATING, composite

_IN_TRAINING = tuple((name, "training") for name in STATISTICS)
#: cuDNN takes other dtypes, in one kernel; for these ATen starts several.
WITHOUT_CUDNN = ("bfloat16",)


def _in_memory(b: Builder, value: Value, input: Value, known_to_be_native: bool) -> Value:
    """The result `value` in the memory format that eager gives it: on the CPU and by cuDNN channels-last or
    row-major, else as `input` lies. Raises Refusal where that would depend on whether cuDNN takes the call.
    """
    if b.device == "cpu":
        return b.in_packed_format_of(value, input)
    if b.has_format(input):
        return b.in_format_of(value, input)
    if known_to_be_native:
        return b.like(value, input)
    raise Refusal(
        "a batch norm, perhaps cuDNN's, of a tensor that is neither contiguous nor channels-last, whose "
        "strides it might not keep"
    )


def _forward(
    b: Builder,
    input,
    weight,
    bias,
    running_mean,
    running_var,
    training: bool,
    momentum,
    eps,
    in_place: bool = True,
) -> tuple:
    """Result, and what eager saves for the derivative: mean and 1 / standard deviation, in training. Running
    statistics change, or their new values are further results."""
    saved = check_channels(b, input, (weight, bias), (running_mean, running_var))
    check_pair(running_mean, running_var)
    weight, bias = (of_channels(b, v, input) for v in (weight, bias))
    others = [d for d in range(len(input.dims)) if d != 1]
    if training:
        check_not_empty(b, input)
        mean, rstd, unbiased = statistics(b, input, others, eps)
        running = (
            []
            if running_mean is None
            else [(running_mean, "running_mean", mean), (running_var, "running_var", unbiased)]
        )
        moved = [moved_towards(b, name, old, now, momentum) for old, name, now in running]
        if in_place:
            for (old, _, _), new in zip(running, moved):
                b.update(old, new, counted=False)
    else:
        if running_mean is None:
            raise Refusal("batch_norm outside training without running statistics is an error in eager")
        mean, var = (of_channels(b, v, input) for v in (running_mean, running_var))
        rstd = b.pointwise("rsqrt_of_sum", (var, eps), input.dtype.register, name="rstd")
    native = weight is None or bias is None or len(input.dims) < 3
    scale = scaled if training else scaled_by_running
    result = _in_memory(
        b, scale(b, "batch_norm", input, mean, rstd, weight, bias, input.dtype), input, native
    )
    if not training and b.device == "cpu":
        return result, Empty(saved), Empty(saved)
    kept = (
        result,
        without(b, "mean", mean, others, False, saved),
        without(b, "rstd", rstd, others, False, saved),
    )
    return kept if in_place else (*kept, *moved)


@composite(
    "aten::batch_norm",
    dtypes=FLOATING,
    dtype_rule="first",
    sizes="first",
    writes=_IN_TRAINING,
    gradient="strict",
    slow_on_gpu=WITHOUT_CUDNN,
)
def batch_norm(
    b: Builder,
    input,
    weight,
    bias,
    running_mean,
    running_var,
    training: bool,
    momentum,
    eps,
    cudnn_enabled: bool,
) -> Value:
    """`(input - mean) / sqrt(var + eps) * weight + bias` with one mean and variance a channel, in training
    those of the batch"""
    return _forward(b, input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


@composite(
    "aten::native_batch_norm",
    dtypes=FLOATING,
    sizes=("first", "own", "own"),
    writes=_IN_TRAINING,
    without_gradient=(1, 2),
)
@composite("aten::_native_batch_norm_legit", "", "no_stats", dtypes=FLOATING, sizes=("first", "own", "own"))
def native_batch_norm(
    b: Builder,
    input,
    weight,
    bias,
    running_mean=None,
    running_var=None,
    training: bool = True,
    momentum=None,
    eps=None,
):
    """batch_norm; in training with the mean and 1 / standard deviation of each channel"""
    return _forward(b, input, weight, bias, running_mean, running_var, training, momentum, eps)


@composite(
    "aten::_native_batch_norm_legit_functional",
    dtypes=FLOATING,
    sizes=("first", "own", "own", "running_mean", "running_var"),
)
def native_batch_norm_functional(
    b: Builder, input, weight, bias, running_mean, running_var, training: bool, momentum, eps
):
    """native_batch_norm in training that leaves its operands alone; the new running statistics are results,
    too"""
    if not training:
        raise Refusal("new running statistics outside training")
    return _forward(
        b, input, weight, bias, running_mean, running_var, training, momentum, eps, in_place=False
    )


@composite("aten::_native_batch_norm_legit_no_training", dtypes=FLOATING, sizes=("first", "own", "own"))
def native_batch_norm_no_training(b: Builder, input, weight, bias, running_mean, running_var, momentum, eps):
    """native_batch_norm outside training"""
    return _forward(b, input, weight, bias, running_mean, running_var, False, momentum, eps)


_WITH_IMPLEMENTATION: dict[str, Any] = dict(
    dtypes=FLOATING,
    dtype_rule="first",
    sizes=("first", "own", "own", "own", "own"),
    writes=_IN_TRAINING,
    slow_on_gpu=WITHOUT_CUDNN,
)


@composite("aten::_batch_norm_impl_index", **_WITH_IMPLEMENTATION)
@composite("tsfuser::batch_norm", **_WITH_IMPLEMENTATION, without_gradient=(1, 2, 3, 4))
def batch_norm_impl_index(
    b: Builder,
    input,
    weight,
    bias,
    running_mean,
    running_var,
    training: bool,
    momentum,
    eps,
    cudnn_enabled: bool,
):
    """native_batch_norm, an empty reserve, and 0, which names the implementation"""
    return (
        *_forward(b, input, weight, bias, running_mean, running_var, training, momentum, eps),
        Empty(UINT8),
        0,
    )
