"""Rows that are one C++ expression.

In: a template (`{0}`, `{1}` stand for the operands in the compute type) and a dtype rule. Out: rows.
Example:

    binary("atan2", "atan2({0}, {1})", FLOAT, overloads=("",))
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import BFLOAT16, BOOL, HALF, NARROW, DType
from ..ir.fusion import Pointwise, Value
from ..ir.limits import convertible
from ..ir.symbols import ROUNDING, define
from ..ir.symbols import rounded as rounded_to
from .table import ALL, BOOLEAN, INTEGRAL, REAL, Row, register

for _dtype in NARROW:
    # without `grows`, which allows no fast forms: forward and backward must round the same number, since
    # numbers near the middle between two of 16 bits become either of them
    define(f"{ROUNDING}{_dtype}", rounded_to("{0}", _dtype), cheap=True)

DEFAULT = "default"  #: the promoted dtype of the operands
FLOAT = "float"  #: as DEFAULT, but bool and integers become the default floating dtype
COMPARE = "compare"  #: computed in the promoted dtype, the result is bool


def unary(
    name: str,
    template: str,
    rule: str = DEFAULT,
    dtypes: Sequence[str] = REAL,
    in_place_early: bool = False,
    smooth: bool = True,
    selects: bool = False,
    error: str = "result",
    derivative: tuple[str, ...] = (),
    dtype_rule: str = "first",
    **facts_of_symbol,
) -> None:
    """The row of `aten::name(Tensor self)`, and its symbol. `dtype_rule`: see `table.Row`, by DEFAULT only.
    `facts_of_symbol`: see `ir.symbols.define`."""
    symbol = define(name, template, **facts_of_symbol)

    jumps = not smooth or rule == COMPARE

    def evaluate(b: Builder, self: Value) -> Value:
        return elementwise(b, symbol, as_stored(b, self) if jumps else (self,), rule, dtypes)

    facts = {
        "jumps": jumps,
        "selects": selects,
        "in_place_early": in_place_early,
        "error": error,
        "derivative": derivative,
        "dtype_rule": dtype_rule if rule == DEFAULT else "",
    }
    _register(name, ("",), template, rule, dtypes, evaluate, smooth, **facts)


def binary(
    name: str,
    template: str,
    rule: str = DEFAULT,
    dtypes: Sequence[str] = REAL,
    overloads: Sequence[str] = ("Tensor", "Scalar"),
    exact: bool = False,
    smooth: bool = True,
    selects: bool = False,
    in_place_early: bool = False,
    identity: Mapping[str, float] | None = None,
    error: str = "result",
    **facts_of_symbol,
) -> None:
    """The row of `aten::name(self, other)`, both Tensors or one of them a Scalar, and its symbol.
    `exact`: see `fit`; `facts_of_symbol`: see `ir.symbols.define`."""
    symbol = define(name, template, **facts_of_symbol)

    jumps = not smooth or rule == COMPARE

    def evaluate(b: Builder, self: Value, other: Value) -> Value:
        operands = as_stored(b, self, other) if jumps else (self, other)
        return elementwise(b, symbol, operands, rule, dtypes, exact)

    facts = {
        "jumps": jumps,
        "selects": selects,
        "in_place_early": in_place_early,
        "identity": identity or {},
        "error": error,
        "dtype_rule": "promoted" if rule == DEFAULT else "",
    }
    _register(name, overloads, template, rule, dtypes, evaluate, smooth, **facts)


def _register(
    name: str,
    overloads: Sequence[str],
    template: str,
    rule: str,
    dtypes: Sequence[str],
    evaluate: Callable,
    smooth: bool,
    **facts,
) -> None:
    """Adds the row. A result that is bool, or that whole numbers alone have, is not smooth."""
    fractional = rule != COMPARE and not set(dtypes) <= {*BOOLEAN, *INTEGRAL}
    facts |= {"smooth": smooth and fractional, "keeps_dtype": fractional}
    row = Row(
        f"aten::{name}",
        tuple(overloads),
        tuple(dtypes),
        evaluate,
        "broadcast",
        "pointwise",
        f"`{template}`",
        flat=rule == COMPARE,
        **facts,
    )
    register(row)


def elementwise(
    b: Builder,
    symbol: str,
    operands: Sequence[Value],
    rule: str = DEFAULT,
    dtypes: Sequence[str] = ALL,
    exact: bool = False,
    scalars: bool = True,
    name: str = "",
) -> Value:
    """One pointwise op over `operands` in their common dtype, by `rule`, which must be one of `dtypes`.
    `exact`: see `fit`; `scalars`: see `promoted`. `name` is that of the result, else the symbol's."""
    compute = b.promote(*operands)
    if compute.name not in dtypes:
        raise Refusal(f"{name or symbol} in {compute} is not supported")
    if rule == FLOAT:
        compute = b.floating(compute)
    result = BOOL if rule == COMPARE else compute
    exact = exact or rule == COMPARE
    return promoted(b, symbol, operands, compute, result, (), exact, scalars, name)


