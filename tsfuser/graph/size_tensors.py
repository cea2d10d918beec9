"""Sizes that a trace holds as tensors, as the numbers that they are.

In: a graph. Out: the same graph, in which an int that is asked of such a tensor is computed of ints. Example,
from the trace of `x.view(-1, x.size(2) // 4)`:

    %n : int = aten::size(%x, %2)                      %n : int = aten::size(%x, %2)
    %t : Tensor = prim::NumToTensor(%n)         ->
    %d : Tensor = aten::floor_divide(%t, %four)
    %k : int = aten::Int(%d)                           %k : int = aten::floordiv(%n, %4)

A value of a tensor is asked of the device, and parts what is fused around it; sizes are known to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .effects import Effects, remove_dead_code
from .wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    all_blocks,
    constant_before,
    constant_of,
    insert,
    is_constant,
    nodes_of,
)

_ASKS, _TENSOR_OF = ("aten::Int", "aten::IntImplicit"), "prim::NumToTensor"
_ALIKE = frozenset(("aten::add", "aten::sub", "aten::mul"))  # have the name that they have for ints
_ROUNDED = {"trunc": "aten::__round_to_zero_floordiv", "floor": "aten::floordiv"}


def ask_sizes(graph: Graph) -> None:
    """Changes the graph. Tensors that the program writes to are asked as before."""
    asking = [node for block in all_blocks(graph) for node in nodes_of(block, _ASKS)]
    known: dict[int, Value | None] = {}
    effects = Effects(graph) if asking else None
    for node in asking:
        assert effects is not None
        number = _number(graph, node.inputsAt(0), effects, known)
        if number is not None:
            node.output().replaceAllUsesWith(number)
            node.destroy()
    if asking:
        remove_dead_code(graph)


def _number(graph: Graph, value: Value, effects: Effects, known: dict[int, Value | None]) -> Value | None:
    """The int that a tensor holds; None where it may be another kind of number, or be written to. `known`:
    what was found of values before."""
    if value.type().kind() == "IntType":
        return value
    if value.unique() not in known:
        known[value.unique()] = (
            None
            if effects.is_written(value)
            else _made(graph, value.node(), lambda operand: _number(graph, operand, effects, known))
        )
    return known[value.unique()]


def _made(graph: Graph, node: Node, number: Callable[[Value], Value | None]) -> Value | None:
    kind = node.kind()
    if kind == CONSTANT:
        held = node.output().toIValue()
        if isinstance(held, torch.Tensor) and held.dtype == torch.int64 and held.dim() == 0:
            held = held.item()
        return constant_before(graph, node, held) if type(held) is int else None
    if kind == _TENSOR_OF:
        return number(node.inputsAt(0))
    function = _function(node)
    operands = [number(node.inputsAt(k)) for k in (0, 1)] if function else [None]
    if any(operand is None for operand in operands):
        return None
    made = insert(graph, node, function, operands).output()
    made.setType(torch._C.IntType.get())
    return made


def _function(node: Node) -> str | None:
    """The op that computes with ints what the node does with tensors of them."""
    kind, more = node.kind(), [node.inputsAt(k) for k in range(2, node.inputsSize())]
    if kind == "aten::floor_divide":
        return "aten::floordiv"
    if kind == "aten::div" and len(more) == 1 and is_constant(more[0]):
        return _ROUNDED.get(constant_of(more[0]))
    is_plain = all(is_constant(v) and constant_of(v) == 1 for v in more)
    return kind if kind in _ALIKE and is_plain else None
