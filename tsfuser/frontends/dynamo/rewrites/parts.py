"""Slices move in front of the ops they slice, so that no more is computed, stored and read than somebody
asks for.

In: an FX graph. Out: the same graph, where pointwise ops of groups that only a slice reads are ops of slices.
Views on the way are views of slices. Before, as the backward of `cat` leaves it:

    y = silu_backward(g, x);  z = view(transpose(view(y, [8, 4, 2]), 1, 2), [8, 8]);  slice(z, 1, 4, 8)
becomes
    view(transpose(view(silu_backward(slice(g, 1, 1, 8, 2), slice(x, 1, 1, 8, 2)), [8, 4, 1]), 1, 2), [8, 4])

A pointwise op that is split becomes one op per part, if each part has one reader: the group of the readers
computes the parts, and nothing stores the whole. `a, b = split(x + y, 4, 1)`, as in an LSTM, becomes

    x1, x2 = split(x, 4, 1);  y1, y2 = split(y, 4, 1);  a = x1 + y1;  b = x2 + y2
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..fx.insert import Insert, evaluate
from .late_casts import has_row, is_written_between, may_be_dense, views_of
from .simplify import RELAID

aten = torch.ops.aten

_CAST = aten._to_copy.default
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class Part:
    """The elements `start`, `start + step`, ... of a dim, `length` of them."""

    dim: int
    start: int
    length: int
    step: int

    @property
    def stop(self) -> int:
        return self.start + (self.length - 1) * self.step + 1


def compute_parts(module: fx.GraphModule) -> None:
    """Changes the module's graph."""
    slices = [node for node in module.graph.nodes if node.target is aten.slice.Tensor]
    for node in slices:
        part = _part_of(node) if node.users else None
        if part is not None and _may_move(node):
            _move(node, part)
    splits = [node for node in module.graph.nodes if node.target in _SPLITS]
    if slices or splits:
        while splits:
            splits += _split_operands(splits.pop())
        module.graph.eliminate_dead_code()  # what was made of a slice that stays
        module.recompile()


def _part_of(node: fx.Node) -> Part | None:
    """What a slice takes of its operand; None for all of it, for nothing, and for sizes that vary."""
    given: list[Any] = list(node.args)
    operand, dim, start, stop, step = given + [None, 0, None, None, 1][len(given) :]
    sizes = operand.meta["val"].shape
    dim %= max(len(sizes), 1)
    start, stop = 0 if start is None else start, sizes[dim] if stop is None else stop
    if node.kwargs or not all(type(x) is int for x in (sizes[dim], start, stop, step)):
        return None
    places = range(sizes[dim])[start:stop:step]
    if not 0 < len(places) < sizes[dim]:
        return None
    return Part(dim, places.start, len(places), step)


def _may_move(node: fx.Node) -> bool:
    """Whether the part may become dense, in memory of its own, and its views stay views."""
    return may_be_dense(node) and not any(RELAID in view.meta for view in views_of(node))


@dataclass(frozen=True)
class _Form:
    """What a part of a node's result is: an op with arguments in which operands stand for parts of them, None
    for a part of the only one. `parts`: of these operands, `saves`: whether less is computed."""

    parts: dict[fx.Node, Part]
    op: Any = None
    args: tuple = ()
    saves: bool = False


def _move(node: fx.Node, part: Part) -> None:
    """Moves the slice in front of the op whose result it is a slice of, if less is computed then."""
    forms, slices = _forms(node, part)
    if not any(form.saves for form in forms.values()) or is_written_between(min(forms), node):
        return
    ops = Insert(node, node)
    made = {(x, p): _slice(ops, x, p) for x, p in slices}
    wanted = {operand: p for form in forms.values() for operand, p in form.parts.items()}
    wanted[node.args[0]] = part
    try:
        for value in sorted(forms):
            form = forms[value]
            parts = {x: made[x, p] for x, p in form.parts.items()}
            args = fx.map_arg(form.args, lambda x, parts=parts: parts.get(x, x))
            (only,) = parts.values() if form.op is None else (None,)
            made[value, wanted[value]] = only or ops(form.op, *args, **value.kwargs)
    except (RuntimeError, ValueError):  # what is a view of all is none of a slice
        return
    result = made[node.args[0], part]
    pairs = zip(result.meta["val"].shape, node.meta["val"].shape, strict=True)
    if all(statically_known_true(a == b) for a, b in pairs):
        _replace(node, result)
        node.graph.eliminate_dead_code()  # what nobody reads is no reader


