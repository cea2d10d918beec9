"""Arithmetic: sums, products, quotients, powers.

In: operands as values. Out: rows. Integers wrap at their width, bool adds as `or` and multiplies as `and`,
and what eager rejects is refused, so that the error stays eager's.
"""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import COMPLEX64, DOUBLE, FLOAT, HALF, DType
from ..ir.fusion import Value
from ..ir.limits import convertible, without_lowest
from ..ir.symbols import CANCELS, Fast, define
from .elementwise import as_stored, binary, converted, elementwise, promoted
from .table import ALL, BOOLEAN, COMPLEX, FLOATING, INTEGRAL, NUMERIC, REAL, composite

_KINDS = "bifc"

_SUM: dict[str, Any] = dict(cheap=True, grows=(CANCELS, CANCELS))
_SCALED_SUM: dict[str, Any] = dict(cheap=True, grows=(CANCELS, CANCELS, CANCELS))
define("add", "({0} + {1})", **_SUM, integer="wrap_add({0}, {1})", boolean="({0} || {1})")
define(
    "add_scaled", "multiply_add({2}, {1}, {0})", **_SCALED_SUM, integer="wrap_add({0}, wrap_mul({2}, {1}))"
)
define("sub", "({0} - {1})", **_SUM, integer="wrap_sub({0}, {1})")
define(
    "sub_scaled", "multiply_add(-{2}, {1}, {0})", **_SCALED_SUM, integer="wrap_sub({0}, wrap_mul({2}, {1}))"
)
define("abs", "fabs({0})", cheap=True, grows=(1,), positive=True, integer="wrap_abs({0})")
define("magnitude", "magnitude({0})")
define(
    "div",
    "({0} / {1})",
    cheap=True,
    grows=(1, 1),
    fast=Fast("fast_divide({0}, {1})", error=2**-21.5, exact=2**-24, algebraic=True),
)
define("times_reciprocal", "({0} * (1 / {1}))", cheap=True, grows=(1, 1))
define("trunc_div", "trunc_div({0}, {1})")
define("floor_div", "floor_div({0}, {1})")
define("remainder", "floor_mod({0}, {1})")
define("fmod", "trunc_mod({0}, {1})")
define("int_pow", "int_pow({0}, {1})")
define("pow", "pow({0}, {1})", cost=60)
define("pow_number", "pow_number({0}, {1})", cost=60)
define("cube", "({0} * {0} * {0})", cheap=True, grows=(3,))
define("reciprocal_of_square", "(1 / ({0} * {0}))", cheap=True)
define(
    "addcmul",
    "multiply_add({3} * {1}, {2}, {0})",
    cheap=True,
    grows=(CANCELS, CANCELS, CANCELS, CANCELS),
    integer="wrap_add({0}, wrap_mul(wrap_mul({3}, {1}), {2}))",
)
define("add_product", "multiply_add({1}, {2}, {0})", cheap=True, grows=(CANCELS, CANCELS, CANCELS))
define("addcdiv", "({0} + {3} * {1} / {2})", cheap=True)
define("lerp", "lerp({0}, {1}, {2})", grows=(CANCELS, CANCELS, CANCELS))
define("product", "({0} * {1} * {2})", cheap=True, grows=(1, 1, 1))

binary(
    "mul",
    "({0} * {1})",
    dtypes=ALL,
    integer="wrap_mul({0}, {1})",
    boolean="({0} && {1})",
    in_place_early=True,
    identity={"f": 1.0, "i": 1},
    cheap=True,
    grows=(1, 1),
)


def is_literal(value: Value | None, number) -> bool:
    """Whether `value` is the known number `number`."""
    return value is not None and value.is_number and value.literal is not None and value.literal == number


def check_number(b: Builder, value: Value | None, dtype: DType, what: str) -> None:
    """Refuses a number of a higher kind than `dtype` (2.5 beside integers) and numbers that do not fit
    into it: eager raises."""
    if value is None:
        return
    if _KINDS.index(value.dtype.kind) > _KINDS.index(dtype.kind):
        raise Refusal(f"{what} is a {value.dtype} beside a result in {dtype}")
    b.limit(value, convertible(dtype), what)


@composite(
    "aten::add",
    "Tensor",
    "Scalar",
    dtypes=ALL,
    smooth=True,
    keeps_dtype=True,
    dtype_rule="promoted",
    in_place_early=True,
    identity={"f": -0.0, "i": 0},
    error="contracted",
)
def add(b: Builder, self, other, alpha=None) -> Value:
    """`self + alpha * other`; on bool `or`"""
    return _scaled_sum(b, "add", self, other, alpha)


