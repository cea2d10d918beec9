"""Instance normalisation: batch norm with statistics of each channel of each image.

In: a batch whose dim 1 counts the channels. Out: the batch with the mean and variance over all but the first
two dims taken out. Running statistics, where there are any, follow the means over the batch.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.fusion import Value
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
from .normalization import gradient
from .reduction import mean_of
from .table import FLOATING, composite


@composite(
    "aten::instance_norm",
    dtypes=FLOATING,
    sizes="first",
    writes=tuple((name, "use_input_stats") for name in STATISTICS),
    instead="(it knows layer_norm and batch_norm)",
    not_empty=True,
)
def instance_norm(
    b: Builder,
    input,
    weight,
    bias,
    running_mean,
    running_var,
    use_input_stats: bool,
    momentum,
    eps,
    cudnn_enabled: bool,
) -> Value:
    """`(input - mean) / sqrt(var + eps) * weight + bias`, the mean and variance being those over all but the
    first two dims, or running ones"""
    if len(input.dims) < 3:
        raise Refusal("instance_norm of less than 3 dimensions is an error in eager")
    check_channels(b, input, (weight, bias), (running_mean, running_var))
    check_pair(running_mean, running_var)
    check_not_empty(b, input)
    if use_input_stats:
        mean, rstd, unbiased = statistics(b, input, list(range(2, len(input.dims))), eps)
        if running_mean is not None:
            b.update(
                running_mean,
                moved_towards(b, "running_mean", running_mean, mean_of(b, mean, [0]), momentum),
                counted=True,
            )
            b.update(
                running_var,
                moved_towards(b, "running_var", running_var, mean_of(b, unbiased, [0]), momentum),
                counted=True,
            )
    else:
        if running_mean is None:
            raise Refusal("instance_norm without any statistics is an error in eager")
        mean, var = (of_channels(b, v, input) for v in (running_mean, running_var))
        rstd = b.pointwise("rsqrt_of_sum", (var, eps), input.dtype.register, name="rstd")
    weight, bias = (of_channels(b, v, input) for v in (weight, bias))
    scale = scaled if use_input_stats else scaled_by_running
    return b.contiguous(scale(b, "instance_norm", input, mean, rstd, weight, bias, input.dtype))


@composite(
    "tsfuser::instance_norm_backward",
    dtypes=FLOATING,
    sizes=("input", "weight", "bias"),
    not_empty=True,
)
def instance_norm_backward(b: Builder, grad_out, input, weight, bias, eps) -> tuple[Value | None, ...]:
    """The gradients of instance_norm without running statistics, by its operands alone"""
    if len(input.dims) < 3:
        raise Refusal("instance_norm of less than 3 dimensions is an error in eager")
    if grad_out.dtype is not input.dtype:
        raise Refusal(f"a gradient in {grad_out.dtype} of an instance_norm in {input.dtype}")
    check_channels(b, input, (weight, bias))
    check_not_empty(b, input)
    dims = list(range(2, len(input.dims)))
    mean, rstd, _ = statistics(b, input, dims, eps)
    hat = b.pointwise("normalize", (input, mean, rstd), input.dtype.register, name="normalized")
    scale = of_channels(b, weight, input)
    of_input = gradient(
        b, "instance_norm_backward", grad_out, hat, rstd, scale, dims, input.dtype, centered=True
    )
    of_weight = of_bias = None
    if weight is not None:
        product = b.pointwise("mul", (grad_out, hat), hat.dtype)
        of_weight = b.reduce("sum", "sum", product, [0, *dims], False, weight.dtype)
    if bias is not None:
        of_bias = b.reduce("sum", "sum", grad_out, [0, *dims], False, bias.dtype)
    return of_input, of_weight, of_bias
