"""Ops that are worth a kernel of ours though nothing is fused with them, as torch is slow at them.

In: a node with the types of a call that was seen. Out: whether its group may hold nothing else. Example: in
`mm(x, y).t().clone(memory_format=torch.contiguous_format)`, the clone turns a matrix."""

from __future__ import annotations

from math import prod

from ..ops.table import Row
from .rows import row_of
from .wrapper import Node, Value, facts, inputs, is_tensor

LEAST = 1 << 12  # elements of a tensor that is worth another kernel's launch


def is_worth_a_kernel(node: Node, reductions: bool) -> bool:
    """Whether the node copies a tensor into another layout, or its row says so, perhaps for this dtype on a
    GPU; or, with `reductions`, on a GPU reduces a tensor, or reads one across the layout of an elementwise
    result, which torch does without a tile of shared memory."""
    found = row_of(node)
    if found is not None and found[0].needs_kernel:
        return True
    if found is None or not (found[0].copies or found[0].slow_on_gpu or reductions):
        return False
    large = [v for v in inputs(node) if is_tensor(v) and prod(shape(v)[0] or [0]) >= LEAST]
    if not large:
        return False
    if found[0].copies:
        return _walk(large[0]) != _walk(node.output())
    return _is_on_gpu(large[0]) and _is_slow_on_gpu(node, found[0], large, reductions)


def _is_slow_on_gpu(node: Node, row: Row, large: list[Value], reductions: bool) -> bool:
    """Whether torch's kernels for the node are slow there; `large` are its large operands."""
    if row.fresh is False and shape(node.outputsAt(0))[0] in (None, shape(large[0])[0]):
        return False  # it hands its operand on
    if row.slow_on_gpu or not reductions:
        return facts(large[0].type()).dtype in row.slow_on_gpu
    if row.sizes == "broadcast":
        return any(_crosses(v, node.outputsAt(0)) for v in large)
    return row.family == "reduction"


def _crosses(operand: Value, result: Value) -> bool:
    """Whether they have the same sizes, but neighbours in memory along different dims."""
    (sizes, strides), (others, steps) = shape(operand), shape(result)
    if sizes is None or sizes != others:
        return False
    near, nearest = ([d for d, n in enumerate(sizes) if n != 1 and s[d] == 1] for s in (strides, steps))
    return bool(near) and bool(nearest) and near != nearest


def _is_on_gpu(value: Value) -> bool:
    return (facts(value.type()).device or "").startswith("cuda")


def shape(value: Value) -> tuple[list[int] | None, list[int] | None]:
    """Sizes and strides as they were profiled; None where one is not known."""
    sizes, strides = value.type().sizes(), value.type().strides()
    return (None, None) if sizes is None or strides is None else (sizes, strides)


def _walk(value: Value) -> list[int] | None:
    """The strides of dims of more than one element; None where they are not known."""
    sizes, strides = shape(value)
    return sizes and strides and [step for size, step in zip(sizes, strides) if size != 1]
