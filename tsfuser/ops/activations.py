"""Activation functions with parameters; their formulas are functions of `codegen/runtime/activations.h`."""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.fusion import Value
from ..ir.limits import between
from ..ir.symbols import CANCELS, Fast, define
from .elementwise import as_stored, converted, promoted, round_number
from .table import FLOATING, composite

_ANY: dict[str, Any] = dict(grows=(CANCELS,))
# the exact forms cancel where x is far below 0
define(
    "gelu",
    "gelu({0})",
    **_ANY,
    fast=Fast("fast_gelu({0})", error=2**-16, exact=2**-22, exact_of="fabs({0})"),
)
define(
    "gelu_tanh",
    "gelu_tanh({0})",
    **_ANY,
    fast=Fast("fast_gelu_tanh({0})", error=2**-16, exact=2**-21.5, exact_of="fabs({0})"),
)
define("leaky_relu", "({0} > 0 ? {0} : {0} * {1})", cheap=True, grows=(1, 1))
define("prelu", "({0} > 0 ? {0} : {1} * {0})", cheap=True, grows=(1, 1))
define(
    "log_sigmoid",
    "log_sigmoid({0})",
    **_ANY,
    fast=Fast("fast_log_sigmoid({0})", error=2**-16, exact=2**-21),
)
define(
    "softplus",
    "softplus({0}, {1}, {2})",
    fast=Fast("fast_softplus({0}, {1}, {2})", error=2**-16, exact=2**-21),
)
define(
    "elu",
    "elu({0}, {1}, {2}, {3})",
    grows=(CANCELS, 1, 1, 1),
    fast=Fast("fast_elu({0}, {1}, {2}, {3})", error=2**-16, exact=2**-21.5),
)
define(
    "celu",
    "celu({0}, {1})",
    grows=(CANCELS, 1),
    fast=Fast("fast_celu({0}, {1})", error=2**-16, exact=2**-21.5),
)
define("clamp", "clamp({0}, {1}, {2})", grows=(1, 1, 1))
define("hardshrink", "(fabs({0}) <= {1} ? 0 : {0})", cheap=True)
define("softshrink", "softshrink({0}, {1})")
define("logit", "log({0} / (1 - {0}))")
define("logit_clamped", "logit({0}, {1})")


@composite(
    "aten::gelu", dtypes=FLOATING, smooth=True, keeps_dtype=True, in_place_early=True, error="operands"
)
def gelu(b: Builder, self, approximate: str = "none") -> Value:
    """`self` times the normal distribution function of it, or its approximation by tanh"""
    if approximate not in ("none", "tanh"):
        raise Refusal(f"gelu with approximate={approximate!r}")
    symbol = "gelu" if approximate == "none" else "gelu_tanh"
    return b.pointwise(symbol, (self,), self.dtype, name="gelu")


@composite(
    "aten::leaky_relu",
    dtypes=FLOATING,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    derivative=("aten::leaky_relu_backward", "aten::where"),
    selects=True,
)
def leaky_relu(b: Builder, self, negative_slope) -> Value:
    """`self > 0 ? self : self * slope`"""
    converted(b, "leaky_relu", self.dtype, negative_slope)
    return b.pointwise("leaky_relu", (self, negative_slope), self.dtype)


@composite("aten::log_sigmoid", dtypes=FLOATING, smooth=True, keeps_dtype=True)
def log_sigmoid(b: Builder, self) -> Value:
    """`-log(1 + exp(-self))`"""
    result = b.pointwise("log_sigmoid", (self,), self.dtype)
    return b.contiguous(result) if b.device == "cpu" else result  # as eager's is, there alone


@composite("aten::softplus", dtypes=FLOATING, jumps=True, keeps_dtype=True)  # it jumps at a small threshold
def softplus(b: Builder, self, beta, threshold) -> Value:
    """`log1p(exp(self * beta)) / beta`; `self` where `self * beta > threshold`"""
    converted(b, "softplus", self.dtype, beta, threshold)
    return b.pointwise("softplus", (self, beta, threshold), self.dtype)


@composite("aten::elu", dtypes=FLOATING, smooth=True, keeps_dtype=True, in_place_early=True, selects=True)
def elu(b: Builder, self, alpha, scale, input_scale) -> Value:
    """`scale * (self > 0 ? self : alpha * expm1(self * input_scale))`"""
    converted(b, "elu", self.dtype, alpha, scale, input_scale)
    return b.pointwise("elu", (self, alpha, scale, input_scale), self.dtype)


@composite("aten::celu", dtypes=FLOATING, smooth=True, keeps_dtype=True, in_place_early=True, selects=True)
def celu(b: Builder, self, alpha) -> Value:
    """`self > 0 ? self : alpha * expm1(self / alpha)`"""
    most = self.dtype.largest
    b.limit(alpha, between(1 / most, most), "alpha of celu")  # 1 / alpha has to be finite, too
    return b.pointwise("celu", (self, alpha), self.dtype)


@composite(
    "aten::hardtanh",
    dtypes=FLOATING,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    derivative=("aten::hardtanh_backward", "aten::ge", "aten::le"),
    selects=True,
)
def hardtanh(b: Builder, self, min_val, max_val) -> Value:
    """`self` between two bounds"""
    converted(b, "hardtanh", self.dtype, min_val, max_val)
    made = b.pointwise("clamp", (self, min_val, max_val), self.dtype, layouts=(), name="hardtanh")
    return b.copied(made, self)  # eager's is made by empty_like


@composite(
    "aten::hardshrink",
    dtypes=FLOATING,
    jumps=True,
    keeps_dtype=True,
    in_place_early=True,
    derivative=("aten::hardshrink_backward", "aten::gt"),
    selects=True,
)
def hardshrink(b: Builder, self, lambd) -> Value:
    """0 where `abs(self) <= lambd`, else `self`"""
    converted(b, "hardshrink", self.dtype, lambd)
    lambd = round_number(b, lambd, self.dtype)
    return b.pointwise("hardshrink", (*as_stored(b, self), lambd), self.dtype)


@composite("aten::softshrink", dtypes=FLOATING, smooth=True, keeps_dtype=True)
def softshrink(b: Builder, self, lambd) -> Value:
    """`self` moved towards 0 by `lambd`"""
    b.limit(lambd, between(0.0, self.dtype.largest), "lambd of softshrink")
    return b.pointwise("softshrink", (self, lambd), self.dtype)


@composite("aten::logit", smooth=True, keeps_dtype=True)
def logit(b: Builder, self, eps=None) -> Value:
    """`log(x / (1 - x))` of `self`, clamped to [eps, 1 - eps]"""
    dtype = b.floating(self.dtype)
    if eps is None:
        return promoted(b, "logit", (self,), dtype)
    return promoted(b, "logit_clamped", (self,), dtype, numbers=(eps,), name="logit")


@composite("aten::_prelu_kernel", dtypes=FLOATING, smooth=True, keeps_dtype=True, selects=True)
def prelu_kernel(b: Builder, self, weight) -> Value:
    """`self > 0 ? self : weight * self`"""
    if self.dtype is not weight.dtype:
        raise Refusal("prelu of different dtypes is an error in eager")
    return b.pointwise("prelu", (self, weight), self.dtype)