@composite(
    "aten::sub",
    "Tensor",
    "Scalar",
    dtypes=ALL,
    smooth=True,
    keeps_dtype=True,
    dtype_rule="promoted",
    in_place_early=True,
    identity={"f": 0.0, "i": 0},
    error="contracted",
)
def sub(b: Builder, self, other, alpha=None) -> Value:
    """`self - alpha * other`"""
    if alpha is not None and alpha.dtype.kind == "i":  # eager adds -alpha
        b.limit(alpha, without_lowest(None), "alpha")
    if self.dtype.kind == "b" or other.dtype.kind == "b":
        raise Refusal("subtraction with a bool is an error in eager")
    return _scaled_sum(b, "sub", self, other, alpha)


@composite("aten::rsub", "Tensor", "Scalar", dtypes=ALL, smooth=True, keeps_dtype=True, error="contracted")
def rsub(b: Builder, self, other, alpha=None) -> Value:
    """`other - alpha * self`"""
    return sub(b, other, self, alpha)


def _scaled_sum(b: Builder, name: str, first: Value, second: Value, alpha: Value | None) -> Value:
    dtype = b.promote(first, second)
    # eager multiplies by alpha even if it is 1: the infinity of (inf + 1j) times (1 + 0j) makes a NaN
    if dtype.is_complex:
        alpha = b.literal(1) if alpha is None else alpha
    elif alpha is None or is_literal(alpha, 1):
        return elementwise(b, name, (first, second))
    check_number(b, alpha, dtype, "alpha")
    if dtype.kind == "b" or alpha.dtype.kind == "b":
        raise Refusal("alpha with bools is not supported")
    converted(b, name, dtype, first, second)  # which is a number, if either
    return promoted(b, f"{name}_scaled", (first, second), dtype, numbers=(alpha,), name=name)


@composite("aten::abs", dtypes=NUMERIC + COMPLEX, smooth=True, selects=True, keeps_dtype=True)
def abs(b: Builder, self) -> Value:
    """magnitude of `self`"""
    if self.dtype.is_complex:
        return b.pointwise(
            "magnitude", (self,), FLOAT if self.dtype is COMPLEX64 else DOUBLE, self.dtype, name="abs"
        )
    return elementwise(b, "abs", (self,))


@composite("prim::add_optional", dtypes=ALL, smooth=True, keeps_dtype=True, fresh=False)
def add_optional(b: Builder, input, bias) -> Value:
    """`input + bias`, or `input` where there is no bias"""
    return input if bias is None else add(b, input, bias)


# ---- quotients


def _check_divisor(b: Builder, dtype: DType, divisor: Value) -> None:
    """An integer division by zero raises on the CPU, so there the divisor has to be known; on CUDA its result
    is the machine's, in eager as here."""
    if dtype.kind != "i":
        return
    if divisor.literal is not None and divisor.literal == 0:
        raise Refusal("integer division by a divisor that is known to be 0")
    if b.device == "cpu" and divisor.literal is None:
        raise Refusal("integer division raises in eager where the divisor is 0, and the divisor is not known")


@composite(
    "aten::div",
    "Tensor",
    "Scalar",
    "Tensor_mode",
    "Scalar_mode",
    dtypes=ALL,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    identity={"f": 1.0},
)
def div(b: Builder, self, other, rounding_mode: str | None = None) -> Value:
    """`self / other`, rounded towards zero (`trunc`), down (`floor`) or not at all"""
    if rounding_mode is None:
        by_number = b.device != "cpu" and not b.promote(self, other).is_complex and _is_number(b, other)
        symbol = "times_reciprocal" if by_number else "div"  # as eager on CUDA, which has no branch then
        return elementwise(b, symbol, (self, other), "float", name="div")
    if rounding_mode not in ("trunc", "floor"):
        raise Refusal(f"div with rounding_mode {rounding_mode!r}")
    return _whole_division(b, f"{rounding_mode}_div", self, other)


def _is_number(b: Builder, value: Value) -> bool:
    """Whether `value` is a number, or a 0-dim tensor that is on the CPU beside tensors that are not."""
    return value.is_number or (not value.dims and b.is_on_cpu(value))


@composite("aten::floor_divide", "", "Scalar", dtypes=REAL, jumps=True, keeps_dtype=True)
def floor_divide(b: Builder, self, other) -> Value:
    """`floor(self / other)`"""
    return _whole_division(b, "floor_div", self, other)


def _whole_division(b: Builder, name: str, self: Value, other: Value) -> Value:
    _check_divisor(b, b.promote(self, other), other)
    return elementwise(b, name, as_stored(b, self, other), dtypes=NUMERIC)


@composite("aten::remainder", "Tensor", "Scalar", "Scalar_Tensor", dtypes=REAL, jumps=True, keeps_dtype=True)
def remainder(b: Builder, self, other) -> Value:
    """remainder with the sign of the divisor"""
    _check_divisor(b, b.promote(self, other), other)
    return elementwise(b, "remainder", as_stored(b, self, other), dtypes=NUMERIC, exact=True)


