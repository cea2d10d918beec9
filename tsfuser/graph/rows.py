"""A node of a graph and its row in the op table.

In: a node. Out: its row and its arguments, as the table wants to see them. Example:
`row_of(node)[0].name` -> "aten::relu".
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from ..ir.dtypes import DTYPES
from ..ops import table
from ..ops.trials import UNKNOWN, NodeArg
from .wrapper import (
    LIST,
    Facts,
    Node,
    Schema,
    Value,
    constant_of,
    facts,
    inputs,
    is_constant,
    is_tensor,
    is_tensor_list,
    schema,
)

_NUMBERS = {
    "IntType": "int",
    "FloatType": "float",
    "BoolType": "bool",
    "ComplexType": "complex",
    "NumberType": None,
}


class Knowledge:
    """Facts of values while one graph is partitioned; asked once per value, as bindings are slow."""

    def __init__(self):
        self._facts: dict[int, Facts] = {}
        self._args: dict[int, NodeArg] = {}
        self._signs: dict[int, tuple] = {}
        self.verdicts: dict[tuple, Any] = {}  # by the signs of a node's values: those of grouping/support.py
        self.default = DTYPES[str(torch.get_default_dtype())[6:]]

    def facts(self, value: Value) -> Facts:
        key = value.unique()
        if key not in self._facts:
            self._facts[key] = facts(value.type())
        return self._facts[key]

    def arg(self, value: Value) -> NodeArg:
        """The value as the op table wants to see it."""
        key = value.unique()
        if key not in self._args:
            self._args[key] = self._describe(value)
        return self._args[key]

    def sign(self, value: Value) -> tuple:
        """All that the choice of nodes looks at in the value, sizes left out, floats of usual size as one:
        with equal signs, one verdict is right for many nodes."""
        key = value.unique()
        if key not in self._signs:
            self._signs[key] = self._sign(value)
        return self._signs[key]

    def forget(self, value: Value) -> None:
        """After the value's type has changed."""
        for known in (self._facts, self._args, self._signs):
            known.pop(value.unique(), None)

    def _sign(self, value: Value) -> tuple:
        if is_tensor(value):
            return self.facts(value)
        if is_tensor_list(value):
            return ("tensors", *map(self.sign, inputs(value.node())))
        arg = self.arg(value)
        type_ = "" if is_constant(value) else str(value.type().annotation_str)
        return arg.kind, arg.dtype, "usual" if arg.is_usual else arg.constant, type_

    def _describe(self, value: Value) -> NodeArg:
        kind = value.type().kind()
        if kind == "TensorType":
            found = self.facts(value)
            return NodeArg("tensor", found.dtype, found.rank)
        if is_tensor_list(value):
            items = tuple(map(self.arg, inputs(value.node())))
            return NodeArg("tensors", items=items)
        constant = constant_of(value) if is_constant(value) else UNKNOWN
        if kind in _NUMBERS:
            return NodeArg("number", _NUMBERS[kind], None, constant)
        names = {"ListType": "list", "NoneType": "none", "StringType": "string"}
        return NodeArg(names.get(kind, "other"), None, _items_of(value, constant), constant)


def _items_of(value: Value, constant: Any) -> int | None:
    """How many items a list has, where the graph says so."""
    if value.type().kind() != "ListType":
        return None
    if isinstance(constant, tuple):
        return len(constant)
    return value.node().inputsSize() if value.node().kind() == LIST else None


def row_of(node: Node) -> tuple[table.Row, Schema] | None:
    """The node's row in the op table and its schema."""
    key = _C.schema_key(node)
    known = _with_rows.get(key)
    if known is None:
        found = schema(node)
        row = table.find(found.name, found.overload) if found else None
        if not found or not row:
            return None
        known = row, found
        if key is not None:
            _with_rows[key] = known
    return known


#: By the number that stands for a schema, as in `schema`; only ops with a row, as rows may be added.
_with_rows: dict[int, tuple[table.Row, Schema]] = {}


def tables_of(node: Node) -> list[Value]:
    """The operands that the node reads at places which another one holds."""
    found = row_of(node)
    names = found[0].table.split() if found else ()
    tables = [node.inputsAt(found[1].arguments.index(name)) for name in names]
    return [v for v in tables if is_tensor(v)]


def is_unguarded(value: Value) -> bool:
    """Whether no reader of a value depends on its profiled type: fused ops ignore it, or take it as it
    comes."""
    users = [(use.user, use.offset) for use in value.uses()]
    return bool(users) and all(_takes_any(node, offset) for node, offset in users)


def _takes_any(node: Node, offset: int) -> bool:
    found = row_of(node)
    free = found[0].ignored | found[0].unguarded if found else None
    return bool(free) and found[1].arguments[offset] in free


def arguments(node: Node, found: Schema, knowledge: Knowledge) -> dict[str, NodeArg]:
    """The node's arguments by schema name."""
    return {name: knowledge.arg(node.inputsAt(i)) for i, name in enumerate(found.arguments)}


def is_cast(node: Node) -> bool:
    """Whether the node is a cast."""
    found = row_of(node)
    return found is not None and found[0].gradient == "cast"
