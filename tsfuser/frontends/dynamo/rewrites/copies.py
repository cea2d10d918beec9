"""Ops that copy, as ops that have rows: a copy with another dtype or size, constants, repetitions, and parts
of a tensor that are replaced.

In: a node. Out: whether it has been replaced. Example: `z = x * 2; z[:, 1:3] = y` is
`slice_scatter(z, y, 1, 1, 3)`, and becomes

    cat([slice(z, 1, 0, 1), y, slice(z, 1, 3, n)], 1)

so that one kernel computes all of it. A part of an input stays as it is: the program changes it in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..fx.insert import PART, Insert, is_alike

aten = torch.ops.aten

_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
_ROWS = torch.contiguous_format


def lifted(node: fx.Node) -> bool:
    """`lift_fresh_copy` of a constant: the constant itself, if nobody can tell; else a clone."""
    if is_exposed(node):
        node.target = aten.clone.default
    else:
        node.replace_all_uses_with(node.args[0])
    return True


def copied(node: fx.Node) -> bool:
    """`copy(old, new)`: the new elements in the old one's dtype and sizes, which it replaces as a whole."""
    if node.kwargs or node.args[2:] not in ((), (False,)):
        return False
    source, result = node.args[1], node.meta["val"]
    given = source.meta.get("val")
    written = all(user.target in _SCATTERS and user.args[1] is node for user in node.users)
    if not isinstance(given, torch.Tensor) or not _is_static(result) or given.device != result.device:
        return False
    if given.is_complex() and not result.is_complex() or not (written or result.is_contiguous()):
        return False
    insert = Insert(before=node, like=node, kept=PART)
    if given.dtype != result.dtype:
        source = insert(aten._to_copy.default, source, dtype=result.dtype)
    if given.shape != result.shape:
        source = insert(aten.expand.default, source, list(result.shape))
    if not written:
        source = insert(aten.clone.default, source, memory_format=_ROWS)
    return _replaced(node, source, strict=not written)


def repeated(node: fx.Node) -> bool:
    """`repeat`: the tensor with a dim more before each dim, which is expanded and then merged with it."""
    operand, counts = node.args
    given, result = operand.meta["val"], node.meta["val"]
    if not _is_static(given) or not _is_static(result) or result.numel() == 0:
        return False
    sizes = [1] * (len(counts) - given.dim()) + list(given.shape)
    apart = [x for size in sizes for x in (1, size)]
    wide = [x for count, size in zip(counts, sizes) for x in (count, size)]
    insert = Insert(before=node, like=node, kept=PART)
    made = operand
    for dim in range(len(apart)):  # no `view`: the operand may have any strides
        if dim % 2 == 0 or dim < len(apart) - 2 * given.dim():
            made = insert(aten.unsqueeze.default, made, dim)
    made = insert(aten.expand.default, made, wide)
    made = insert(aten.clone.default, made, memory_format=_ROWS)
    return _replaced(node, insert(aten.view.default, made, list(result.shape)))


def iota(node: fx.Node) -> bool:
    """`prims.iota(length, start, step)`, which decompositions of torch's leave, as `arange`."""
    (length,), facts = node.args, node.kwargs
    start, step = facts["start"], facts["step"]
    if not all(type(x) is int for x in (length, start, step)) or step == 0:
        return False
    insert = Insert(before=node, like=node, kept=PART)
    options = {"dtype": facts["dtype"], "device": facts["device"], "pin_memory": False}
    return _replaced(node, insert(aten.arange.start_step, start, start + length * step, step, **options))


def part_replaced(node: fx.Node) -> bool:
    """`slice_scatter` and `select_scatter`: what is before the part, the part, and what is behind it. One at
    a time: of several in a row each element would be looked for in all."""
    base, part = node.args[:2]
    if not _is_single(node, base) or not _is_static(node.meta["val"]):
        return False
    place = _place(node)
    if place is None or any(base.meta["val"].dtype != x.meta["val"].dtype for x in (part, node)):
        return False
    dim, start, end = place
    size = node.meta["val"].shape[dim]
    insert = Insert(before=node, like=node, kept=PART)
    if node.target is aten.select_scatter.default:
        part = insert(aten.unsqueeze.default, part, dim)
    pieces = [part]
    if start > 0:
        pieces.insert(0, insert(aten.slice.Tensor, base, dim, 0, start))
    if end < size:
        pieces.append(insert(aten.slice.Tensor, base, dim, end, size))
    return len(pieces) > 1 and _replaced(node, insert(aten.cat.default, pieces, dim))


def _is_single(node: fx.Node, base: Any) -> bool:
    """Whether the base is computed here, and is no scatter, and who reads the result is none."""
    computed = isinstance(base, fx.Node) and base.op == "call_function" and base.target not in _SCATTERS
    its_schema = getattr(base.target, "_schema", None) if computed else None
    fresh = its_schema is not None and all(r.alias_info is None for r in its_schema.returns)
    return fresh and not any(user.target in (*_SCATTERS, aten.copy_.default) for user in node.users)


def _place(node: fx.Node) -> tuple[int, int, int] | None:
    """The dim, and where in it the part begins and ends; None if that is not known, or if it has gaps."""
    sizes = node.meta["val"].shape
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    dim = given.get("dim", 0) % max(len(sizes), 1)
    if node.target is aten.select_scatter.default:
        start = given["index"] % sizes[dim] if type(given["index"]) is int else None
        return None if start is None else (dim, start, start + 1)
    start, end, step = (given.get(name) for name in ("start", "end", "step"))
    if step not in (None, 1) or any(type(x) is not int and x is not None for x in (start, end)):
        return None
    start, end, _ = slice(start, end).indices(sizes[dim])
    return (dim, start, end) if start < end else None


def is_exposed(node: fx.Node) -> bool:
    """Whether the result, or what may be a view of it, leaves the graph or is written to. To be copied to an
    input is neither."""
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            its_schema = getattr(user.target, "_schema", None)
            if user.target is operator.getitem:
                waiting.append(user)
            elif user.target is aten.copy_.default:
                continue
            elif user.op != "call_function" or its_schema is None or its_schema.is_mutable:
                return True
            elif any(r.alias_info is not None for r in its_schema.returns):
                waiting.append(user)
    return False


def _is_static(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and all(type(size) is int for size in tensor.shape)


def _replaced(node: fx.Node, made: fx.Node, strict: bool = True) -> bool:
    a, b = made.meta["val"], node.meta["val"]
    if a.dtype != b.dtype or a.device != b.device or (strict and not is_alike(a, b)):
        return False
    node.replace_all_uses_with(made)
    return True