@composite("aten::fmod", "Tensor", "Scalar", dtypes=REAL, jumps=True, keeps_dtype=True)
def fmod(b: Builder, self, other) -> Value:
    """remainder with the sign of the dividend"""
    _check_divisor(b, b.promote(self, other), other)
    return elementwise(b, "fmod", as_stored(b, self, other), dtypes=NUMERIC, exact=True)


# ---- powers

# Exponents for which eager has code of its own: pow(-inf, 0.5) is inf, but sqrt(-inf), which it uses, NaN.
_POWERS = {
    0.5: "sqrt",
    2: "square",
    3: "cube",
    -0.5: "rsqrt",
    -1: "reciprocal",
    -2: "reciprocal_of_square",
}


@composite(
    "aten::pow", "Tensor_Tensor", "Tensor_Scalar", "Scalar", dtypes=REAL, smooth=True, keeps_dtype=True
)
def pow(b: Builder, self, exponent) -> Value:
    """`self ** exponent`; integers stay integers"""
    result = _pow(b, self, exponent)
    return b.contiguous(result) if self.is_number else result


def _pow(b: Builder, self, exponent) -> Value:
    dtype = b.promote(self, exponent)
    if dtype.kind == "b":
        raise Refusal("pow of bools is not supported")
    converted(b, "pow", dtype, exponent)
    if exponent.literal == 1 and not self.is_number:
        return promoted(b, "copy", (self,), dtype, name="pow")
    if dtype.kind == "i":
        if exponent.is_number and (exponent.literal is None or exponent.literal < 0):
            raise Refusal("the exponent of an integer power is not known to be at least 0")
        return elementwise(b, "int_pow", (self, exponent), scalars=False, name="pow")
    has_roots = dtype is not HALF or b.device != "cpu"  # eager computes std::pow of float16 there
    if exponent.literal in _POWERS and (has_roots or exponent.literal not in (0.5, -0.5)):
        return promoted(b, _POWERS[exponent.literal], (self,), dtype, name="pow")
    symbol = "pow_number" if exponent.is_number and has_roots else "pow"
    return elementwise(b, symbol, (self, exponent), scalars=False, name="pow")


@composite("aten::float_power", "Tensor_Tensor", "Tensor_Scalar", "Scalar", dtypes=REAL, smooth=True)
def float_power(b: Builder, self, exponent) -> Value:
    """`self ** exponent` in double"""
    symbol = "pow_number" if exponent.is_number else "pow"
    operands = (self, exponent)
    result = b.pointwise(
        symbol, operands, DOUBLE, layouts=b.cast_layouts(operands, DOUBLE), name="float_power"
    )
    return b.contiguous(result) if self.is_number else result


# ---- three operands


@composite("aten::addcmul", dtypes=NUMERIC, smooth=True, keeps_dtype=True, error="contracted")
def addcmul(b: Builder, self, tensor1, tensor2, value=None) -> Value:
    """`self + value * tensor1 * tensor2`"""
    dtype = b.promote(self, tensor1, tensor2)
    check_number(b, value, dtype, "value")
    value = b.literal(1) if value is None else value
    symbol = "add_product" if dtype.kind != "i" and is_literal(value, 1) else "addcmul"
    return promoted(b, symbol, (self, tensor1, tensor2), dtype, numbers=(value,), name="addcmul")


@composite("aten::addcdiv", dtypes=REAL, smooth=True, keeps_dtype=True, error="contracted")
def addcdiv(b: Builder, self, tensor1, tensor2, value=None) -> Value:
    """`self + value * tensor1 / tensor2`"""
    dtype = b.promote(self, tensor1, tensor2)
    if dtype.name not in FLOATING or (
        tensor1.dtype.name in BOOLEAN + INTEGRAL and tensor2.dtype.name in BOOLEAN + INTEGRAL
    ):
        raise Refusal("addcdiv of integers is an error in eager")
    value = b.literal(1) if value is None else value
    return promoted(b, "addcdiv", (self, tensor1, tensor2), dtype, numbers=(value,))


@composite(
    "aten::lerp", "Scalar", "Tensor", dtypes=FLOATING, smooth=True, keeps_dtype=True, error="contracted"
)
def lerp(b: Builder, self, end, weight) -> Value:
    """`self + weight * (end - self)`, computed from the nearer end"""
    if end.dtype is not self.dtype or not (weight.is_number or weight.dtype is self.dtype):
        raise Refusal("lerp of different dtypes is an error in eager")
    b.limit(weight, convertible(self.dtype), "the weight of lerp")
    return b.pointwise("lerp", (self, end, weight), self.dtype)
