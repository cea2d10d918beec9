"""Choices between values: extrema, clamps, `where`."""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import BFLOAT16, BOOL, DType
from ..ir.fusion import Value
from ..ir.limits import convertible
from ..ir.symbols import CANCELS, define
from .arithmetic import check_number
from .elementwise import as_stored, binary, compared, converted, elementwise, fit, round_number
from .table import ALL, BOOLEAN, FLOAT8, FLOATING, NUMERIC, REAL, composite

define("where", "({0} ? convert<{ctype}>({1}) : convert<{ctype}>({2}))", cheap=True, grows=(CANCELS, 1, 1))
define("nan_to_num", "nan_to_num({0}, {1}, {2}, {3})")
define("heaviside", "({0} == 0 ? {1} : ({0} > 0))", cheap=True)
define("threshold", "({0} <= {1} ? {2} : {0})", cheap=True)

_WHERE = "with a number that is computed (it knows torch.where of two tensors, or with a number of the code)"
_FILL = "with a value that is computed (it knows numbers of the code, and torch.where of two tensors)"

_CHOICE: dict[str, Any] = dict(selects=True, cheap=True, grows=(1, 1))
# NaN if either operand is NaN.
binary("maximum", "nan_max({0}, {1})", overloads=("",), boolean="({0} || {1})", **_CHOICE)
binary("minimum", "nan_min({0}, {1})", overloads=("",), boolean="({0} && {1})", **_CHOICE)
binary("max", "nan_max({0}, {1})", overloads=("other",), boolean="({0} || {1})", **_CHOICE)
binary("min", "nan_min({0}, {1})", overloads=("other",), boolean="({0} && {1})", **_CHOICE)
define("fmax", "number_max({0}, {1})", integer="nan_max({0}, {1})", boolean="({0} || {1})")
define("fmin", "number_min({0}, {1})", integer="nan_min({0}, {1})", boolean="({0} && {1})")
define("fmax_swapped", "number_max({1}, {0})")
define("fmin_swapped", "number_min({1}, {0})")


def _number_of_two(b: Builder, name: str, self: Value, other: Value) -> Value:
    """Of 0 and -0 eager's kernels for the CPU return the first operand, for bfloat16 the second."""
    swapped = b.device == "cpu" and b.promote(self, other) is BFLOAT16
    return elementwise(b, f"{name}_swapped" if swapped else name, (self, other), dtypes=REAL, name=name)


_NUMBER_OF_TWO: dict[str, Any] = dict(smooth=True, keeps_dtype=True, selects=True, dtype_rule="promoted")


@composite("aten::fmax", **_NUMBER_OF_TWO)
def fmax(b: Builder, self, other) -> Value:
    """the larger operand, or the other one if one is NaN"""
    return _number_of_two(b, "fmax", self, other)


@composite("aten::fmin", **_NUMBER_OF_TWO)
def fmin(b: Builder, self, other) -> Value:
    """the smaller operand, or the other one if one is NaN"""
    return _number_of_two(b, "fmin", self, other)


@composite(
    "aten::clamp",
    "",
    "Tensor",
    dtypes=NUMERIC,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    selects=True,
)
def clamp(b: Builder, self, min=None, max=None) -> Value:
    """`min(max(self, lower), upper)`; NaN if any of the three is"""
    if min is None and max is None:
        raise Refusal("clamp without bounds is an error in eager")
    bounds = [v for v in (min, max) if v is not None]
    _check_bounds(b, self, *bounds)
    symbol = "clamp" if len(bounds) == 2 else "maximum" if max is None else "minimum"
    return elementwise(b, symbol, (self, *bounds), scalars=False, name="clamp")


def _check_bounds(b: Builder, self: Value, *bounds: Value) -> None:
    converted(b, "clamp", b.promote(self, *bounds), *bounds)


@composite(
    "aten::clamp_min",
    "",
    "Tensor",
    dtypes=NUMERIC,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    selects=True,
)
def clamp_min(b: Builder, self, min) -> Value:
    """`max(self, min)`, NaN if either is"""
    _check_bounds(b, self, min)
    return elementwise(b, "maximum", (self, min), scalars=False, name="clamp_min")


@composite(
    "aten::clamp_max",
    "",
    "Tensor",
    dtypes=NUMERIC,
    smooth=True,
    keeps_dtype=True,
    in_place_early=True,
    selects=True,
)
def clamp_max(b: Builder, self, max) -> Value:
    """`min(self, max)`, NaN if either is"""
    _check_bounds(b, self, max)
    return elementwise(b, "minimum", (self, max), scalars=False, name="clamp_max")


