"""Quotients of neighbours in memory by one divisor: what depends on the divisor alone is computed once.

In: a segment, for a machine whose division is a branch for each element. Out: the segment with a scale and a
reciprocal of such divisors, by which codegen/runtime/shared_divisor.h divides. All of it is cheap, as a
division is: schedules plan for the segment as they would without. Example, `x / norm` of x[N, C] and norm[N,
1]:

    pointwise('div', 'div', (x0, x1), float32, div_0)
    -> pointwise('div', 'divisor_scale', (x1), float32, x1_scale)
       pointwise('div', 'mul', (x1, x1_scale), float32, x1_divisor)
       pointwise('div', 'divisor_reciprocal', (x1_divisor), float32, x1_reciprocal)
       pointwise('div', 'shared_quotient', (x0, x1_divisor, x1_reciprocal, x1_scale), float32, div_0)
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import FLOAT
from ..ir.fusion import Axis, Op, Pointwise, Value
from ..ir.size import const
from ..ir.symbols import define, fast_of
from ..segment import Segment

define("divisor_scale", "divisor_scale({0})", cheap=True)
define("divisor_reciprocal", "divisor_reciprocal({0})", cheap=True)
FORMS = {
    "div": define("shared_quotient", "shared_quotient({0}, {1}, {2}, {3})", cheap=True),
    fast_of("div"): define("fast_shared_quotient", "fast_shared_quotient({0}, {1}, {2}, {3})", cheap=True),
}


def with_shared_divisors(segment: Segment) -> Segment:
    """`segment`, in which quotients of neighbours by one divisor take no branch."""
    parts: dict[str, tuple[Value, ...]] = {}
    ops: list[Op] = []
    inner = _inner_axes(segment)
    for op in segment.ops:
        if isinstance(op, Pointwise) and op.symbol in FORMS and _is_shared(op, inner):
            dividend, divisor = op.operands
            if divisor.name not in parts:
                made = _parts(op, divisor)
                ops += made
                scale, product, reciprocal = (p.output for p in made)
                parts[divisor.name] = product, reciprocal, scale
            op = replace(op, symbol=FORMS[op.symbol], operands=(dividend, *parts[divisor.name]))
        ops.append(op)
    return replace(segment, ops=tuple(ops)) if parts else segment


def _inner_axes(segment: Segment) -> set[Axis]:
    """The axes along which elements of tensors of all axes are neighbours in memory."""
    buffers = [*segment.loads, *segment.stores]
    most = max((len(b.value.axes) for b in buffers), default=0)
    whole = [b for b in buffers if len(b.value.axes) == most]
    return {axis for b in whole for axis in b.value.axes if b.stride(axis) == const(1)}


def _is_shared(op: Pointwise, inner: set[Axis]) -> bool:
    """Whether neighbours in memory have one divisor, in float32."""
    divisor = op.operands[1]
    if op.compute is not FLOAT or divisor.is_number:
        return False
    return not inner.isdisjoint(op.output.axes) and inner.isdisjoint(divisor.axes)


def _parts(op: Pointwise, divisor: Value) -> list[Pointwise]:
    """What makes the scale of the divisor, their product, and its reciprocal."""
    scale, product, reciprocal = (
        Value(f"{divisor.name}_{word}", FLOAT, divisor.dims) for word in ("scale", "divisor", "reciprocal")
    )
    return [
        Pointwise(op.name, "divisor_scale", (divisor,), FLOAT, scale),
        Pointwise(op.name, "mul", (divisor, scale), FLOAT, product),
        Pointwise(op.name, "divisor_reciprocal", (product,), FLOAT, reciprocal),
    ]
