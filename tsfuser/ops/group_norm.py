"""Group normalisation and its derivative: layer norm over each group of channels.

In: a batch [N, C, ...] and a number of groups. Out: each of the N * groups rows with its mean and variance
taken out, scaled by channel (Wu, He, Group Normalization, 2018). The axis of the channels is split into
groups and the channels of a group: strides say where each lies.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import DType
from ..ir.fusion import Value
from ..ir.views import merged, split, view
from .channels import check_channels, of_channels, scaled, statistics
from .normalization import gradient
from .reduction import squares, without
from .table import FLOATING, composite


def _split(b: Builder, value: Value | None, groups: int) -> Value | None:
    """[N, C, ...] as [N, groups, C / groups, ...]."""
    return None if value is None else split(b, value, 1, groups)


def _joined(b: Builder, value: Value, input: Value) -> Value:
    """The inverse, in the memory format that eager gives a result of `input`."""
    result = merged(b, value, 1, input.dims[1])
    return b.in_format_of(result, input) if b.device == "cpu" else b.contiguous(result)


def _checked(b: Builder, input: Value, *parameters: Value | None) -> DType:
    """The dtype of saved statistics."""
    saved = check_channels(b, input, parameters)
    if b.call.decide(sz.eq(sz.product(b.sizes(input)), 0)):
        raise Refusal("statistics of an empty batch")
    given = {v.dtype for v in parameters if v is not None}
    if given <= {input.dtype}:
        return input.dtype
    if b.device != "cpu":
        raise Refusal("a group_norm on CUDA whose parameters have another dtype is an error in eager")
    return saved


def _forward(
    b: Builder, input: Value, weight, bias, groups: sz.Size, eps: Value
) -> tuple[Value, Value, Value]:
    """Result, mean and 1 / standard deviation [N, groups]; the number of groups is part of the class."""
    saved, count = _checked(b, input, weight, bias), b.call.decide(groups)
    x, weight, bias = (
        _split(b, v, count) for v in (input, of_channels(b, weight, input), of_channels(b, bias, input))
    )
    dims = list(range(2, len(x.dims)))
    mean, summed = squares(b, x, dims)
    rstd = b.pointwise("rsqrt_of_mean", (summed, b.count(x, dims), eps), summed.dtype, name="rstd")
    result = _joined(b, scaled(b, "group_norm", x, mean, rstd, weight, bias, input.dtype), input)
    return result, without(b, "mean", mean, dims, False, saved), without(b, "rstd", rstd, dims, False, saved)


@composite(
    "aten::group_norm",
    dtypes=FLOATING,
    sizes="first",
    symbolic=("num_groups",),
    instead="(it knows layer_norm and batch_norm)",
    not_empty=True,
)
def group_norm(
    b: Builder, input, num_groups: sz.Size, weight=None, bias=None, eps=None, cudnn_enabled: bool = True
) -> Value:
    """`(input - mean) / sqrt(var + eps) * weight + bias` over groups of channels"""
    return _forward(b, input, weight, bias, num_groups, eps)[0]


def _check_sizes(b: Builder, input: Value, sizes: tuple[sz.Size, ...]) -> None:
    """The batch, channels and elements of a channel that a call names are those of `input`."""
    own = b.sizes(input)
    if not all(b.call.decide(sz.eq(x, y)) for x, y in zip(sizes, (own[0], own[1], sz.product(own[2:])))):
        raise Refusal("sizes that are not those of the batch are an error in eager")


@composite(
    "aten::native_group_norm",
    dtypes=FLOATING,
    sizes=("first", "own", "own"),
    symbolic=("N", "C", "HxW", "group"),
    not_empty=True,
)
def native_group_norm(
    b: Builder, input, weight, bias, N: sz.Size, C: sz.Size, HxW: sz.Size, group: sz.Size, eps
):
    """group_norm, the mean and 1 / standard deviation of each group"""
    _check_sizes(b, input, (N, C, HxW))
    return _forward(b, input, weight, bias, group, eps)


@composite(
    "aten::native_group_norm_backward",
    dtypes=FLOATING,
    sizes=("input", "weight", "weight"),
    symbolic=("N", "C", "HxW", "group"),
    not_empty=True,
)
def native_group_norm_backward(
    b: Builder,
    grad_out,
    input,
    mean,
    rstd,
    weight,
    N: sz.Size,
    C: sz.Size,
    HxW: sz.Size,
    group: sz.Size,
    output_mask: list,
):
    """The gradients of group_norm that `output_mask` asks for"""
    _check_sizes(b, input, (N, C, HxW))
    _checked(b, input, mean, rstd, weight)
    groups = b.call.decide(group)
    if weight is None and (output_mask[1] or output_mask[2]):
        raise Refusal("gradients of parameters that are not there")
    x = _split(b, input, groups)
    mean, rstd = (_of_groups(b, v, x) for v in (mean, rstd))
    parameters = tuple(weight.dtype if asked else None for asked in output_mask[1:])
    gradients = _gradients(b, grad_out, input, mean, rstd, weight, groups, parameters)
    return (gradients[0] if output_mask[0] else None, *gradients[1:])


@composite(
    "tsfuser::group_norm_backward",
    dtypes=FLOATING,
    sizes=("input", "weight", "bias"),
    symbolic=("num_groups",),
    not_empty=True,
)
def group_norm_backward(
    b: Builder, grad_out, input, num_groups: sz.Size, weight, bias, eps
) -> tuple[Value | None, ...]:
    """The gradients of group_norm, by its operands alone"""
    _checked(b, input, weight, bias)
    groups = b.call.decide(num_groups)
    x = _split(b, input, groups)
    dims = list(range(2, len(x.dims)))
    mean, rstd, _ = statistics(b, x, dims, eps)
    parameters = tuple(None if v is None else v.dtype for v in (weight, bias))
    return _gradients(b, grad_out, input, mean, rstd, weight, groups, parameters)


def _gradients(
    b: Builder,
    grad_out: Value,
    input: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    group: int,
    parameters: tuple[DType | None, ...],
) -> tuple[Value | None, ...]:
    """The gradients of the operand and of the parameters, of these dtypes, or None; `mean` and `rstd` stand
    beside the operand [N, groups, C / groups, ...]."""
    if grad_out.dtype is not input.dtype:
        raise Refusal(f"a gradient in {grad_out.dtype} of a group_norm in {input.dtype}")
    x, dy = _split(b, input, group), _split(b, grad_out, group)
    dims, outer = list(range(2, len(x.dims))), [0, *range(3, len(x.dims))]
    hat = b.pointwise("normalize", (x, mean, rstd), input.dtype.register, name="normalized")
    scale = _split(b, of_channels(b, weight, input), group)
    result = gradient(b, "group_norm_backward", dy, hat, rstd, scale, dims, input.dtype, centered=True)
    of_weight = of_bias = None
    if parameters[0]:
        product = b.pointwise("mul", (dy, hat), hat.dtype)
        of_weight = merged(b, b.reduce("sum", "sum", product, outer, False, parameters[0]), 0, input.dims[1])
    if parameters[1]:
        channels = [d for d in range(len(input.dims)) if d != 1]
        of_bias = b.reduce("sum", "sum", grad_out, channels, False, parameters[1])
    return _joined(b, result, input), of_weight, of_bias


def _of_groups(b: Builder, value: Value, x: Value) -> Value:
    """Statistics [N, groups] beside `x`."""
    if len(value.dims) != 2 or not all(
        b.call.decide(sz.eq(own, size)) for own, size in zip(b.sizes(value), b.sizes(x))
    ):
        raise Refusal("statistics that are not one a group are an error in eager")
    return view(b, "view", value, (*value.dims, *[None] * (len(x.dims) - 2)), [sz.const(1)] * len(x.dims))
