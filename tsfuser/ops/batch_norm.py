"""Batch and instance normalisation, in and outside training, and their derivatives.

In: a batch whose dim 1 counts the channels. Out: the batch with each channel's mean and variance taken out.
In training they come from the batch, and running statistics, where there are any, follow them in place: `r =
(1 - momentum) r + momentum s`, the variance with n - 1 (Ioffe, Szegedy, Batch Normalization, 2015). The
derivative is that of layer_norm with the sums over all dims but the channels.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import layout as lay
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BFLOAT16, BOOL, HALF, UINT8, DType
from ..ir.fusion import Empty, Value
from ..ir.symbols import define, find, rounded
from ..ir.views import placed
from .reduction import mean_of, squares, total, without
from .table import FLOATING, composite

define("normalize", "(({0} - {1}) * {2})", cheap=True)
define("rsqrt_of_sum", "rsqrt({0} + {1})")
define("rsqrt_of_mean", "rsqrt({0} * (1 / {1}) + {2})")
define("unbiased", "({0} / ({1} - 1))", cheap=True)
define("moved", "({1} * {2} + {0} * (1 - {2}))", cheap=True)
define("batch_norm_backward", "(({0} - ({2} + {3} * {4}) * (1 / {5})) * {1})", cheap=True)
define("batch_norm_backward_weighted", "(({0} - ({2} + {3} * {4}) * (1 / {5})) * {1} * {6})", cheap=True)
define("is_above_zero", "({0} > 0)", cheap=True)
define("rounds_above_zero", "({0} > 0.5f * 5.9604644775390625e-08f)", cheap=True)
#: Whether there are a weight and a bias -> symbol.
_NORMALIZE = {
    (False, False): "normalize",
    (True, False): define("normalize_weight", "((({0} - {1}) * {2}) * {3})", cheap=True),
    (False, True): define("normalize_bias", "((({0} - {1}) * {2}) + {3})", cheap=True),
    (True, True): define("normalize_weight_bias", "(((({0} - {1}) * {2}) * {3}) + {4})", cheap=True),
}
for _symbol in _NORMALIZE.values():
    for _dtype in (HALF, BFLOAT16):
        define(f"{_symbol}_in_{_dtype}", rounded(find(_symbol).template(), _dtype), cheap=True)

_STATISTICS = ("running_mean", "running_var")
_IN_TRAINING = tuple((name, "training") for name in _STATISTICS)


def check_channels(b: Builder, input: Value, *sets: tuple[Value | None, ...]) -> DType:
    """The dtype of saved statistics. Each of `sets` holds parameters that eager's CUDA kernels read in one
    dtype: the operand's or, beside a 16-bit operand, float. On the CPU all have the same."""
    if len(input.dims) < 2:
        raise Refusal("a batch of less than 2 dimensions is an error in eager")
    register = input.dtype.register
    dtypes = [{v.dtype for v in one if v is not None} for one in sets]
    given = set().union(*dtypes)
    for found in [given] if b.device == "cpu" else dtypes:
        if not found <= {input.dtype} and found != {register}:
            names = ", ".join(sorted(map(str, found)))
            raise Refusal(f"a normalisation of {input.dtype} with parameters in {names}")
    if b.device != "cpu" and len(dtypes) > 1 and dtypes[0] == {register} and dtypes[1] - {register}:
        raise Refusal("cuDNN, which eager asks, wants running statistics in the dtype of the weight")
    return register if b.device != "cpu" or register in given else input.dtype


def of_channels(b: Builder, value: Value | None, input: Value) -> Value | None:
    """One number a channel, beside `input`, whose dim 1 counts the channels."""
    if value is None:
        return None
    if len(value.dims) != 1 or not b.call.decide(sz.eq(b.sizes(value)[0], b.sizes(input)[1])):
        raise Refusal("a parameter that has not one number a channel is an error in eager")
    return placed(b, value, 1, len(input.dims))


