"""Softmax, its logarithm, and their derivatives as autograd calls them.

Formulas: `softmax = exp(x - max) / sum(exp(x - max))` and `log_softmax = x - max - log(sum(exp(x - max)))`;
derivatives from the products `y (dy - sum(y dy))` and `dy - exp(y) sum(dy)` (torch/csrc/autograd,
`softmax_backward`; Goodfellow et al., Deep Learning, 6.2.2.3).
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import FLOAT, HALF, DType
from ..ir.fusion import Value
from ..ir.symbols import CANCELS, Fast, define
from .reduction import normalized, total
from .table import FLOATING, REAL, composite, scalar_type

# The largest term is exp(0) = 1: errors of the others, and of their sum, are no larger in its logarithm.
define("log_of_exponentials", "log({0})", grows=(1,))
define("log_softmax", "({0} - {1})", cheap=True, grows=(1, 1))  # neither of which is above 0
define("softmax_backward", "(({0} - {2}) * {1})", cheap=True, grows=(CANCELS, 1, CANCELS))
define(
    "log_softmax_backward",
    "({0} - exp({1}) * {2})",
    grows=(CANCELS, CANCELS, CANCELS),
    fast=Fast(
        "({0} - fast_exp({1}) * {2})", error=2**-16.5, exact=2**-22, of="(fabs({0}) + exp({1}) * fabs({2}))"
    ),
)


def _softmax(b: Builder, x: Value, dim: int, dtype: DType, log: bool) -> Value:
    """Softmax of `x` along `dim`, computed in the accumulation dtype of `dtype`, which the result has."""
    dims, register = normalized(x, dim), dtype.register
    largest = b.reduce("amax", "max", x, dims, True, register)
    shifted = b.pointwise("sub", (x, largest), register)
    power = b.pointwise("exp", (shifted,), register)
    summed = total(b, "sum", power, dims)
    if log:
        offset = b.pointwise("log_of_exponentials", (summed,), register, name="log")
        return b.contiguous(b.pointwise("log_softmax", (shifted, offset), dtype))
    scale = b.pointwise("reciprocal", (summed,), register)
    return b.contiguous(b.pointwise("mul", (power, scale), dtype, name="softmax"))


def _cast(b: Builder, self: Value, dtype: int | None) -> Value:
    """The operand in the dtype asked for, as eager casts it first."""
    self = self if dtype is None else b.cast(self, scalar_type(dtype))
    if not self.dtype.is_floating:
        raise Refusal(f"softmax in {self.dtype} is an error in eager")
    return self


@composite("aten::softmax", "int", dtypes=REAL, sizes="first", along="dim", gradient="strict")
def softmax(b: Builder, self, dim: int, dtype: int | None = None) -> Value:
    """`exp(self)` divided by its sum along `dim`"""
    x = _cast(b, self, dtype)
    return _softmax(b, x, dim, x.dtype, log=False)


@composite("aten::log_softmax", "int", dtypes=REAL, sizes="first", along="dim", gradient="strict")
def log_softmax(b: Builder, self, dim: int, dtype: int | None = None) -> Value:
    """The logarithm of softmax"""
    x = _cast(b, self, dtype)
    return _softmax(b, x, dim, x.dtype, log=True)


def _result(b: Builder, self: Value, half_to_float: bool) -> DType:
    if not half_to_float:
        return self.dtype
    if self.dtype is not HALF or b.device == "cpu":
        raise Refusal("softmax with half_to_float is for float16 on CUDA only")
    return FLOAT


@composite("aten::_softmax", dtypes=FLOATING, sizes="first", along="dim")
def internal_softmax(b: Builder, self, dim: int, half_to_float: bool) -> Value:
    """softmax, in float32 of a float16 operand if `half_to_float`"""
    return _softmax(b, self, dim, _result(b, self, half_to_float), log=False)


@composite("aten::_log_softmax", dtypes=FLOATING, sizes="first", along="dim")
def internal_log_softmax(b: Builder, self, dim: int, half_to_float: bool) -> Value:
    """log_softmax, in float32 of a float16 operand if `half_to_float`"""
    return _softmax(b, self, dim, _result(b, self, half_to_float), log=True)


def _check_gradient(b: Builder, grad: Value, output: Value, dtype: DType) -> None:
    if grad.dtype is not output.dtype:
        raise Refusal("softmax's gradient and result in different dtypes are an error in eager")
    if len(grad.dims) != len(output.dims) or not all(
        b.call.decide(sz.eq(x, y)) for x, y in zip(b.sizes(grad), b.sizes(output))
    ):
        raise Refusal("softmax's gradient and result of different sizes are an error in eager")
    if dtype is not grad.dtype and (grad.dtype is not FLOAT or dtype is not HALF or b.device == "cpu"):
        raise Refusal(f"a gradient of softmax from {grad.dtype} to {dtype}")


@composite("aten::_softmax_backward_data", dtypes=FLOATING, sizes="first")
def softmax_backward(b: Builder, grad_output, output, dim: int, input_dtype: int) -> Value:
    """`output * (grad_output - sum(output * grad_output))`"""
    dtype = scalar_type(input_dtype)
    _check_gradient(b, grad_output, output, dtype)
    product = b.pointwise("mul", (grad_output, output), output.dtype.register)
    summed = total(b, "sum", product, normalized(output, dim))
    return b.contiguous(b.pointwise("softmax_backward", (grad_output, output, summed), dtype))


@composite("aten::_log_softmax_backward_data", dtypes=FLOATING, sizes="first")
def log_softmax_backward(b: Builder, grad_output, output, dim: int, input_dtype: int) -> Value:
    """`grad_output - exp(output) * sum(grad_output)`"""
    dtype = scalar_type(input_dtype)
    _check_gradient(b, grad_output, output, dtype)
    summed = total(b, "sum", grad_output, normalized(output, dim))
    return b.contiguous(b.pointwise("log_softmax_backward", (grad_output, output, summed), dtype))
