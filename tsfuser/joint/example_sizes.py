"""How large the tensors of a graph are in one call.

In: a graph whose inputs, and results of ops without a row, have the sizes of that call in their types. Out:
the bytes of each tensor. For a result without sizes they follow from the op's row (`Row.sizes`). Example:

    %y : Float(4, 8) = aten::exp(%x);  %s : Float(*, *) = aten::sum(%y, [1], True)   ->   %s has 4 * 4 bytes

What is not known is estimated: these numbers decide what the forward saves, not what is computed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..errors import Refusal
from ..graph.evaluate import OPERATIONS
from ..graph.rows import row_of
from ..graph.wrapper import (
    LIST,
    Graph,
    Node,
    Value,
    constant_of,
    facts,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
    outputs,
    schema,
)
from ..grouping.size_rules import ABSENT, RULES, rule_of, sized_by
from ..ir.dtypes import DTYPES

_USUAL = 64  # the size of a dim that is not known at all
_UNPACK, _SIZE = "prim::ListUnpack", "aten::size"
_UNKNOWN = object()


class ExampleSizes:
    """The sizes of all tensors of a graph, and the numbers that it computes of them."""

    def __init__(self, graph: Graph):
        self._sizes: dict[int, list[int] | None] = {}
        self._numbers: dict[int, Any] = {}
        for node in nodes_in(graph):
            for value in outputs(node):
                if is_tensor(value):
                    self._sizes[value.unique()] = self._sizes_of(value)
            self._note_numbers(node)

    def bytes_of(self, value: Value) -> int:
        """The bytes of a tensor, also of a view that has none of its own."""
        dtype = facts(value.type()).dtype
        return self._elements(value) * (DTYPES[dtype].itemsize if dtype in DTYPES else 4)

    def of(self, value: Value) -> list[int] | None:
        """The sizes of a tensor, None where they are not known."""
        return self._sizes.get(value.unique()) or value.type().sizes()

    def _elements(self, value: Value) -> int:
        sizes = self.of(value)
        if sizes is not None:
            return prod(sizes)
        known = [self.of(v) for v in inputs(value.node()) if is_tensor(v)]
        if known and None not in known:
            return max(map(prod, known))
        return _USUAL ** (facts(value.type()).rank or 0)

    def _sizes_of(self, value: Value) -> list[int] | None:
        sizes = value.type().sizes()
        if sizes is not None:
            return sizes
        operands = sized_by(value)
        if not operands:
            return self._asked_for(value.node())
        known = [self.of(v) for v in operands]
        if None in known:
            return None
        try:
            return self._derived(value, rule_of(value), known)
        except RuntimeError:  # numbers that do not fit, as they are those of another call
            return None

    def _asked_for(self, node: Node) -> list[int] | None:
        """The sizes that the op is told to give."""
        its_schema = schema(node)
        if its_schema is None or "size" not in its_schema.arguments:
            return None
        asked = self._number(node.inputsAt(its_schema.arguments.index("size")))
        return asked if isinstance(asked, list) and all(type(n) is int and n >= 0 for n in asked) else None

    def _derived(self, value: Value, rule: str | None, known: list) -> list[int] | None:
        if rule not in RULES:
            return list(torch.broadcast_shapes(*known))
        name, asked = RULES[rule]
        names = row_of(value.node())[1].arguments  # type: ignore[index]
        arguments = [
            self._number(value.node().inputsAt(names.index(a))) if a in names else ABSENT.get(a)
            for a in asked
        ]
        if _UNKNOWN in arguments:
            return None
        made = getattr(torch.ops.tsfuser, name.partition("::")[2])
        if rule != "joined":
            return made(list(torch.broadcast_shapes(*known)), *map(_as_list_for(rule), arguments))
        sizes = known[0]
        for other in known[1:]:
            sizes = made(sizes, other, *arguments)
        return sizes

    # ---- numbers

    def _number(self, value: Value) -> Any:
        if is_constant(value):
            found = constant_of(value)
            return list(found) if isinstance(found, tuple) else found
        return self._numbers.get(value.unique(), _UNKNOWN)

    def _note_numbers(self, node: Node) -> None:
        kind, made = node.kind(), outputs(node)
        if any(is_tensor(v) for v in made):
            return
        if kind == _SIZE:
            sizes = self.of(node.inputsAt(0))
            at = self._number(node.inputsAt(1)) if node.inputsSize() > 1 else None
            if sizes is not None and at is not _UNKNOWN:
                self._numbers[made[0].unique()] = sizes if at is None else sizes[at]
            return
        if kind not in OPERATIONS and kind not in (LIST, _UNPACK) or any(is_tensor(v) for v in inputs(node)):
            return
        given = [self._number(v) for v in inputs(node)]
        if _UNKNOWN in given:
            return
        if kind == _UNPACK:
            self._numbers.update((v.unique(), number) for v, number in zip(made, given[0]))
        elif kind == LIST:
            self._numbers[made[0].unique()] = given
        else:
            self._numbers[made[0].unique()] = _computed(kind, given)


def _computed(kind: str, given: list) -> Any:
    try:
        return OPERATIONS[kind](None, *given)
    except (Refusal, TypeError, ValueError):
        return _UNKNOWN


def _as_list_for(rule: str):
    """What the operator of a rule takes for an argument of the op."""
    lists = rule in ("reduced", "squeezed")

    def convert(argument: Any) -> Any:
        return [argument] if lists and type(argument) is int else argument

    return convert
