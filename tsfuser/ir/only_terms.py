"""Sums with only one term that is not 0.

In: a value that is 0, but at one place along an axis, and the sum over that axis. Out: the sum as an
elementwise op, which reads nothing along the axis. Example, the gradient of a loss of class indices, g over
rows a, t the class of each row:

    sum over b of (g[a] if t[a] is b else 0) = g[a] if 0 <= t[a] < size of b else 0
"""

from __future__ import annotations

from .draft import Draft
from .fusion import Axis, Op, Pointwise, Position, Value
from .symbols import define

define("is_index", "({0} >= 0 && {0} < {1})", cheap=True)


def only_term(draft: Draft, operand: Value, axis: Axis) -> tuple[Value, Value] | None:
    """The number of the place along `axis` at which `operand` is not 0, and the element there; neither varies
    along the axis. None for other values."""
    made = _maker(draft, operand)
    while isinstance(made, Pointwise) and made.symbol == "copy":
        made = _maker(draft, made.operands[0])
    if not isinstance(made, Pointwise) or made.symbol != "where":
        return None
    here, element, zero = made.operands
    asked = _maker(draft, here)
    if not isinstance(asked, Pointwise) or asked.symbol != "eq" or zero.literal != 0:
        return None
    index, place = asked.operands
    numbered = _maker(draft, place)
    if not isinstance(numbered, Position) or set(map(draft.axis, numbered.window.axes)) != {draft.axis(axis)}:
        return None
    return None if _varies(draft, index, axis) or _varies(draft, element, axis) else (index, element)


def _maker(draft: Draft, value: Value) -> Op | None:
    return next((op for op in reversed(draft.ops) if op.output.name == value.name), None)


def _varies(draft: Draft, value: Value, axis: Axis) -> bool:
    if value.is_number:
        return False
    own = {loop for a in value.axes for loop in draft.axes.parts(a)}
    return not own.isdisjoint(draft.axes.parts(axis))