def promoted(
    b: Builder,
    symbol: str,
    operands: Sequence[Value],
    dtype: DType,
    result: DType | None = None,
    numbers: Sequence[Value] = (),
    exact: bool = False,
    scalars: bool = True,
    name: str = "",
) -> Value:
    """A pointwise op of `operands` in their common dtype `dtype`, and of `numbers`, which do not count for
    that, and which eager converts to it; the result has the dtype `result`, or `dtype`. `scalars`: whether
    numbers among the operands are tensors without dims to eager's iterator, as in `x + 1`, or the op's own.

    The result lies in memory as where an iterator of eager's has `promote_inputs_to_common_dtype`. All those
    have it that take several dtypes (TensorIterator.cpp: `BINARY_OP_CONFIG`, `COMPARISON_OP_CONFIG`,
    `UNARY_FLOAT_OP_CONFIG`, `build_ternary_op`; clamp, threshold_backward): arithmetic, powers, comparisons,
    logic, bits, extrema, clamp, addcmul, addcdiv, derivatives. `where` and `float_power` cast by themselves,
    on each device; lerp, heaviside, prelu and gelu's derivative take one dtype only."""
    converted(b, name or symbol, dtype, *numbers)
    layouts = b.promoted_layouts([v for v in operands if scalars or not v.is_number], dtype)
    given = (*fit(b, operands, dtype, exact), *numbers)
    return b.pointwise(symbol, given, result or dtype, dtype, layouts=layouts, name=name)


def converted(b: Builder, name: str, dtype: DType, *numbers: Value | None) -> None:
    """Says that eager's op converts `numbers` to `dtype`, with an error where one does not fit."""
    for number in numbers:
        b.limit(number, convertible(dtype), f"a number of {name}")


def fit(b: Builder, operands: Sequence[Value], dtype: DType, exact: bool = False) -> tuple[Value, ...]:
    """`operands` as eager would see them in `dtype`. That matters for the 16-bit floats: integers with dims
    are rounded to them (70000 is inf in float16); numbers and 0-dim tensors stay in float, as in eager's
    arithmetic, or are rounded too if `exact` (comparisons). And what torch does not compute in, it casts."""
    if not dtype.computes:
        return tuple(b.cast(v, dtype) for v in operands)
    if dtype.register is dtype:
        return tuple(operands)
    return tuple(round_number(b, v, dtype) if exact or v.dims else v for v in operands)


def round_number(b: Builder, value: Value, dtype: DType) -> Value:
    """`value` rounded to the 16-bit float `dtype`; a literal is rounded here, so that `x > 0` needs no
    conversion."""
    if value.dtype is dtype or value.dtype is BOOL:
        return value
    if value.literal is None or isinstance(value.literal, complex):
        return b.cast(value, dtype)
    return b.literal(rounded(float(value.literal), dtype))


def compared(b: Builder, threshold: Value, dtype: DType) -> Value:
    """`threshold` as eager's kernels of `threshold` and its gradient compare it with values of `dtype`: on
    the CPU they compare in float32 where these have 16 bits."""
    if not dtype.is_floating:
        return threshold
    return round_number(b, threshold, dtype.register if b.device == "cpu" else dtype)


def as_stored(b: Builder, *operands: Value) -> tuple[Value, ...]:
    """`operands`, of which tensors of 16 bits are rounded as eager stores them. What jumps reads them so: a
    group keeps more digits, with which `x == x.amax()` might hold for no element."""
    return tuple(v if is_rounded(b, v) else _rounded_as_stored(b, v) for v in operands)


def _rounded_as_stored(b: Builder, value: Value) -> Value:
    return b.copied(b.pointwise(f"stored_as_{value.dtype}", (value,), value.dtype, layouts=()), value)


def is_rounded(b: Builder, value: Value) -> bool:
    """Whether the value is a number of its dtype already: where it was read from memory, or has been cast."""
    dtype = value.dtype
    if dtype.register is dtype or value.is_number or b.input_of(value) is not None:
        return True
    made = next((op for op in b.ops if op.output.name == value.name), None)
    return isinstance(made, Pointwise) and made.symbol in (f"round_to_{dtype}", f"stored_as_{dtype}")


def rounded(x: float, dtype: DType) -> float:
    """The number nearest to `x` in `dtype`, by way of float32 as in c10."""
    if dtype.is_floating and dtype.itemsize == 8:
        return x
    if x != x or x in (float("inf"), -float("inf")):
        return x
    try:
        x = struct.unpack("<f", struct.pack("<f", x))[0]
        if dtype is HALF:
            return struct.unpack("<e", struct.pack("<e", x))[0]
    except OverflowError:
        return float("inf") if x > 0 else -float("inf")
    if dtype is BFLOAT16:
        bits = struct.unpack("<I", struct.pack("<f", x))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return x
