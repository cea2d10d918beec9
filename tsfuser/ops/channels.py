"""What normalisations of channels share: batch, instance and group norm.

In: a batch whose dim 1 counts the channels, and parameters with one number a channel. Out: checks of these,
mean and variance, the scaled result, and running statistics that follow: `r = (1 - momentum) r + momentum s`,
the variance with n - 1. Example: `mean, rstd, unbiased = statistics(b, x, [0, 2, 3], eps)`.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import NARROW, DType
from ..ir.fusion import Value
from ..ir.symbols import define, find, rounded
from ..ir.views import placed
from .reduction import squares, without

define("normalize", "(({0} - {1}) * {2})", cheap=True)
define("rsqrt_of_sum", "rsqrt({0} + {1})")
define("rsqrt_of_mean", "rsqrt({0} * (1 / {1}) + {2})")
define("unbiased", "({0} / ({1} - 1))", cheap=True)
define("moved", "({1} * {2} + {0} * (1 - {2}))", cheap=True)
#: Whether there are a weight and a bias -> symbol.
_NORMALIZE = {
    (False, False): "normalize",
    (True, False): define("normalize_weight", "((({0} - {1}) * {2}) * {3})", cheap=True),
    (False, True): define("normalize_bias", "((({0} - {1}) * {2}) + {3})", cheap=True),
    (True, True): define("normalize_weight_bias", "(((({0} - {1}) * {2}) * {3}) + {4})", cheap=True),
}
for _symbol in _NORMALIZE.values():
    for _dtype in NARROW:
        define(f"{_symbol}_in_{_dtype}", rounded(find(_symbol).template(), _dtype), cheap=True)

STATISTICS = ("running_mean", "running_var")


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
    """`(x - mean) * rstd * weight + bias`; `weight` and `bias` may be None."""
    return b.pointwise(*_scaled(x, mean, rstd, weight, bias), dtype, name=name)


def _scaled(x: Value, mean: Value, rstd: Value, weight, bias) -> tuple[str, list[Value]]:
    """Symbol and operands of `scaled`."""
    operands = [v for v in (x, mean, rstd, weight, bias) if v is not None]
    return _NORMALIZE[weight is not None, bias is not None], operands


def scaled_by_running(
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


def check_pair(running_mean, running_var) -> None:
    if (running_mean is None) != (running_var is None):
        raise Refusal("a running mean without a running variance, or the other way round")


def check_not_empty(b: Builder, input: Value) -> None:
    if b.call.decide(sz.eq(sz.product(b.sizes(input)), 0)):
        raise Refusal("statistics of an empty batch")


def statistics(b: Builder, input: Value, dims: list[int], eps: Value) -> tuple[Value, Value, Value]:
    """Mean, 1 / standard deviation and unbiased variance over `dims`, which stay as size 1."""
    mean, summed = squares(b, input, dims)
    rstd = b.pointwise("rsqrt_of_mean", (summed, b.count(input, dims), eps), summed.dtype, name="rstd")
    unbiased = b.pointwise("unbiased", (summed, b.count(input, dims)), summed.dtype, name="var")
    return mean, rstd, unbiased


def moved_towards(b: Builder, name: str, running: Value, now: Value, momentum: Value) -> Value:
    """Running statistics, one number a channel, moved towards `now`, whose dim 1 counts the channels and
    whose other dims are 1."""
    if momentum is None:
        raise Refusal("running statistics without a momentum")
    now = without(b, "view", now, [d for d in range(len(now.dims)) if d != 1], False, now.dtype)
    if len(running.dims) != 1 or not b.call.decide(sz.eq(b.sizes(running)[0], b.sizes(now)[0])):
        raise Refusal("running statistics that have not one number a channel are an error in eager")
    return b.pointwise("moved", (running, now, momentum), running.dtype, name=name)