def select(b: Builder, name: str, condition: Value, yes: Value, no: Value, dtype: DType) -> Value:
    """`condition ? yes : no` in `dtype`, each operand coming in its own type."""
    converted(b, name, dtype, yes, no)
    layouts = (*b.cast_layouts((condition,), BOOL), *b.cast_layouts((yes, no), dtype))
    operands = (condition, *fit(b, (yes, no), dtype, exact=True))
    return b.pointwise("where", operands, dtype, own_types=True, layouts=layouts, name=name)


@composite(
    "aten::where",
    "self",
    "ScalarSelf",
    "ScalarOther",
    "Scalar",
    dtypes=ALL + FLOAT8,
    smooth=True,
    instead=_WHERE,
    keeps_dtype=True,
    selects=True,
)
def where(b: Builder, condition, self, other) -> Value:
    """`condition ? self : other`"""
    if condition.dtype is not BOOL:
        raise Refusal("the condition of `where` is not bool")
    return select(b, "where", condition, self, other, b.promote(self, other))


@composite(
    "aten::masked_fill",
    "Scalar",
    "Tensor",
    dtypes=ALL,
    smooth=True,
    instead=_FILL,
    keeps_dtype=True,
    in_place_differs=True,
    selects=True,
)
def masked_fill(b: Builder, self, mask, value) -> Value:
    """`mask ? value : self`"""
    if mask.dtype is not BOOL:
        raise Refusal("the mask of `masked_fill` is not bool")
    if value.dims:
        raise Refusal("masked_fill with a value that has dimensions is an error in eager")
    check_number(b, value, self.dtype, "the value of masked_fill")
    if not value.is_number:
        b.limit_element(value, convertible(self.dtype), "the value of masked_fill")
    return b.contiguous(select(b, "masked_fill", mask, value, self, self.dtype))


@composite("aten::nan_to_num", dtypes=REAL, smooth=True, keeps_dtype=True, selects=True)
def nan_to_num(b: Builder, self, nan=None, posinf=None, neginf=None) -> Value:
    """`self` with numbers for NaN, inf and -inf: 0 and the largest and lowest of its dtype unless given"""
    if self.dtype.name not in FLOATING:
        return b.pointwise("copy", (self,), self.dtype, name="nan_to_num")
    most = self.dtype.largest
    defaults = zip((nan, posinf, neginf), (0.0, most, -most))
    numbers = [b.literal(default) if v is None else round_number(b, v, self.dtype) for v, default in defaults]
    made = b.pointwise("nan_to_num", (self, *numbers), self.dtype, layouts=())
    return b.copied(made, self)


@composite("aten::heaviside", dtypes=BOOLEAN + NUMERIC, jumps=True, keeps_dtype=True)
def heaviside(b: Builder, self, values) -> Value:
    """0 below, 1 above and `values` at zero"""
    if self.dtype is not values.dtype:
        raise Refusal("heaviside of different dtypes is an error in eager")
    return b.pointwise("heaviside", (*as_stored(b, self), values), self.dtype)


@composite(
    "aten::threshold",
    dtypes=NUMERIC,
    jumps=True,
    keeps_dtype=True,
    in_place_early=True,
    derivative=("aten::threshold_backward", "aten::ge"),
    selects=True,
)
def threshold(b: Builder, self, threshold, value) -> Value:
    """`self <= threshold ? value : self`"""
    check_number(b, threshold, self.dtype, "the threshold")
    check_number(b, value, self.dtype, "the value")
    threshold = compared(b, threshold, self.dtype)
    return b.pointwise("threshold", (*as_stored(b, self), threshold, value), self.dtype)


@composite(
    "tsfuser::additive_mask",
    dtypes=BOOLEAN + FLOATING,
    sizes="first",
    smooth=True,
    keeps_dtype=True,
    fresh=False,
    asked="query",
)
def additive_mask(b: Builder, mask, query, fill) -> Value:
    """0 where `mask` is true, `fill` elsewhere, in the dtype of `query`"""
    if mask.dtype is not BOOL or not query.dtype.is_floating:
        raise Refusal("only a mask of bools, for a floating query, is converted")
    return select(b, "additive_mask", mask, b.literal(0.0), fill, query.dtype)
