"""Normalisation by the root mean square, and its derivative.

In: rows over the last dims. Out: `x rstd w` with `rstd = 1 / sqrt(mean(x^2) + eps)` (Zhang, Sennrich, Root
Mean Square Layer Normalization, 2019). With `g = dy w` and `xh = x rstd`: `dx = rstd (g - xh mean(g xh))`,
`dw = sum(dy xh)`.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import DOUBLE, FLOAT
from ..ir.fusion import Value
from .normalization import gradient, inner, parameter_gradient
from .reduction import mean_of
from .table import FLOATING, composite

# numeric_limits<T>::epsilon(), where a row has no eps of its own
_EPSILON = {FLOAT: 2.0**-23, DOUBLE: 2.0**-52}


def _check_weight(input: Value, weight: Value | None) -> None:
    """Eager multiplies in the dtype of both, and rounds once, to that of the operand."""
    if weight is not None and weight.dtype.register is not input.dtype.register:
        raise Refusal(f"rms_norm of {input.dtype} with a weight in {weight.dtype}")


def _check_same(input: Value, weight: Value | None) -> None:
    """What the fused ops want, which eager takes for operands of one dtype only."""
    if weight is not None and weight.dtype is not input.dtype:
        raise Refusal(f"_fused_rms_norm of {input.dtype} with a weight in {weight.dtype}")


def _rms_norm(b: Builder, input: Value, shape: list, weight, eps) -> tuple[Value, Value]:
    """Result and 1 / root of the mean square."""
    dims, register = inner(b, input, shape, weight), input.dtype.register
    _check_weight(input, weight)
    eps = b.literal(_EPSILON[register]) if eps is None else eps
    square = mean_of(b, b.pointwise("square", (input,), register), dims)
    rstd = b.pointwise("rsqrt_of_sum", (square, eps), register, name="rstd")
    symbol = "mul"
    operands: tuple[Value, ...] = (input, rstd)
    if weight is not None:
        symbol, operands = "product", (input, rstd, weight)
    return b.pointwise(symbol, operands, input.dtype, name="rms_norm"), rstd


@composite("aten::rms_norm", dtypes=FLOATING, sizes="first", symbolic=("normalized_shape",))
def rms_norm(b: Builder, input, normalized_shape: list, weight=None, eps=None) -> Value:
    """`input / sqrt(mean(input**2) + eps) * weight` over the last dims"""
    return b.in_format_of(_rms_norm(b, input, normalized_shape, weight, eps)[0], input)


@composite("aten::_fused_rms_norm", dtypes=FLOATING, sizes=("first", "own"), symbolic=("normalized_shape",))
def fused_rms_norm(b: Builder, input, normalized_shape: list, weight, eps):
    """rms_norm and 1 / root of the mean square"""
    _check_same(input, weight)
    result, rstd = _rms_norm(b, input, normalized_shape, weight, eps)
    # eager's op is made of others on the CPU, and a kernel of its own on CUDA
    return b.in_format_of(result, input) if b.device == "cpu" else b.contiguous(result), rstd


@composite(
    "aten::_fused_rms_norm_backward",
    dtypes=FLOATING,
    sizes=("input", "weight"),
    symbolic=("normalized_shape",),
)
def fused_rms_norm_backward(
    b: Builder, grad_out, input, normalized_shape: list, rstd, weight, output_mask: list
):
    """The gradients of rms_norm that `output_mask` asks for"""
    if weight is None and output_mask[1]:
        raise Refusal("the gradient of a weight that is not there")
    _check_same(input, weight)
    of_input, of_weight = _gradients(b, grad_out, input, normalized_shape, rstd, weight)
    return of_input if output_mask[0] else None, of_weight if output_mask[1] else None


@composite(
    "tsfuser::rms_norm_backward",
    dtypes=FLOATING,
    sizes=("input", "weight"),
    symbolic=("normalized_shape",),
)
def rms_norm_backward(
    b: Builder, grad_out, input, normalized_shape: list, weight, eps
) -> tuple[Value | None, Value | None]:
    """The gradients of rms_norm, by its operands alone"""
    rstd = _rms_norm(b, input, normalized_shape, weight, eps)[1]
    return _gradients(b, grad_out, input, normalized_shape, rstd, weight)


def _gradients(
    b: Builder, grad_out: Value, input: Value, shape: list, rstd: Value, weight: Value | None
) -> tuple[Value, Value | None]:
    """The gradients of the operand and of the weight, where there is one."""
    dims, register = inner(b, input, shape, weight), input.dtype.register
    _check_weight(input, weight)
    if grad_out.dtype is not input.dtype:
        raise Refusal(f"a gradient in {grad_out.dtype} of an rms_norm in {input.dtype}")
    hat = b.pointwise("mul", (input, rstd), register, name="normalized")
    of_input = gradient(
        b, "rms_norm_backward", grad_out, hat, rstd, weight, dims, input.dtype, centered=False
    )
    if weight is None:
        return of_input, None
    product = b.pointwise("mul", (grad_out, hat), register)
    return of_input, parameter_gradient(b, product, list(range(dims[0])), weight)
