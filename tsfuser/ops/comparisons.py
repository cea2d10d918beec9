"""Comparisons, logic and bits: rows whose operands are taken as they are, exactly."""

from .elementwise import COMPARE, binary
from .table import ALL, BOOLEAN, CONVERTED, INTEGRAL

_BITS = BOOLEAN + INTEGRAL
_SCALARS = ("Tensor", "Scalar", "Scalar_Tensor")
_SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")

binary("eq", "({0} == {1})", COMPARE, CONVERTED, cheap=True)
binary("ne", "({0} != {1})", COMPARE, CONVERTED, cheap=True)
binary("lt", "({0} < {1})", COMPARE, cheap=True)
binary("le", "({0} <= {1})", COMPARE, cheap=True)
binary("gt", "({0} > {1})", COMPARE, cheap=True)
binary("ge", "({0} >= {1})", COMPARE, cheap=True)

binary("logical_and", "(convert<bool>({0}) && convert<bool>({1}))", COMPARE, ALL, overloads=("",), cheap=True)
binary("logical_or", "(convert<bool>({0}) || convert<bool>({1}))", COMPARE, ALL, overloads=("",), cheap=True)
binary("logical_xor", "(convert<bool>({0}) != convert<bool>({1}))", COMPARE, ALL, overloads=("",), cheap=True)

binary("bitwise_and", "({0} & {1})", dtypes=_BITS, overloads=_SCALARS, cheap=True)
binary("bitwise_or", "({0} | {1})", dtypes=_BITS, overloads=_SCALARS, cheap=True)
binary("bitwise_xor", "({0} ^ {1})", dtypes=_BITS, overloads=_SCALARS, cheap=True)
binary("__and__", "({0} & {1})", dtypes=_BITS, cheap=True)
binary("__or__", "({0} | {1})", dtypes=_BITS, cheap=True)
binary("__xor__", "({0} ^ {1})", dtypes=_BITS, cheap=True)
binary("bitwise_left_shift", "shift_left({0}, {1})", dtypes=INTEGRAL, overloads=_SHIFTS)
binary("bitwise_right_shift", "shift_right({0}, {1})", dtypes=INTEGRAL, overloads=_SHIFTS)
binary("__lshift__", "shift_left({0}, {1})", dtypes=INTEGRAL)
binary("__rshift__", "shift_right({0}, {1})", dtypes=INTEGRAL)
