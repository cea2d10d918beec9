"""Ops that give back their operand: `aten::mul(%a, 1.0)` on a floating `%a`.

In: a node and the dtypes of its operands. Out: whether it adds 0 or multiplies by 1 and keeps the dtype. A
graph is not rewritten for that, since its next call may bring another dtype: `x * 1.0` of integers is
floating. `parse` asks while it makes a plan, for the dtypes of that plan."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..ir.dtypes import DTYPES
from ..ops.trials import UNKNOWN
from .effects import may_return_operand
from .rows import row_of
from .wrapper import Node, Value, constant_of, facts, is_constant, is_tensor, schema


def is_no_op(node: Node, dtype_of: Callable[[Value], str | None]) -> bool:
    """Whether the node adds 0 or multiplies by 1 and the dtype stays. `x + 0.0` and `x - -0.0` are not
    (they turn -0.0 into 0.0), nor is true division of integers, nor a complex product (inf * 0)."""
    found = row_of(node) if node.inputsSize() >= 2 else None
    if found is None or not found[0].identity:
        return False
    number = _number(node.inputsAt(1))
    if number is UNKNOWN or number not in found[0].identity.values():
        return False
    dtype = DTYPES.get(dtype_of(node.inputsAt(0)))
    if dtype is None or dtype.kind not in found[0].identity:
        return False
    if node.inputsSize() == 3 and _number(node.inputsAt(2)) not in (1, True):  # `alpha`
        return False
    neutral = found[0].identity[dtype.kind]
    if dtype.kind == "i":
        return isinstance(number, int) and number == neutral
    return number == neutral and math.copysign(1.0, number) == math.copysign(1.0, neutral)


def keeps_dtype(node: Node) -> bool:
    """Whether the node is a cast, or a copy, that gives the dtype that its operand was profiled in."""
    found = row_of(node)
    if found is None or found[0].family != "casts":
        return False
    dtypes = {facts(v.type()).dtype for v in (node.inputsAt(0), node.output()) if is_tensor(v)}
    return len(dtypes) == 1 and None not in dtypes


def widens(node: Node) -> bool:
    """Whether the node is a cast to a floating dtype that holds all values of its operand's, which was
    profiled narrower."""
    found = row_of(node)
    if found is None or found[0].family != "casts" or not is_tensor(node.inputsAt(0)):
        return False
    before, after = (DTYPES.get(facts(v.type()).dtype) for v in (node.inputsAt(0), node.output()))
    if before is None or after is None or not (before.is_floating and after.is_floating):
        return False
    return before.itemsize < after.itemsize


def gives_operand_back(node: Node) -> bool:
    """Whether the node is a cast that returns its operand itself, for the dtypes that were profiled."""
    if not keeps_dtype(node) or not may_return_operand(node):
        return False
    arguments = schema(node).arguments
    copy = node.inputsAt(arguments.index("copy")) if "copy" in arguments else None
    return copy is None or (is_constant(copy) and not constant_of(copy))


def stays_inside(node: Node) -> bool:
    """Whether no reader of the node's result returns it, or may: the group would hand out its own input, or
    one tensor twice, where eager makes a fresh one."""
    return not any(
        u.user.kind() == "prim::Return" or may_return_operand(u.user) for u in node.output().uses()
    )


def _number(value: Value):
    """The number behind a constant; UNKNOWN for all else."""
    if value.type().kind() not in ("IntType", "FloatType", "BoolType") or not is_constant(value):
        return UNKNOWN
    return constant_of(value)