def scaled(b: Builder, name: str, x: Value, mean: Value, rstd: Value, weight, bias, dtype: DType) -> Value:
    """`(x - mean) * rstd * weight + bias`, of which the last two may be absent."""
    return b.pointwise(*_scaled(x, mean, rstd, weight, bias), dtype, name=name)


def _scaled(x: Value, mean: Value, rstd: Value, weight, bias) -> tuple[str, list[Value]]:
    """Symbol and operands of `scaled`."""
    operands = [v for v in (x, mean, rstd, weight, bias) if v is not None]
    return _NORMALIZE[weight is not None, bias is not None], operands


def _scaled_by_running(
    b: Builder, name: str, x: Value, mean: Value, rstd: Value, weight, bias, dtype: DType
) -> Value:
    """`scaled`, by running statistics: a 16-bit result is rounded here, as eager rounds it, and not only
    where it is stored. Running statistics of 0 and 1 make the factor 1 / sqrt(1 + eps). In 16 bits `x` times
    that is `x`; in float it is a little less, and where `x + y` lies halfway between two 16-bit numbers, as
    it often does, the sum would always be rounded towards 0. That makes a residual network smaller by 6e-4 a
    block."""
    symbol, operands = _scaled(x, mean, rstd, weight, bias)
    symbol = symbol if dtype.register is dtype else f"{symbol}_in_{dtype}"
    return b.pointwise(symbol, operands, dtype, name=name)


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


def _check_pair(running_mean, running_var) -> None:
    if (running_mean is None) != (running_var is None):
        raise Refusal("a running mean without a running variance, or the other way round")


def _check_not_empty(b: Builder, input: Value) -> None:
    if b.call.decide(sz.eq(sz.product(b.sizes(input)), 0)):
        raise Refusal("statistics of an empty batch")


def _statistics(b: Builder, input: Value, dims: list[int], eps: Value) -> tuple[Value, Value, Value]:
    """Mean, 1 / standard deviation and unbiased variance over `dims`, which stay as size 1."""
    mean, summed = squares(b, input, dims)
    rstd = b.pointwise("rsqrt_of_mean", (summed, b.count(input, dims), eps), summed.dtype, name="rstd")
    unbiased = b.pointwise("unbiased", (summed, b.count(input, dims)), summed.dtype, name="var")
    return mean, rstd, unbiased


def _moved(b: Builder, name: str, running: Value, now: Value, momentum: Value) -> Value:
    """Running statistics, one number a channel, moved towards `now`, whose dim 1 counts the channels and
    whose other dims are 1."""
    if momentum is None:
        raise Refusal("running statistics without a momentum")
    now = without(b, "view", now, [d for d in range(len(now.dims)) if d != 1], False, now.dtype)
    if len(running.dims) != 1 or not b.call.decide(sz.eq(b.sizes(running)[0], b.sizes(now)[0])):
        raise Refusal("running statistics that have not one number a channel are an error in eager")
    return b.pointwise("moved", (running, now, momentum), running.dtype, name=name)


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
    _check_pair(running_mean, running_var)
    weight, bias = (of_channels(b, v, input) for v in (weight, bias))
    others = [d for d in range(len(input.dims)) if d != 1]
    if training:
        _check_not_empty(b, input)
        mean, rstd, unbiased = _statistics(b, input, others, eps)
        running = (
            []
            if running_mean is None
            else [(running_mean, "running_mean", mean), (running_var, "running_var", unbiased)]
        )
        moved = [_moved(b, name, old, now, momentum) for old, name, now in running]
        if in_place:
            for (old, _, _), new in zip(running, moved):
                b.update(old, new, counted=False)
    else:
        if running_mean is None:
            raise Refusal("batch_norm outside training without running statistics is an error in eager")
        mean, var = (of_channels(b, v, input) for v in (running_mean, running_var))
        rstd = b.pointwise("rsqrt_of_sum", (var, eps), input.dtype.register, name="rstd")
    native = weight is None or bias is None or len(input.dims) < 3
    scale = scaled if training else _scaled_by_running
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


