"""Functions of one or two operands.

In: nothing. Out: rows; a template is the op's whole meaning, and names in it are functions of
`codegen/runtime/math.h` or of the C library.
"""

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.fusion import Value
from ..ir.symbols import CANCELS, Fast, define
from .elementwise import COMPARE, FLOAT, binary, elementwise, promoted, unary
from .table import ALL, BOOLEAN, COMPLEX, CONVERTED, FLOATING, INTEGRAL, NUMERIC, composite

_MOST_PLACES = 10  # float32 holds powers of ten up to this one

# How many times as large the relative error of x is in the result f(x) at most, x f'(x) / f(x), as far as x
# and f(x) are finite and not 0 in float32.
_EXP = (104,)
_ANY: dict[str, Any] = dict(grows=(CANCELS,))

# Results of the operand's dtype.
unary(
    "neg",
    "-({0})",
    dtypes=NUMERIC + COMPLEX,
    integer="wrap_neg({0})",
    in_place_early=True,
    cheap=True,
    grows=(1,),
)
unary("sign", "signum({0})", boolean="{0}", smooth=False)
unary("sgn", "signum({0})", boolean="{0}", smooth=False)
unary(
    "square",
    "({0} * {0})",
    dtypes=NUMERIC + COMPLEX,
    integer="wrap_mul({0}, {0})",
    cheap=True,
    grows=(2,),
    positive=True,
    dtype_rule="",  # of bools it gives integers
)
unary("ceil", "ceil({0})", dtypes=NUMERIC, integer="{0}", smooth=False)
unary("floor", "floor({0})", dtypes=NUMERIC, integer="{0}", smooth=False)
unary("round", "rint({0})", dtypes=NUMERIC, integer="{0}", smooth=False)  # half to even
define("round_to_places", "(rint({0} * {1}) / {1})")
define("round_to_tens", "(rint({0} / {1}) * {1})")
unary("trunc", "trunc({0})", dtypes=NUMERIC, integer="{0}", smooth=False)
unary("frac", "({0} - trunc({0}))", dtypes=FLOATING, smooth=False)
unary(
    "relu",
    "relu({0})",
    dtypes=NUMERIC,
    selects=True,
    in_place_early=True,
    derivative=("aten::threshold_backward", "aten::gt"),
    cheap=True,
    grows=(1,),
    positive=True,
)
unary(
    "silu",
    "silu({0})",
    dtypes=FLOATING,
    in_place_early=True,
    grows=_EXP,
    fast=Fast("fast_silu({0})", error=2**-16.5, exact=2**-21.5),
)
unary(
    "mish",
    "mish({0})",
    dtypes=FLOATING,
    in_place_early=True,
    **_ANY,
    fast=Fast("fast_mish({0})", error=2**-16, exact=2**-21),
)
unary(
    "selu",
    "selu({0})",
    dtypes=FLOATING,
    in_place_early=True,
    **_ANY,
    fast=Fast("fast_selu({0})", error=2**-16.5, exact=2**-22),
)
unary(
    "hardswish",
    "hardswish({0})",
    dtypes=FLOATING,
    in_place_early=True,
    derivative=("aten::hardswish_backward",),
    **_ANY,
    fast=Fast("fast_hardswish({0})", error=2**-22, exact=2**-22.4),
)
unary(
    "hardsigmoid",
    "hardsigmoid({0})",
    dtypes=FLOATING,
    in_place_early=True,
    **_ANY,
    fast=Fast("fast_hardsigmoid({0})", error=2**-22, exact=2**-22.4),
    positive=True,
)
unary("relu6", "clamp({0}, 0, 6)", dtypes=FLOATING, selects=True, in_place_early=True)
unary("bitwise_not", "~{0}", dtypes=BOOLEAN + INTEGRAL, boolean="!{0}", cheap=True)


@composite(
    "aten::round",
    "decimals",
    dtypes=("float32", "float64"),
    jumps=True,
    keeps_dtype=True,
    dtype_rule="first",
)
def round_decimals(b: Builder, self, decimals: int = 0) -> Value:
    """`self`, rounded to `decimals` decimals"""
    if decimals == 0:
        return elementwise(b, "round", (self,))
    if abs(decimals) > _MOST_PLACES:
        raise Refusal("rounding to a place whose power of ten no float holds exactly")
    symbol = "round_to_places" if decimals > 0 else "round_to_tens"
    return promoted(b, symbol, (self,), self.dtype, numbers=(b.literal(10.0 ** abs(decimals)),), name="round")


