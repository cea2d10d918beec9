"""C spellings of numbers.

In: a Python number and the dtype it is used as. Out: a literal of exactly that type. Example: `literal(0.1,
FLOAT) == "0.1f"`.
"""

from __future__ import annotations

import math

from ..ir.dtypes import COMPLEX64, DOUBLE, FLOAT, DType


def literal(value: bool | int | float | complex, dtype: DType) -> str:
    """`value` converted to `dtype` as torch converts a Python scalar (a float loses its fraction where an
    integer is wanted)."""
    dtype = dtype.register
    if dtype.kind == "c":
        part = FLOAT if dtype is COMPLEX64 else DOUBLE
        value = complex(value)
        return f"{dtype.ctype}({literal(value.real, part)}, {literal(value.imag, part)})"
    if dtype.kind == "b":
        return "true" if value else "false"
    assert not isinstance(value, complex)
    if dtype.kind == "f":
        return _floating(float(value), dtype)
    value = int(value)
    if dtype.itemsize == 8 and not dtype.is_unsigned:
        text = "-9223372036854775807ll - 1" if value == -(1 << 63) else f"{value}ll"
        return f"{dtype.ctype}({text})"  # int64_t is `long` on some hosts
    low = 1 << (8 * dtype.itemsize)
    value %= low  # torch wraps too
    if not dtype.is_unsigned and value >= low // 2:
        value -= low
    return f"{dtype.ctype}({value}{'u' * dtype.is_unsigned}ll)"


def _floating(value: float, dtype: DType) -> str:
    if math.isnan(value):
        return f"not_a_number<{dtype.ctype}>()"
    if math.isinf(value) or (dtype is FLOAT and abs(value) > 3.4028235677973366e38):
        return f"{'-' if value < 0 else ''}infinity<{dtype.ctype}>()"
    text = repr(value)
    if "." not in text and "e" not in text:
        text += ".0"
    text += "f" if dtype is FLOAT else ""
    return f"({text})" if text.startswith("-") else text