@composite("aten::batch_norm", dtypes=FLOATING, sizes="first", writes=_IN_TRAINING)
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


@composite("aten::native_batch_norm", dtypes=FLOATING, sizes=("first", "own", "own"), writes=_IN_TRAINING)
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


@composite(
    "aten::_batch_norm_impl_index",
    dtypes=FLOATING,
    sizes=("first", "own", "own", "own", "own"),
    writes=_IN_TRAINING,
)
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


# ---- derivatives


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
    if mask[0]:
        factor = [] if weight is None else [of_channels(b, weight, input)]
        if training:
            symbol, operands = "batch_norm_backward", (grad, rstd, shift, hat, slope, b.count(input, others))
        else:
            symbol, operands = "mul", (grad, rstd)
        symbol = {"mul": "product"}.get(symbol, f"{symbol}_weighted") if factor else symbol
        result = b.pointwise(symbol, (*operands, *factor), input.dtype, name="batch_norm_backward")
        # outside training eager's kernel for channels-last input is elementwise over the gradient
        # (ATen/native/cuda/Normalization.cu)
        over_gradient = not training and b.device != "cpu" and not lay.is_contiguous(b.call, b.layout(input))
        gradients[0] = b.like(result, grad) if over_gradient else b.in_format_of(result, input)
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


@composite(
    "aten::_batch_norm_impl_index_backward",
    dtypes=FLOATING,
    sizes=("input", "weight", "weight"),
    ignored=("reservedSpace",),
)
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
    """native_batch_norm_backward, of a result that says that it comes from there"""
    if impl_index != 0:
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


@composite("tsfuser::is_positive", dtypes=FLOATING, sizes="first")
def is_positive(
    b: Builder, result, impl_index: int, input, weight, bias, save_mean, save_invstd, training: bool
) -> Value:
    """Whether `result`, of a batch norm in training, is positive, from the norm's operands; the derivative of
    relu asks"""
    register, kept = input.dtype.register, (save_mean, save_invstd)
    known = training and impl_index == 0 and None not in kept and all(v.dtype is register for v in kept)
    if not known:  # running statistics may have moved; another's arithmetic; statistics that are rounded
        return b.pointwise("is_above_zero", (result,), BOOL, result.dtype, name="gt")
    mean, rstd, weight, bias = (of_channels(b, v, input) for v in (*kept, weight, bias))
    y = scaled(b, "batch_norm", input, mean, rstd, weight, bias, register)
    # below half of the smallest number it was rounded to 0
    symbol = "rounds_above_zero" if input.dtype is HALF else "is_above_zero"
    return b.like(b.pointwise(symbol, (y,), BOOL, register, name="gt"), result)


# ---- statistics of each channel of each image


@composite(
    "aten::instance_norm",
    dtypes=FLOATING,
    sizes="first",
    writes=tuple((name, "use_input_stats") for name in _STATISTICS),
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
    _check_pair(running_mean, running_var)
    _check_not_empty(b, input)
    if use_input_stats:
        mean, rstd, unbiased = _statistics(b, input, list(range(2, len(input.dims))), eps)
        if running_mean is not None:
            b.update(
                running_mean,
                _moved(b, "running_mean", running_mean, mean_of(b, mean, [0]), momentum),
                counted=True,
            )
            b.update(
                running_var,
                _moved(b, "running_var", running_var, mean_of(b, unbiased, [0]), momentum),
                counted=True,
            )
    else:
        if running_mean is None:
            raise Refusal("instance_norm without any statistics is an error in eager")
        mean, var = (of_channels(b, v, input) for v in (running_mean, running_var))
        rstd = b.pointwise("rsqrt_of_sum", (var, eps), input.dtype.register, name="rstd")
    weight, bias = (of_channels(b, v, input) for v in (weight, bias))
    scale = scaled if use_input_stats else _scaled_by_running
    return b.contiguous(scale(b, "instance_norm", input, mean, rstd, weight, bias, input.dtype))
