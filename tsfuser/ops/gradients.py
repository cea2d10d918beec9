"""Derivatives that autodiff and autograd call by name; their formulas are functions of
`codegen/runtime/activations.h`."""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import BOOL
from ..ir.fusion import Value
from ..ir.limits import Limit
from ..ir.symbols import CANCELS, Fast, define
from .elementwise import compared, converted, elementwise, promoted, round_number
from .table import FLOATING, NUMERIC, REAL, composite

define("mish_backward", "mish_backward({0}, {1})")
# Derivatives are 0 somewhere, and cancel there: their error is relative to the gradient.
_PRODUCT: dict[str, Any] = dict(grows=(1, CANCELS))
define(
    "gelu_backward",
    "gelu_backward({0}, {1})",
    **_PRODUCT,
    fast=Fast("fast_gelu_backward({0}, {1})", error=2**-17, exact=2**-21, of="fabs({0})"),
)
define(
    "gelu_tanh_backward",
    "gelu_tanh_backward({0}, {1})",
    **_PRODUCT,
    fast=Fast("fast_gelu_tanh_backward({0}, {1})", error=2**-17, exact=2**-20.5, of="fabs({0})"),
)
define("threshold_backward", "({0} <= {2} ? 0 : {1})", cheap=True)
define("leaky_relu_backward", "({0} > 0 ? {1} : {1} * {2})", cheap=True)
define(
    "softplus_backward",
    "softplus_backward({0}, {1}, {2}, {3})",
    fast=Fast("fast_softplus_backward({0}, {1}, {2}, {3})", error=2**-16.5, exact=2**-21.5),
)
define(
    "elu_backward",
    "elu_backward({0}, {1}, {2}, {3}, {4})",
    fast=Fast("fast_elu_backward({0}, {1}, {2}, {3}, {4})", error=2**-16.5, exact=2**-21.5),
)
define("elu_backward_of_result", "elu_backward_of_result({0}, {1}, {2}, {3}, {4})")
define("hardtanh_backward", "hardtanh_backward({0}, {1}, {2}, {3})", cheap=True)
define("hardshrink_backward", "hardshrink_backward({0}, {1}, {2})", cheap=True)
define(
    "log_sigmoid_backward",
    "({0} * sigmoid(-({1})))",
    **_PRODUCT,
    fast=Fast("({0} * fast_sigmoid(-({1})))", error=2**-16.5, exact=2**-21.5),
)
define("logit_backward", "logit_backward({0}, {1})")
define("logit_clamped_backward", "logit_backward({0}, {1}, {2})")

_NOT_NEGATIVE = Limit(low=0, least=0.0)


def _gradient(name: str, template: str, cheap: bool = False, fast: Fast | None = None, **facts) -> None:
    """The row of `aten::name_backward(grad_output, self)`."""
    symbol = define(f"{name}_backward", template, cheap, fast, grows=(1, CANCELS))

    @composite(f"aten::{name}_backward", dtypes=FLOATING, **facts)
    def evaluate(b: Builder, grad_output, self) -> Value:
        """`grad_output` times the derivative at `self`"""
        return elementwise(b, symbol, (grad_output, self), dtypes=FLOATING)


def _gradient_of_output(name: str, template: str, cheap: bool = True) -> None:
    """The row of `aten::name_backward(grad_output, output)`."""
    symbol = define(f"{name}_backward", template, cheap, grows=(1, CANCELS))

    @composite(f"aten::{name}_backward", dtypes=FLOATING)
    def evaluate(b: Builder, grad_output, output) -> Value:
        """`grad_output` times the derivative, which is computed from `output`"""
        return elementwise(b, symbol, (grad_output, output), dtypes=FLOATING)


_gradient(
    "silu",
    "silu_backward({0}, {1})",
    error="operands",
    fast=Fast("fast_silu_backward({0}, {1})", error=2**-17, exact=2**-19.5, of="fabs({0})"),
)
# exact: at its root, where eager has 0, a fast quotient would leave a rest
_gradient("hardswish", "hardswish_backward({0}, {1})", jumps=True)
# eager too has a float here, for doubles
_gradient("hardsigmoid", "({1} > -3 && {1} < 3 ? {0} * (1.0f / 6.0f) : 0)", cheap=True, jumps=True)
_gradient_of_output("tanh", "({0} * (1 - {1} * {1}))")
_gradient_of_output("sigmoid", "({0} * (1 - {1}) * {1})")


def _with_numbers(
    b: Builder, symbol: str, first: Value, second: Value, *numbers: Value, name: str = ""
) -> Value:
    dtype = b.promote(first, second)
    return promoted(b, symbol, (first, second), dtype, numbers=numbers, name=name)


def _check_same(grad: Value, self: Value) -> None:
    if grad.dtype is not self.dtype:
        raise Refusal(f"a gradient in {grad.dtype} of an operand in {self.dtype}")


@composite("aten::mish_backward", dtypes=FLOATING, error="operands")
def mish_backward(b: Builder, grad_output, self) -> Value:
    """`grad_output` times the derivative of mish"""
    _check_same(grad_output, self)
    return _with_numbers(b, "mish_backward", grad_output, self)


