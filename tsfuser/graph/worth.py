"""Ops that are worth a kernel of ours though nothing is fused with them, as torch is slow at them.

In: a node with the types of a call that was seen. Out: whether its group may hold nothing else. Example: in
`mm(x, y).t().clone(memory_format=torch.contiguous_format)`, the clone turns a matrix."""

from __future__ import annotations

from math import prod

from .rows import row_of
from .wrapper import Node, Value, facts

LEAST = 1 << 12  # elements of what is worth another kernel's launch


def is_worth_a_kernel(node: Node, reductions: bool) -> bool:
    """Whether the node copies a tensor into another layout or, with `reductions`, reduces one on a GPU."""
    found = row_of(node)
    if found is None or not (found[0].copies or reductions and found[0].family == "reduction"):
        return False
    operand = node.inputsAt(0)
    sizes, _ = shape(operand)
    if sizes is None or prod(sizes) < LEAST:
        return False
    if found[0].copies:
        return _walk(operand) != _walk(node.output())
    return (facts(operand.type()).device or "").startswith("cuda")


def shape(value: Value) -> tuple[list[int] | None, list[int] | None]:
    """Sizes and strides as they were profiled; None where one is not known."""
    sizes, strides = value.type().sizes(), value.type().strides()
    return (None, None) if sizes is None or strides is None else (sizes, strides)


def _walk(value: Value) -> list[int] | None:
    """The strides of dims of more than one element; None where they are not known."""
    sizes, strides = shape(value)
    return sizes and strides and [step for size, step in zip(sizes, strides) if size != 1]
