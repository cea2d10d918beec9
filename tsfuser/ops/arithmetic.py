"""Arithmetic: sums, products, quotients, powers.

In: operands as values. Out: rows. Integers wrap at their width, bool adds as `or` and multiplies as `and`,
and what eager rejects is refused, so that the error stays eager's.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import COMPLEX64, DOUBLE, FLOAT, DType
from ..ir.fusion import Value
from ..ir.limits import convertible, without_lowest
from .elementwise import binary, converted, elementwise, promoted
from .table import ALL, BOOLEAN, COMPLEX, FLOATING, INTEGRAL, NUMERIC, REAL, composite

_KINDS = "bifc"

_ADD = {"f": "({0} + {1})", "i": "wrap_add({0}, {1})", "b": "({0} || {1})"}
_ADD_SCALED = {"f": "({0} + {2} * {1})", "i": "wrap_add({0}, wrap_mul({2}, {1}))"}
_SUB = {"f": "({0} - {1})", "i": "wrap_sub({0}, {1})"}
_SUB_SCALED = {"f": "({0} - {2} * {1})", "i": "wrap_sub({0}, wrap_mul({2}, {1}))"}

binary(
    "mul",
    "({0} * {1})",
    dtypes=ALL,
    integer="wrap_mul({0}, {1})",
    boolean="({0} && {1})",
    in_place_early=True,
    identity={"f": 1.0, "i": 1},
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
    in_place_early=True,
    identity={"f": -0.0, "i": 0},
)
def add(b: Builder, self, other, alpha=None) -> Value:
    """`self + alpha * other`; on bool `or`"""
    return _scaled_sum(b, "add", _ADD, _ADD_SCALED, self, other, alpha)


@composite(
    "aten::sub",
    "Tensor",
    "Scalar",
    dtypes=ALL,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    identity={"f": 0.0, "i": 0},
)
def sub(b: Builder, self, other, alpha=None) -> Value:
    """`self - alpha * other`"""
    if alpha is not None and alpha.dtype.kind == "i":  # eager adds -alpha
        b.limit(alpha, without_lowest(None), "alpha")
    if self.dtype.kind == "b" or other.dtype.kind == "b":
        raise Refusal("subtraction with a bool is an error in eager")
    return _scaled_sum(b, "sub", _SUB, _SUB_SCALED, self, other, alpha)


@composite("aten::rsub", "Tensor", "Scalar", dtypes=ALL, smooth=True, keeps_dtype=True)
def rsub(b: Builder, self, other, alpha=None) -> Value:
    """`other - alpha * self`"""
    return sub(b, other, self, alpha)


def _scaled_sum(
    b: Builder, name: str, plain: dict, scaled: dict, first: Value, second: Value, alpha: Value | None
) -> Value:
    dtype = b.promote(first, second)
    # eager multiplies by alpha even if it is 1: the infinity of (inf + 1j) times (1 + 0j) makes a NaN
    if dtype.is_complex:
        alpha = b.literal(1) if alpha is None else alpha
    elif alpha is None or is_literal(alpha, 1):
        return elementwise(b, name, plain, (first, second))
    check_number(b, alpha, dtype, "alpha")
    if dtype.kind == "b" or alpha.dtype.kind == "b":
        raise Refusal("alpha with bools is not supported")
    converted(b, name, dtype, first, second)  # which is a number, if either
    template = scaled.get(dtype.kind, scaled["f"])
    return promoted(b, name, template, (first, second), dtype, numbers=(alpha,))


@composite("aten::abs", dtypes=NUMERIC + COMPLEX, smooth=True, keeps_dtype=True)
def abs(b: Builder, self) -> Value:
    """magnitude of `self`"""
    if self.dtype.is_complex:
        return b.pointwise(
            "abs", "magnitude({0})", (self,), FLOAT if self.dtype is COMPLEX64 else DOUBLE, self.dtype
        )
    return elementwise(b, "abs", {"f": "fabs({0})", "i": "wrap_abs({0})"}, (self,))


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
        return elementwise(b, "div", "({0} / {1})", (self, other), "float")
    if rounding_mode not in ("trunc", "floor"):
        raise Refusal(f"div with rounding_mode {rounding_mode!r}")
    return _whole_division(b, f"{rounding_mode}_div", self, other)


@composite("aten::floor_divide", "", "Scalar", dtypes=REAL, keeps_dtype=True)
def floor_divide(b: Builder, self, other) -> Value:
    """`floor(self / other)`"""
    return _whole_division(b, "floor_div", self, other)


def _whole_division(b: Builder, name: str, self: Value, other: Value) -> Value:
    _check_divisor(b, b.promote(self, other), other)
    return elementwise(b, name, name + "({0}, {1})", (self, other), dtypes=NUMERIC)


@composite("aten::remainder", "Tensor", "Scalar", "Scalar_Tensor", dtypes=REAL, keeps_dtype=True)
def remainder(b: Builder, self, other) -> Value:
    """remainder with the sign of the divisor"""
    _check_divisor(b, b.promote(self, other), other)
    return elementwise(b, "remainder", "floor_mod({0}, {1})", (self, other), dtypes=NUMERIC, exact=True)


@composite("aten::fmod", "Tensor", "Scalar", dtypes=REAL, keeps_dtype=True)
def fmod(b: Builder, self, other) -> Value:
    """remainder with the sign of the dividend"""
    _check_divisor(b, b.promote(self, other), other)
    return elementwise(b, "fmod", "trunc_mod({0}, {1})", (self, other), dtypes=NUMERIC, exact=True)


# ---- powers

# Exponents for which eager has code of its own: pow(-inf, 0.5) is inf, but sqrt(-inf), which it uses, NaN.
_POWERS = {
    0.5: "sqrt({0})",
    2: "({0} * {0})",
    3: "({0} * {0} * {0})",
    -0.5: "rsqrt({0})",
    -1: "(1 / {0})",
    -2: "(1 / ({0} * {0}))",
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
        return promoted(b, "pow", "{0}", (self,), dtype)
    if dtype.kind == "i":
        if exponent.is_number and (exponent.literal is None or exponent.literal < 0):
            raise Refusal("the exponent of an integer power is not known to be at least 0")
        return elementwise(b, "pow", "int_pow({0}, {1})", (self, exponent), scalars=False)
    if exponent.literal in _POWERS:
        return promoted(b, "pow", _POWERS[exponent.literal], (self,), dtype)
    template = "pow_number({0}, {1})" if exponent.is_number else "pow({0}, {1})"
    return elementwise(b, "pow", template, (self, exponent), scalars=False)


@composite("aten::float_power", "Tensor_Tensor", "Tensor_Scalar", "Scalar", dtypes=REAL, smooth=True)
def float_power(b: Builder, self, exponent) -> Value:
    """`self ** exponent` in double"""
    template = "pow_number({0}, {1})" if exponent.is_number else "pow({0}, {1})"
    operands = (self, exponent)
    result = b.pointwise("float_power", template, operands, DOUBLE, layouts=b.cast_layouts(operands, DOUBLE))
    return b.contiguous(result) if self.is_number else result


# ---- three operands


@composite("aten::addcmul", dtypes=NUMERIC, smooth=True, keeps_dtype=True)
def addcmul(b: Builder, self, tensor1, tensor2, value=None) -> Value:
    """`self + value * tensor1 * tensor2`"""
    dtype = b.promote(self, tensor1, tensor2)
    check_number(b, value, dtype, "value")
    value = b.literal(1) if value is None else value
    template = "({0} + {3} * {1} * {2})"
    if dtype.kind == "i":
        template = "wrap_add({0}, wrap_mul(wrap_mul({3}, {1}), {2}))"
    elif is_literal(value, 1):
        template = "({0} + {1} * {2})"
    return promoted(b, "addcmul", template, (self, tensor1, tensor2), dtype, numbers=(value,))


@composite("aten::addcdiv", dtypes=REAL, smooth=True, keeps_dtype=True)
def addcdiv(b: Builder, self, tensor1, tensor2, value=None) -> Value:
    """`self + value * tensor1 / tensor2`"""
    dtype = b.promote(self, tensor1, tensor2)
    if dtype.name not in FLOATING or (
        tensor1.dtype.name in BOOLEAN + INTEGRAL and tensor2.dtype.name in BOOLEAN + INTEGRAL
    ):
        raise Refusal("addcdiv of integers is an error in eager")
    value = b.literal(1) if value is None else value
    template = "({0} + {3} * {1} / {2})"
    return promoted(b, "addcdiv", template, (self, tensor1, tensor2), dtype, numbers=(value,))


@composite("aten::lerp", "Scalar", "Tensor", dtypes=FLOATING, smooth=True, keeps_dtype=True)
def lerp(b: Builder, self, end, weight) -> Value:
    """`self + weight * (end - self)`, computed from the nearer end"""
    if end.dtype is not self.dtype or not (weight.is_number or weight.dtype is self.dtype):
        raise Refusal("lerp of different dtypes is an error in eager")
    b.limit(weight, convertible(self.dtype), "the weight of lerp")
    return b.pointwise("lerp", "lerp({0}, {1}, {2})", (self, end, weight), self.dtype)