@composite("aten::gelu_backward", dtypes=FLOATING, error="operands")
def gelu_backward(b: Builder, grad_output, self, approximate: str = "none") -> Value:
    """`grad_output` times the derivative of gelu"""
    if approximate not in ("none", "tanh"):
        raise Refusal(f"gelu_backward with approximate={approximate!r}")
    _check_same(grad_output, self)
    symbol = "gelu_backward" if approximate == "none" else "gelu_tanh_backward"
    return _with_numbers(b, symbol, grad_output, self, name="gelu_backward")


@composite("aten::threshold_backward", dtypes=NUMERIC, jumps=True)
def threshold_backward(b: Builder, grad_output, self, threshold) -> Value:
    """`self <= threshold ? 0 : grad_output`"""
    dtype = b.promote(grad_output, self)
    converted(b, "threshold_backward", dtype, threshold)
    threshold = compared(b, threshold, dtype)
    # as in leaky_relu's, the layout of `self` comes first
    return _with_numbers(b, "threshold_backward", self, grad_output, threshold)


@composite("aten::leaky_relu_backward", dtypes=FLOATING, jumps=True)
def leaky_relu_backward(b: Builder, grad_output, self, negative_slope, self_is_result: bool = False) -> Value:
    """`self > 0 ? grad_output : grad_output * slope`"""
    if self_is_result:
        b.limit(negative_slope, _NOT_NEGATIVE, "the slope of a leaky_relu in place")
    return _with_numbers(b, "leaky_relu_backward", self, grad_output, negative_slope)


@composite("aten::softplus_backward", dtypes=FLOATING, jumps=True)
def softplus_backward(b: Builder, grad_output, self, beta, threshold) -> Value:
    """`grad_output * sigmoid(self * beta)`; `grad_output` where `self * beta > threshold`"""
    return _with_numbers(b, "softplus_backward", grad_output, self, beta, threshold)


@composite("aten::elu_backward", dtypes=FLOATING, jumps=True)
def elu_backward(
    b: Builder, grad_output, alpha, scale, input_scale, is_result: bool, self_or_result
) -> Value:
    """`grad_output` times the derivative of elu, from its argument or its result"""
    if is_result:
        b.limit(alpha, _NOT_NEGATIVE, "alpha of an elu in place")
    symbol = "elu_backward_of_result" if is_result else "elu_backward"
    numbers = (alpha, scale, input_scale)
    return _with_numbers(b, symbol, grad_output, self_or_result, *numbers, name="elu_backward")


@composite("aten::hardtanh_backward", dtypes=FLOATING, jumps=True)
def hardtanh_backward(b: Builder, grad_output, self, min_val, max_val) -> Value:
    """`grad_output` where `self` is between the bounds, else 0"""
    converted(b, "hardtanh_backward", self.dtype, min_val, max_val)
    return _with_numbers(b, "hardtanh_backward", grad_output, self, min_val, max_val)


@composite("aten::hardshrink_backward", dtypes=FLOATING, jumps=True)
def hardshrink_backward(b: Builder, grad_out, self, lambd) -> Value:
    """0 where `abs(self) <= lambd`, else `grad_out`"""
    converted(b, "hardshrink_backward", self.dtype, lambd)
    lambd = round_number(b, lambd, self.dtype)
    return _with_numbers(b, "hardshrink_backward", grad_out, self, lambd)


@composite("aten::softshrink_backward", dtypes=FLOATING, jumps=True)
def softshrink_backward(b: Builder, grad_output, self, lambd) -> Value:
    """0 where `abs(self) <= lambd`, else `grad_output`"""
    return hardshrink_backward(b, grad_output, self, lambd)


@composite("aten::log_sigmoid_backward", dtypes=FLOATING, sizes="first", error="operands")
def log_sigmoid_backward(b: Builder, grad_output, self, buffer) -> Value:
    """`grad_output * sigmoid(-self)`; the buffer is not needed"""
    _check_same(grad_output, self)
    return _with_numbers(b, "log_sigmoid_backward", grad_output, self)


@composite("aten::logit_backward", dtypes=FLOATING, jumps=True)
def logit_backward(b: Builder, grad_output, self, eps=None) -> Value:
    """`grad_output / (self * (1 - self))`; 0 outside of [eps, 1 - eps]"""
    if eps is None:
        return _with_numbers(b, "logit_backward", grad_output, self)
    return _with_numbers(b, "logit_clamped_backward", grad_output, self, eps, name="logit_backward")


@composite("aten::native_dropout_backward", dtypes=REAL)
def native_dropout_backward(b: Builder, grad_output, mask, scale) -> Value:
    """`grad_output * mask * scale`"""
    if mask.dtype is not BOOL or not grad_output.dtype.is_floating:
        raise Refusal("native_dropout_backward needs a bool mask and a floating gradient")
    made = b.pointwise(
        "product", (grad_output, mask, scale), grad_output.dtype, name="native_dropout_backward"
    )
    return made if b.device == "cpu" else b.in_format_of(made, grad_output)
