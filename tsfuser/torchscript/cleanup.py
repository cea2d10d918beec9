"""Cleans the subgraph of a group: ops that change nothing, dead code, common subexpressions, constants that
occur twice.

Before: `%b = aten::mul(%a, 1.0)` on a floating `%a`. After: users of `%b` use `%a`.
"""

from __future__ import annotations

import math

import torch

from ..ir.dtypes import DTYPES
from ..ops.table import UNKNOWN
from .effects import WRITES, effect, may_return_operand, remove_dead_code
from .graph import Graph, Node, Value, constant_of, facts, inputs, is_constant, outputs

#: kind -> the number (argument 1) that leaves argument 0 as it is
_NEUTRAL = {"aten::add": 0, "aten::sub": 0, "aten::mul": 1, "aten::div": 1}


def clean(subgraph: Graph, merge: bool = True) -> None:
    """Simplifies a group's subgraph. `merge` is off where an output is written in place later, so that no
    two outputs become one tensor."""
    remove_dead_code(subgraph)
    if merge:
        torch._C._jit_pass_cse(subgraph)
        remove_no_ops(subgraph)
    torch._C._jit_pass_constant_pooling(subgraph)
    remove_dead_code(subgraph)


def remove_no_ops(subgraph: Graph) -> None:
    """Readers of an op that gives back its operand read the operand. What leaves the group, or may through
    an op that hands its operand on, stays: else the group would hand out its own input, or one tensor
    twice, where eager makes a fresh one."""
    for node in subgraph.nodes():
        if not is_no_op(node):
            continue
        for use in node.output().uses():
            if use.user.kind() != "prim::Return" and not may_return_operand(use.user):
                use.user.replaceInput(use.offset, node.inputsAt(0))


def is_no_op(node: Node) -> bool:
    """Whether the node adds 0 or multiplies by 1 and the dtype stays. `x + 0.0` and `x - -0.0` are not
    (they turn -0.0 into 0.0), nor is true division of integers, nor a complex product (inf * 0)."""
    kind = node.kind()
    if kind not in _NEUTRAL or node.inputsSize() < 2:
        return False
    number = _number(node.inputsAt(1))
    if number is UNKNOWN or number != _NEUTRAL[kind] or isinstance(number, complex):
        return False
    if node.inputsSize() == 3 and _number(node.inputsAt(2)) not in (1, True):
        return False
    name = facts(node.inputsAt(0).type()).dtype
    dtype = DTYPES.get(name)
    if dtype is not None and dtype.is_integral:
        return isinstance(number, int) and kind != "aten::div"
    if dtype is None or not dtype.is_floating:
        return False
    return number == 1 or (math.copysign(1.0, number) < 0) == (kind == "aten::add")


def _number(value: Value):
    """The number behind a constant; UNKNOWN for all else."""
    if value.type().kind() not in ("IntType", "FloatType", "BoolType") or not is_constant(value):
        return UNKNOWN
    return constant_of(value)


def drop_unused_inputs(group: Node) -> None:
    """Removes the inputs of a group that its subgraph does not use."""
    subgraph = group.g("Subgraph")
    for i, inner in reversed(list(enumerate(subgraph.inputs()))):
        if not inner.uses():
            subgraph.eraseInput(i)
            group.removeInput(i)


def merge_equal_outputs(group: Node) -> None:
    """Where the subgraph returns one value twice, the group returns it once."""
    subgraph = group.g("Subgraph")
    first: dict[int, int] = {}
    for i, inner in enumerate(list(subgraph.outputs())):
        first.setdefault(inner.unique(), i)
    for i, inner in reversed(list(enumerate(list(subgraph.outputs())))):
        if first[inner.unique()] != i:
            group.outputsAt(i).replaceAllUsesWith(group.outputsAt(first[inner.unique()]))
            group.eraseOutput(i)
            subgraph.eraseOutput(i)


def writers(subgraph: Graph) -> list[Node]:
    """The nodes that change their operands."""
    return [node for node in subgraph.nodes() if effect(node) == WRITES]


def is_needed(nodes: list[Node], subgraph: Graph, output: int) -> bool:
    """Whether, without that output, one of the `nodes` would be dead code."""
    if not nodes:
        return False
    kept = [v for i, v in enumerate(subgraph.outputs()) if i != output]
    seen, waiting = set(), kept
    while waiting:
        value = waiting.pop()
        if value.unique() not in seen:
            seen.add(value.unique())
            waiting.extend(inputs(value.node()))
    return not all(any(v.unique() in seen for v in outputs(node)) for node in nodes)


def size_of_work(subgraph: Graph) -> int:
    """How many nodes compute something."""
    return sum(not n.kind().startswith("prim::") for n in subgraph.nodes())