def _forms(node: fx.Node, part: Part) -> tuple[dict[fx.Node, _Form], list[tuple[fx.Node, Part]]]:
    """The values of which nobody needs more than one part, with their form; and the slices that they read."""
    forms: dict[fx.Node, _Form] = {}
    slices: list[tuple[fx.Node, Part]] = []
    readers: dict[fx.Node, dict[fx.Node, Part]] = {node.args[0]: {node: part}}
    waiting = set(readers)
    while waiting:
        waiting.remove(value := max(waiting))  # the last one, whose readers have all been here
        parts = set(readers[value].values())
        form = (
            _form(value, *parts) if len(parts) == 1 and readers[value].keys() == value.users.keys() else None
        )
        if form is None:
            slices += ((value, p) for p in parts)
            continue
        forms[value] = form
        for operand, its_part in form.parts.items():
            readers.setdefault(operand, {})[value] = its_part
            waiting.add(operand)
    return forms, slices


def _split_operands(node: fx.Node) -> list[fx.Node]:
    """Puts the split in front of the op whose result it splits, if that stores less; returns the splits of
    the op's operands."""
    if not node.users:
        return []
    value, sizes, dim = (*node.args, 0)[:3]
    items = sorted(node.users)
    if node.kwargs or list(value.users) != [node] or not all(_has_one_reader(item) for item in items):
        return []
    any_part = Part(dim % value.meta["val"].dim(), 0, 1, 1)
    form = _form(value, any_part) if _is_pointwise(value) else None
    if form is None or not form.parts or is_written_between(value, items[-1]):
        return []  # without parts, the dim has size 1, but not in each item: one of `[1, 0]` is empty
    ops = Insert(items[0], value)
    splits = {x: ops(node.target, x, sizes, part.dim) for x, part in form.parts.items()}
    for item in items:
        parts = {x: ops(operator.getitem, split, item.args[1]) for x, split in splits.items()}
        args = fx.map_arg(form.args, lambda x, parts=parts: parts.get(x, x))
        _replace(item, ops(form.op, *args, **value.kwargs))
    node.graph.eliminate_dead_code()
    return list(splits.values())


def _has_one_reader(item: fx.Node) -> bool:
    """Whether one op of a group reads the item, maybe through views, and nothing else does."""
    if not _may_move(item):
        return False
    value = item
    while len(value.users) == 1:
        (value,) = value.users
        if value not in views_of(item):
            return has_row(value)
    return False


def _replace(node: fx.Node, made: fx.Node) -> None:
    """Gives the readers of a node another one with the same elements, in another layout."""
    node.replace_all_uses_with(made)
    for view in views_of(made):
        view.meta["val"] = evaluate(view)


def _form(value: fx.Node, part: Part) -> _Form | None:
    if value.op != "call_function" or RELAID in value.meta:
        return None
    rule = _RULES.get(value.target, _pointwise if _is_pointwise(value) else None)
    return rule(value, part) if rule is not None else None