# Integers become the default floating dtype.
unary(
    "exp",
    "exp({0})",
    FLOAT,
    ALL,
    in_place_early=True,
    grows=_EXP,
    fast=Fast("fast_exp({0})", error=2**-16.5, exact=2**-22),
    positive=True,
)
unary("exp2", "exp2({0})", FLOAT)
unary("expm1", "expm1({0})", FLOAT, **_ANY, fast=Fast("fast_expm1({0})", error=2**-16.5, exact=2**-22))
unary("log", "log({0})", FLOAT, **_ANY, fast=Fast("fast_log({0})", error=2**-18, exact=2**-22))
unary(
    "log2", "log2({0})", FLOAT, **_ANY, fast=Fast("(fast_log({0}) * 1.44269504f)", error=2**-18, exact=2**-22)
)
unary(
    "log10",
    "log10({0})",
    FLOAT,
    **_ANY,
    fast=Fast("(fast_log({0}) * 0.43429448f)", error=2**-18, exact=2**-22),
)
unary("log1p", "log1p({0})", FLOAT, **_ANY, fast=Fast("fast_log1p({0})", error=2**-17.5, exact=2**-22))
unary(
    "sqrt",
    "sqrt({0})",
    FLOAT,
    in_place_early=True,
    grows=(0.5,),
    fast=Fast("fast_sqrt({0})", error=2**-22, exact=2**-24, algebraic=True),
    positive=True,
)
unary("rsqrt", "rsqrt({0})", FLOAT, in_place_early=True, grows=(0.5,), positive=True)
unary(
    "reciprocal",
    "(1 / {0})",
    FLOAT,
    ALL,
    complex="reciprocal({0})",
    cheap=True,
    grows=(1,),
    fast=Fast("fast_divide(1.0f, {0})", error=2**-21.5, exact=2**-24, algebraic=True),
)
unary("sin", "sin({0})", FLOAT, ALL, cost=40)
unary("cos", "cos({0})", FLOAT, ALL, cost=40)
unary("tan", "tan({0})", FLOAT, cost=45)
unary("asin", "asin({0})", FLOAT)
unary("acos", "acos({0})", FLOAT)
unary("atan", "atan({0})", FLOAT)
unary("sinh", "sinh({0})", FLOAT)
unary("cosh", "cosh({0})", FLOAT)
unary(
    "tanh",
    "tanh({0})",
    FLOAT,
    in_place_early=True,
    grows=(1,),
    fast=Fast("fast_tanh({0})", error=2**-17, exact=2**-22),
)
unary("asinh", "asinh({0})", FLOAT)
unary("acosh", "acosh({0})", FLOAT)
unary("atanh", "atanh({0})", FLOAT)
unary("erf", "erf({0})", FLOAT)
unary("erfc", "erfc({0})", FLOAT)
unary("erfinv", "erfinv({0})", FLOAT)
unary("lgamma", "lgamma({0})", FLOAT, cost=60)
unary(
    "sigmoid",
    "sigmoid({0})",
    FLOAT,
    in_place_early=True,
    grows=_EXP,
    fast=Fast("fast_sigmoid({0})", error=2**-16.5, exact=2**-21.5),
    positive=True,
)
unary("sinc", "sinc({0})", FLOAT, cost=50)
unary("deg2rad", "deg2rad({0})", FLOAT)
unary("rad2deg", "rad2deg({0})", FLOAT)
unary("special_entr", "entropy({0})", FLOAT, smooth=False)
unary("special_ndtr", "normal_cdf({0})", FLOAT, error="operands")

binary("atan2", "atan2({0}, {1})", FLOAT, overloads=("",), smooth=False, cost=45)
binary("copysign", "copysign({0}, {1})", FLOAT, smooth=False)
_LOG: dict[str, Any] = dict(rule=FLOAT, exact=True)
binary("xlogy", "xlogy({0}, {1})", overloads=("Tensor", "Scalar_Other", "Scalar_Self"), **_LOG)
binary("special_xlog1py", "xlog1py({0}, {1})", overloads=("", "other_scalar", "self_scalar"), **_LOG)
binary("hypot", "hypot({0}, {1})", dtypes=FLOATING, overloads=("",))
binary("logaddexp", "logaddexp({0}, {1})", dtypes=FLOATING, overloads=("",), error="operands")
binary("logaddexp2", "logaddexp2({0}, {1})", dtypes=FLOATING, overloads=("",), error="operands")
binary("nextafter", "nextafter({0}, {1})", dtypes=("float32", "float64"), overloads=("",), smooth=False)

# Tests of one operand.
unary("isnan", "is_nan({0})", COMPARE, CONVERTED, integer="false", boolean="false")
unary("isinf", "is_inf({0})", COMPARE, ALL, integer="false", boolean="false")
unary("isfinite", "is_finite({0})", COMPARE, ALL, integer="true", boolean="true")
unary("isposinf", "({0} > 0 && is_inf({0}))", COMPARE, integer="false", boolean="false")
unary("isneginf", "({0} < 0 && is_inf({0}))", COMPARE, integer="false", boolean="false")
unary("isreal", "true", COMPARE, ALL, complex="({0}.im == 0)", cheap=True)
unary("signbit", "is_negative({0})", COMPARE, integer="({0} < 0)", boolean="false")
unary("logical_not", "!convert<bool>({0})", COMPARE, ALL, cheap=True)
