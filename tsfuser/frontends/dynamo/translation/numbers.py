"""Numbers, and checks of them, as nodes of a torch._C.Graph.

In: an FX node that computes a number from numbers, asks a tensor for one, or raises where one is false. Out:
the number's value. Example:

    floordiv = operator.floordiv(s0, 2);  ge = floordiv >= 1;  aten._assert_scalar(ge, "too short")
becomes
    %3 : int = aten::floordiv(%s0, %2);  %4 : bool = aten::ge(%3, %1)
    %5 : int = tsfuser::assert_scalar(%4, %text)           which the graph returns, so that no pass drops it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....errors import Refusal
from ..fx import sizes
from ..fx.types import type_of
from .arguments import Arguments

aten = torch.ops.aten
_INT, _FLOAT, _BOOL = torch._C.IntType.get(), torch._C.FloatType.get(), torch._C.BoolType.get()
_OF = {int: _INT, float: _FLOAT, bool: _BOOL}
#: They take bools as they are; for other arithmetic True is 1.
_LOGIC = frozenset(f"aten::{name}" for name in "__and__ __or__ __xor__ __not__ eq ne".split())
#: Where Python raises, TorchScript's quotient is infinite, its remainder ends the process, and its shifts
#: give some number. Its remainders of floats are rounded differently. Ours do as Python does
#: (csrc_stubs/interpreter/number_ops.cpp).
_AS_PYTHON = {
    f"aten::{name}": f"tsfuser::{name}" for name in "floordiv remainder div __lshift__ __rshift__".split()
}
_CAST = {"IntType": "aten::Int", "FloatType": "aten::Float", "BoolType": "aten::Bool"}
_MOST_FACTORS = 4
_FALSE = "Expected Tensor with single nonzero value, but got zero"  # eager's words

#: Op -> the kind of node, the type of the checked value, and its message if it has none.
CHECKS: dict[Any, tuple[str, Any, str]] = {
    aten._assert_scalar.default: ("tsfuser::assert_scalar", _BOOL, ""),
    aten._assert_async.msg: ("tsfuser::assert_async", None, ""),
    aten._assert_async.default: ("tsfuser::assert_async", None, _FALSE),
}
#: What appends a node to a graph: (kind, values, types of the results).
_Append = Callable[[str, list, list], list[torch._C.Value]]


class Numbers:
    """Makes values of one graph by `append`."""

    def __init__(self, arguments: Arguments, append: _Append):
        self._arguments, self._append = arguments, append

    def takes(self, target: Any) -> bool:
        """Whether a node that calls `target` is one of numbers."""
        known = target in sizes.NUMBERS or target in sizes.WHOLE or target in sizes.QUESTIONS
        return known or target is sizes.CHOICE or (target is sizes.SUM and target is not None)

    def value(self, node: fx.Node) -> torch._C.Value:
        """The number. Raises Refusal if TorchScript computes none, or another one than Python."""
        wanted = type_of(node.meta.get("val"))
        if wanted not in _OF.values() or node.kwargs:
            raise Refusal("a number of a type that a graph does not hold")
        if node.target in sizes.QUESTIONS:
            return self._append(sizes.QUESTIONS[node.target], self._made(node.args), [wanted])[0]
        given = node.args[0] if node.target is sizes.SUM else node.args
        if node.target in sizes.WHOLE and given[1:] == (None,):  # `round(x)`
            given = given[:1]
        given = self._made(given)
        if any(v.type() not in _OF.values() for v in given):
            raise Refusal("arithmetic of numbers with something else than numbers")
        if node.target is sizes.SUM:
            return self._sum(given, wanted)
        if node.target is sizes.CHOICE:
            return self.cast(self._chosen(*given), wanted)
        if node.target in sizes.WHOLE:
            return self._whole(sizes.WHOLE[node.target], given)
        if sizes.NUMBERS[node.target] == "aten::pow" and wanted is _INT:
            return self._power(*given)
        made = self._computed(sizes.NUMBERS[node.target], given, wanted)
        if node.target in sizes.FUNCTIONS:  # raises where Python does
            operand = self.cast(given[0], _FLOAT)
            return self._append("tsfuser::function_result", [operand, made], [_FLOAT])[0]
        return made

    def check(self, node: fx.Node) -> torch._C.Value:
        """A number that nobody reads, of a node that raises if the check fails."""
        kind, type_, message = CHECKS[node.target]
        checked, *texts = node.args
        value = self._made([checked])[0]
        if type_ is not None:
            value = self.cast(value, type_)
        text = self._arguments.graph.insertConstant(texts[0] if texts else message)
        return self._append(kind, [value, text], [_INT])[0]

    def cast(self, value: torch._C.Value, type_: Any) -> torch._C.Value:
        """The number as one of that type."""
        same = value.type().kind() == type_.kind()
        return value if same else self._append(_CAST[type_.kind()], [value], [type_])[0]

    def _made(self, given: Any) -> list[torch._C.Value]:
        return [self._arguments.make(item, _OF.get(type(item), _INT)) for item in given]

    def _sum(self, values: list, wanted: Any) -> torch._C.Value:
        total = values[0]
        for value in values[1:]:
            total = self._computed("aten::add", [total, value], wanted)
        return total

    def _chosen(self, condition: torch._C.Value, *choices: torch._C.Value) -> torch._C.Value:
        """`no + condition * (yes - no)`, an int, which is exact for ints and bools."""
        if any(v.type() is _FLOAT for v in choices):
            raise Refusal("a choice between floats")
        yes, no, factor = (self.cast(v, _INT) for v in (*choices, condition))
        change = self._computed("aten::mul", [factor, self._computed("aten::sub", [yes, no], _INT)], _INT)
        return self._computed("aten::add", [no, change], _INT)

    def _whole(self, how: str, values: list) -> torch._C.Value:
        if len(values) != 1:
            raise Refusal("a number that is rounded to some digits")
        if values[0].type() is not _FLOAT:
            return self.cast(values[0], _INT)
        text = self._arguments.graph.insertConstant(how)
        return self._append("tsfuser::whole", [values[0], text], [_INT])[0]

    def _power(self, base: torch._C.Value, exponent: torch._C.Value) -> torch._C.Value:
        """A product: TorchScript's power of ints is a float."""
        count = exponent.toIValue() if exponent.node().kind() == "prim::Constant" else None
        if type(count) is not int or not 1 <= count <= _MOST_FACTORS:
            raise Refusal("a power of ints, of which TorchScript makes a float")
        base = total = self.cast(base, _INT)
        for _ in range(count - 1):
            total = self._computed("aten::mul", [total, base], _INT)
        return total

    def _computed(self, kind: str, values: list, wanted: Any) -> torch._C.Value:
        is_logic = kind in _LOGIC and len({v.type().kind() for v in values}) == 1
        if not is_logic:
            values = [self.cast(v, _INT) if v.type() is _BOOL else v for v in values]
        if kind in _AS_PYTHON and not (wanted is _INT and _is_harmless(kind, values[1])):
            kind, values = _AS_PYTHON[kind], [self.cast(v, wanted) for v in values]
        (made,) = self._append(kind, values, [wanted])
        found = made.node().schema()
        returned = None if found == "(no schema)" else torch._C.parse_schema(found).returns[0].type
        if returned is None or returned.kind() != wanted.kind():
            made.node().destroy()
            raise Refusal(f"{kind.partition('::')[2]} of such numbers, which TorchScript does not compute")
        return made


def _is_harmless(kind: str, number: torch._C.Value) -> bool:
    """Whether the op of an int and this number raises no error, whatever the int."""
    found = number.toIValue() if number.node().kind() == "prim::Constant" else None
    return type(found) is int and 0 < found < 64 and kind != "aten::__lshift__"
