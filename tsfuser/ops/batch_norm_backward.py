"""The derivatives of batch normalisation.

In: the gradient of the result, the operands, and the statistics that forward has used. Out: the gradients of
input, weight and bias: those of layer_norm with the sums over all dims but the channels. Also what the
derivative of a relu after the norm asks of the norm's operands.
"""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import HALF, DType
from ..ir.fusion import Empty, Value
from ..ir.symbols import CANCELS, define
from .batch_norm import WITHOUT_CUDNN
from .channels import check_channels, check_not_empty, of_channels, scaled
from .gradients import threshold_backward
from .reduction import total, without
from .table import FLOATING, composite

_GROWS = (CANCELS, 1, CANCELS, CANCELS, CANCELS, CANCELS)
define("batch_norm_backward", "(({0} - ({2} + {3} * {4}) * (1 / {5})) * {1})", cheap=True, grows=_GROWS)
define(
    "batch_norm_backward_weighted",
    "(({0} - ({2} + {3} * {4}) * (1 / {5})) * {1} * {6})",
    cheap=True,
    grows=(*_GROWS, 1),
)

_HALF_OF_SMALLEST = 2.0**-25  # of float16: what is not above that is rounded to 0


def _backward(
    b: Builder,
    grad: Value,
    input: Value,
    weight,
    mean: Value | None,
    rstd: Value | None,
    training: bool,
    mask: list,
    saved: DType,
) -> tuple:
    """The gradients of input, weight and bias that `mask` asks for."""
    register = input.dtype.register
    if grad.dtype is not input.dtype:
        raise Refusal(f"a gradient in {grad.dtype} of a normalisation in {input.dtype}")
    others = [d for d in range(len(input.dims)) if d != 1]
    hat = b.pointwise("normalize", (input, mean, rstd), register, name="normalized")
    slope = total(b, "sum", b.pointwise("mul", (grad, hat), register), others)
    shift = total(b, "sum", grad, others)
    gradients: list[Value | None] = [None, None, None]
    operands: tuple[Value | None, ...]
    if mask[0]:
        factor = [] if weight is None else [of_channels(b, weight, input)]
        if training:
            symbol, operands = "batch_norm_backward", (grad, rstd, shift, hat, slope, b.count(input, others))
        else:
            symbol, operands = "mul", (grad, rstd)
        symbol = {"mul": "product"}.get(symbol, f"{symbol}_weighted") if factor else symbol
        result = b.pointwise(symbol, (*operands, *factor), input.dtype, name="batch_norm_backward")
        # outside training eager's kernels leave it row-major (ATen/native/cuda/Normalization.cu)
        evaluates = not training and b.device != "cpu"
        gradients[0] = b.contiguous(result) if evaluates else b.in_format_of(result, input)
    dtype = saved if weight is None else weight.dtype
    if weight is None and b.device != "cpu" and (mask[1] or mask[2]):
        raise Refusal("gradients of parameters that are not there")
    if mask[1]:
        gradients[1] = without(b, "sum", slope, others, False, dtype)
    if mask[2]:
        gradients[2] = without(b, "sum", shift, others, False, dtype)
    return tuple(gradients)


@composite("aten::native_batch_norm_backward", dtypes=FLOATING, sizes=("input", "weight", "weight"))
def native_batch_norm_backward(
    b: Builder,
    grad_out,
    input,
    weight,
    running_mean,
    running_var,
    save_mean,
    save_invstd,
    train: bool,
    eps,
    output_mask: list,
):
    """The gradients of batch_norm that `output_mask` asks for"""
    kept = (save_mean, save_invstd) if train else (running_mean, running_var)
    if None in kept:
        raise Refusal("batch_norm's derivative without the statistics that it needs is an error in eager")
    # eager's CUDA kernel reads these in one dtype, whether it uses them or not
    together = (weight, running_mean, running_var) if b.device != "cpu" else (weight,)
    saved = check_channels(b, input, together, kept)
    mean, rstd = (of_channels(b, v, input) for v in kept)
    if not train:
        rstd = b.pointwise("rsqrt_of_sum", (rstd, eps), input.dtype.register, name="rstd")
    return _backward(b, grad_out, input, weight, mean, rstd, train, output_mask, saved)


