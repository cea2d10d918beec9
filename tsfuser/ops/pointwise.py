"""Functions of one or two operands.

In: nothing. Out: rows; a template is the op's whole meaning, and names in it are functions of
`codegen/runtime/math.h` or of the C library.
"""

from .elementwise import COMPARE, FLOAT, binary, unary
from .table import ALL, BOOLEAN, COMPLEX, FLOATING, INTEGRAL, NUMERIC

# Results of the operand's dtype.
unary("neg", "-({0})", dtypes=NUMERIC + COMPLEX, integer="wrap_neg({0})", in_place_early=True, cheap=True)
unary("sign", "signum({0})", boolean="{0}", smooth=False)
unary("sgn", "signum({0})", boolean="{0}", smooth=False)
unary("square", "({0} * {0})", dtypes=NUMERIC + COMPLEX, integer="wrap_mul({0}, {0})", cheap=True)
unary("ceil", "ceil({0})", dtypes=NUMERIC, integer="{0}", smooth=False)
unary("floor", "floor({0})", dtypes=NUMERIC, integer="{0}", smooth=False)
unary("round", "rint({0})", dtypes=NUMERIC, integer="{0}", smooth=False)  # half to even
unary("trunc", "trunc({0})", dtypes=NUMERIC, integer="{0}", smooth=False)
unary("frac", "({0} - trunc({0}))", dtypes=FLOATING, smooth=False)
unary("relu", "relu({0})", dtypes=NUMERIC, in_place_early=True, cheap=True)
unary("silu", "silu({0})", dtypes=FLOATING, in_place_early=True)
unary("mish", "mish({0})", dtypes=FLOATING, in_place_early=True)
unary("selu", "selu({0})", dtypes=FLOATING, in_place_early=True)
unary("hardswish", "hardswish({0})", dtypes=FLOATING, in_place_early=True)
unary("hardsigmoid", "hardsigmoid({0})", dtypes=FLOATING, in_place_early=True)
unary("relu6", "clamp({0}, 0, 6)", dtypes=FLOATING, in_place_early=True)
unary("bitwise_not", "~{0}", dtypes=BOOLEAN + INTEGRAL, boolean="!{0}", cheap=True)

# Integers become the default floating dtype.
unary("exp", "exp({0})", FLOAT, ALL, in_place_early=True)
unary("exp2", "exp2({0})", FLOAT)
unary("expm1", "expm1({0})", FLOAT)
unary("log", "log({0})", FLOAT)
unary("log2", "log2({0})", FLOAT)
unary("log10", "log10({0})", FLOAT)
unary("log1p", "log1p({0})", FLOAT)
unary("sqrt", "sqrt({0})", FLOAT, in_place_early=True)
unary("rsqrt", "rsqrt({0})", FLOAT, in_place_early=True)
unary("reciprocal", "(1 / {0})", FLOAT, ALL, complex="reciprocal({0})", cheap=True)
unary("sin", "sin({0})", FLOAT, ALL)
unary("cos", "cos({0})", FLOAT, ALL)
unary("tan", "tan({0})", FLOAT)
unary("asin", "asin({0})", FLOAT)
unary("acos", "acos({0})", FLOAT)
unary("atan", "atan({0})", FLOAT)
unary("sinh", "sinh({0})", FLOAT)
unary("cosh", "cosh({0})", FLOAT)
unary("tanh", "tanh({0})", FLOAT, in_place_early=True)
unary("asinh", "asinh({0})", FLOAT)
unary("acosh", "acosh({0})", FLOAT)
unary("atanh", "atanh({0})", FLOAT)
unary("erf", "erf({0})", FLOAT)
unary("erfc", "erfc({0})", FLOAT)
unary("erfinv", "erfinv({0})", FLOAT)
unary("lgamma", "lgamma({0})", FLOAT)
unary("sigmoid", "sigmoid({0})", FLOAT, in_place_early=True)
unary("sinc", "sinc({0})", FLOAT)
unary("deg2rad", "deg2rad({0})", FLOAT)
unary("rad2deg", "rad2deg({0})", FLOAT)
unary("special_entr", "entropy({0})", FLOAT, smooth=False)
unary("special_ndtr", "normal_cdf({0})", FLOAT, error="operands")

binary("atan2", "atan2({0}, {1})", FLOAT, overloads=("",), smooth=False)
binary("copysign", "copysign({0}, {1})", FLOAT, smooth=False)
_LOG = dict(rule=FLOAT, exact=True)
binary("xlogy", "xlogy({0}, {1})", overloads=("Tensor", "Scalar_Other", "Scalar_Self"), **_LOG)
binary("special_xlog1py", "xlog1py({0}, {1})", overloads=("", "other_scalar", "self_scalar"), **_LOG)
binary("hypot", "hypot({0}, {1})", dtypes=FLOATING, overloads=("",))
binary("logaddexp", "logaddexp({0}, {1})", dtypes=FLOATING, overloads=("",), error="operands")
binary("logaddexp2", "logaddexp2({0}, {1})", dtypes=FLOATING, overloads=("",), error="operands")
binary("nextafter", "nextafter({0}, {1})", dtypes=("float32", "float64"), overloads=("",), smooth=False)

# Tests of one operand.
unary("isnan", "is_nan({0})", COMPARE, ALL, integer="false", boolean="false")
unary("isinf", "is_inf({0})", COMPARE, ALL, integer="false", boolean="false")
unary("isfinite", "is_finite({0})", COMPARE, ALL, integer="true", boolean="true")
unary("isposinf", "({0} > 0 && is_inf({0}))", COMPARE, integer="false", boolean="false")
unary("isneginf", "({0} < 0 && is_inf({0}))", COMPARE, integer="false", boolean="false")
unary("isreal", "true", COMPARE, ALL, complex="({0}.im == 0)", cheap=True)
unary("signbit", "is_negative({0})", COMPARE, integer="({0} < 0)", boolean="false")
unary("logical_not", "!convert<bool>({0})", COMPARE, ALL, cheap=True)