def _slice(ops: Insert, value: fx.Node, part: Part) -> fx.Node:
    """The slice; the value itself where that is all."""
    size = value.meta["val"].shape[part.dim]
    if type(size) is int and size == part.length:
        return value
    return ops(aten.slice.Tensor, value, part.dim, part.start, part.stop, part.step)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether groups take the op, which computes each element of one tensor from those in its place."""
    if node.target is _CAST:
        return node.kwargs.keys() <= {"dtype"}
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return False
    is_new = not node.target._schema.is_mutable and isinstance(node.meta.get("val"), torch.Tensor)
    return is_new and has_row(node)


def _pointwise(node: fx.Node, part: Part) -> _Form | None:
    result, parts = node.meta["val"], {}
    if any(isinstance(x, fx.Node) for x in node.kwargs.values()):
        return None
    for arg in node.args:
        if isinstance(arg, fx.Node) and isinstance(operand := arg.meta.get("val"), torch.Tensor):
            dim = part.dim - result.dim() + operand.dim()
            if dim < 0 or statically_known_true(operand.shape[dim] == 1):
                continue
            if not statically_known_true(operand.shape[dim] == result.shape[part.dim]):
                return None
            parts[arg] = replace(part, dim=dim)
        elif isinstance(arg, (list, tuple)):
            return None
    return _Form(parts, node.target, node.args, saves=True)


def _transpose(node: fx.Node, part: Part) -> _Form:
    x, *dims = node.args
    a, b = (d % node.meta["val"].dim() for d in dims or (0, 1))
    return _Form({x: replace(part, dim={a: b, b: a}.get(part.dim, part.dim))}, node.target, node.args)


def _permute(node: fx.Node, part: Part) -> _Form:
    x, dims = node.args
    return _Form({x: replace(part, dim=dims[part.dim] % len(dims))}, node.target, node.args)


def _cat(node: fx.Node, part: Part) -> _Form | None:
    """Of the operand in which the part lies, or of all operands."""
    tensors, dim = (*node.args, 0)[:2]
    result = node.meta["val"]
    if any(x.meta["val"].dim() != result.dim() or x.meta["val"].dtype != result.dtype for x in tensors):
        return None
    if dim % result.dim() != part.dim:
        return _Form(dict.fromkeys(tensors, part), node.target, node.args, saves=True)
    first = 0
    for x in tensors:
        size = x.meta["val"].shape[part.dim]
        if type(size) is not int:
            return None
        if first <= part.start and part.stop <= first + size:
            return _Form({x: replace(part, start=part.start - first)}, saves=True)
        first += size
    return None


def _slice_of(node: fx.Node, part: Part) -> _Form | None:
    x, dim = (*node.args, 0)[:2]
    if dim % node.meta["val"].dim() == part.dim:
        return None
    return _Form({x: part}, node.target, node.args)


def _view(node: fx.Node, part: Part) -> _Form | None:
    x, sizes = node.args
    found = _before_view(x.meta["val"].shape, node.meta["val"].shape, part)
    if found is None:
        return None
    sizes = [part.length if dim == part.dim else size for dim, size in enumerate(sizes)]
    return _Form({x: found}, node.target, (x, sizes))


def _before_view(sizes: Sequence[Any], viewed: Sequence[Any], part: Part) -> Part | None:
    """Which part of a tensor of `sizes` is the part of its view. Example: of [8, 2] that is viewed as [16],
    every second element from 1 on is the part 1 of dim 1. None where that is no part of one dim."""
    for before, after in _same_elements(sizes, viewed):
        if part.dim not in after:
            continue
        if len(before) == len(after) == 1:
            return replace(part, dim=before[0])
        if len(after) == 1:  # dims become one
            inner = prod(sizes[d] for d in before[1:])
            if part.step == 1 and part.start % inner == part.length % inner == 0:
                return Part(before[0], part.start // inner, part.length // inner, 1)
            if len(before) == 2 and part.step == inner and part.length == sizes[before[0]]:
                return Part(before[1], part.start, 1, 1)
        elif len(before) == 1:  # a dim becomes several
            inner = prod(viewed[d] for d in after if d > part.dim)
            if part.dim == after[0] and part.step == 1:
                return Part(before[0], part.start * inner, part.length * inner, 1)
            if part.dim == after[-1] and part.length == 1:
                count = prod(viewed[d] for d in after[:-1])
                return Part(before[0], part.start, count, viewed[part.dim])
    return None


def _same_elements(sizes: Sequence[Any], viewed: Sequence[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """The dims of a tensor and of its view that have the same elements, as few at a time as possible, and
    without those of size 1. Example: [8, 6] as [2, 4, 6] -> ([0], [0, 1]) and ([1], [2])."""
    left, right = (
        [d for d, size in enumerate(s) if type(size) is not int or size != 1] for s in (sizes, viewed)
    )
    while left and right:
        before, after = [left.pop(0)], [right.pop(0)]
        while not statically_known_true(
            (a := prod(sizes[d] for d in before)) == (b := prod(viewed[d] for d in after))
        ):
            rest, found = (left, before) if type(a) is type(b) is int and a < b else (right, after)
            if not rest or not type(a) is type(b) is int:
                return
            found.append(rest.pop(0))
        yield before, after


#: op -> what a part of its result is made of; None where that is no part of each operand
_RULES: dict[Any, Callable[[fx.Node, Part], _Form | None]] = {
    aten.cat.default: _cat,
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice_of,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.view.default: _view,
}
