"""Whether a value is gelu, in its tanh form, of another: as one op or written out.

In: a value and the one that it was computed from, %x. Out: whether it is. What is written out is brought into
the form

    plain(x) + with_tanh(x) * tanh(argument(x))

of three polynomials, so the order of factors and terms does not matter. Casts to floating dtypes and reshapes
are passed by. Example: `x * 0.5 * (1 + tanh(0.79788456 * (x + 0.044715 * x * x * x)))` is
`Form({1: 0.5}, {1: 0.5}, {1: 0.79788456, 3: 0.03567741})`, which is gelu (Hendrycks and Gimpel, "Gaussian
Error Linear Units", https://arxiv.org/abs/1606.08415)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ..graph.rows import is_cast, row_of
from ..graph.wrapper import Node, Value, constant_of, facts, inputs, is_constant, is_tensor, outputs

MOST_NODES = 40  # that are looked at: gelu written out takes about ten, each read at most twice

Powers = dict[int, float]  # power of x -> its coefficient


class Form(NamedTuple):
    """`plain + with_tanh * tanh(argument)`."""

    plain: Powers
    with_tanh: Powers
    argument: Powers


_SLOPE = math.sqrt(2 / math.pi)
_X = Form({1: 1.0}, {}, {})
_GELU = Form({1: 0.5}, {1: 0.5}, {1: _SLOPE, 3: _SLOPE * 0.044715})


def is_gelu(value: Value, x: Value) -> bool:
    """Whether `value` is gelu of `x`, which has 16 bits. There may be casts to wider dtypes only if the last
    op is a cast, too, and reads nothing but the value, constants and what `x` is."""
    last = last_op(value)
    ends_with_cast = is_cast(last)
    if ends_with_cast and not all(_is_known(v, x) for v in inputs(last)[1:]):
        return False
    reader = _Reader(x, ends_with_cast)
    node = last_op(last.inputsAt(0)) if ends_with_cast else last
    if node.kind() == "aten::gelu":
        in_tanh_form = is_constant(node.inputsAt(1)) and constant_of(node.inputsAt(1)) == "tanh"
        return in_tanh_form and reader.form(node.inputsAt(0)) == _X
    form = reader.form(value)
    return form is not None and all(map(_are_close, form, _GELU))


def _is_known(value: Value, x: Value) -> bool:
    asked = value.node().inputsAt(0) if value.node().kind() == "prim::dtype" else value
    return is_constant(value) or asked.unique() == x.unique()


def last_op(value: Value) -> Node:
    """What makes the value, perhaps in other dims."""
    return _through_reshapes(value).node()


def is_reshape(node: Node) -> bool:
    """Whether the result has the operand's elements in their order, perhaps in other dims."""
    found = row_of(node)
    return found is not None and found[0].is_view and found[0].reshapes


def _through_reshapes(value: Value) -> Value:
    while is_reshape(value.node()):
        value = value.node().inputsAt(0)
    return value


def _are_close(a: Powers, b: Powers) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[n], b[n], rel_tol=1e-6) for n in a)


class _Reader:
    """Reads the graph between a value and `x`."""

    def __init__(self, x: Value, casts: bool):
        self.x = x
        #: of casts that keep the values of x
        self.dtypes = (facts(x.type()).dtype, "float32", "float64") if casts else ()
        self.left = MOST_NODES

    def form(self, value: Value) -> Form | None:
        """The form of a tensor or a number; None where it has none."""
        if value.unique() == self.x.unique():
            return _X
        if is_constant(value):
            number = constant_of(value)
            return Form({0: float(number)}, {}, {}) if type(number) in (int, float) else None
        self.left -= 1
        node = value.node()
        if self.left < 0 or len(outputs(node)) != 1 or not is_tensor(value):
            return None
        if is_reshape(node) or is_cast(node) and facts(value.type()).dtype in self.dtypes:
            return self.form(node.inputsAt(0))
        rule = _RULES.get(node.kind())
        forms = [self.form(v) for v in inputs(node)[:2]] if rule else []
        return rule(node, *forms) if rule and None not in forms else None


def _sum(node: Node, a: Form, b: Form) -> Form | None:
    scale = inputs(node)[2:]
    if any(not is_constant(v) or constant_of(v) != 1 for v in scale) or _differ(a, b):
        return None
    return Form(_added(a.plain, b.plain), _added(a.with_tanh, b.with_tanh), a.argument or b.argument)


def _product(_: Node, a: Form, b: Form) -> Form | None:
    if a.with_tanh and b.with_tanh:
        return None
    mixed = _added(_multiplied(a.plain, b.with_tanh), _multiplied(a.with_tanh, b.plain))
    return Form(_multiplied(a.plain, b.plain), mixed, a.argument or b.argument)


def _power(node: Node, a: Form, exponent: Form) -> Form | None:
    number = exponent.plain.get(0)
    if a.with_tanh or exponent != Form({0: number}, {}, {}) or number not in (2, 3):
        return None
    power = a.plain
    for _ in range(int(number) - 1):
        power = _multiplied(power, a.plain)
    return Form(power, {}, {})


def _tanh(_: Node, a: Form) -> Form | None:
    return None if a.with_tanh else Form({}, {0: 1.0}, a.plain)


def _differ(a: Form, b: Form) -> bool:
    return bool(a.with_tanh and b.with_tanh) and not _are_close(a.argument, b.argument)


def _added(a: Powers, b: Powers) -> Powers:
    return {n: a.get(n, 0.0) + b.get(n, 0.0) for n in a.keys() | b.keys()}


def _multiplied(a: Powers, b: Powers) -> Powers:
    made: Powers = {}
    for n, left in a.items():
        for m, right in b.items():
            made[n + m] = made.get(n + m, 0.0) + left * right
    return made


_RULES: dict[str, Callable[..., Form | None]] = {
    "aten::add": _sum,
    "aten::mul": _product,
    "aten::pow": _power,
    "aten::tanh": _tanh,
}