_OF_IMPLEMENTATION: dict[str, Any] = dict(
    dtypes=FLOATING,
    sizes=("input", "weight", "weight"),
    slow_on_gpu=WITHOUT_CUDNN,
    ignored=("reservedSpace",),
)


@composite("aten::_batch_norm_impl_index_backward", **_OF_IMPLEMENTATION)
@composite("tsfuser::batch_norm_backward", **_OF_IMPLEMENTATION)
def batch_norm_impl_index_backward(
    b: Builder,
    impl_index: int,
    input,
    grad_output,
    weight,
    running_mean,
    running_var,
    save_mean,
    save_var_transform,
    train: bool,
    eps,
    output_mask: list,
    reservedSpace,
):
    """native_batch_norm_backward, also of cuDNN's result, which saves the same statistics"""
    if impl_index not in (0, 1):  # torch's own, cuDNN's
        raise Refusal("batch_norm's derivative belongs to another implementation")
    return native_batch_norm_backward(
        b,
        grad_output,
        input,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var_transform,
        train,
        eps,
        output_mask,
    )


@composite("tsfuser::relu_backward", dtypes=FLOATING)
def relu_backward(
    b: Builder,
    grad_output,
    result,
    impl_index: int,
    input,
    weight,
    bias,
    save_mean,
    save_invstd,
    training: bool,
) -> Value:
    """`result <= 0 ? 0 : grad_output`, of a relu behind a batch norm in training, whose operands and saved
    statistics say what `result` is"""
    register, kept = input.dtype.register, (save_mean, save_invstd)
    known = training and impl_index == 0 and None not in kept and all(v.dtype is register for v in kept)
    if not known:  # running statistics may have moved; another's arithmetic; statistics that are rounded
        return threshold_backward(b, grad_output, result, b.literal(0))
    mean, rstd, weight, bias = (of_channels(b, v, input) for v in (*kept, weight, bias))
    y = scaled(b, "batch_norm", input, mean, rstd, weight, bias, register)
    bound = b.literal(_HALF_OF_SMALLEST if input.dtype is HALF else 0.0)
    dtype = b.promote(grad_output, result)
    return b.like(
        b.pointwise("threshold_backward", (y, grad_output, bound), dtype, register, name="relu_backward"),
        result,
    )


def _is_computed_again(b: Builder, like: Value, weight: Value | None, training: bool) -> bool:
    """Whether the backward computes a batch norm's result again: in training, from the values that the norm
    has saved, unless these are rounded to 16 bits, as on the CPU beside parameters of 16 bits. Outside
    training the running statistics may have moved by then. csrc_stubs/torchscript/operators.cpp has the same
    rule."""
    exact = like.dtype.register
    return training and (
        b.device != "cpu" or like.dtype is exact or (weight is not None and weight.dtype is exact)
    )


@composite("tsfuser::kept_result", dtypes=FLOATING, fresh=False)
def kept_result(b: Builder, result, weight, training: bool) -> Value | Empty:
    """The `result` of a batch norm; nothing where `batch_norm_result` computes it again"""
    return Empty(result.dtype) if _is_computed_again(b, result, weight, training) else result


@composite("tsfuser::batch_norm_result", dtypes=FLOATING, sizes="input", fresh=False)
def batch_norm_result(
    b: Builder,
    kept,
    input,
    weight,
    bias,
    running_mean,
    running_var,
    save_mean,
    save_invstd,
    training: bool,
    eps,
) -> Value:
    """The result of a batch norm, in training computed again from its operands and saved statistics; else
    `kept`"""
    if not _is_computed_again(b, input, weight, training):
        return kept
    check_not_empty(b, input)
    mean, rstd, weight, bias = (of_channels(b, v, input) for v in (save_mean, save_invstd, weight, bias))
    y = scaled(b, "batch_norm", input, mean, rstd, weight, bias, input.dtype)
    return b.like(y, input)
