"""Gradients of indexing on a GPU: elements are added by atomics, as in inductor. torch's own op sorts the
indices, which is slower.

In: an FX graph. Out: the same graph, in which an addition to new zeros at several indices is an `index_add`
at one index. Before:

    index_put(new_zeros(g, [n, 4, 5]), [None, i, j], g, accumulate=True)
becomes, once negative indices are counted from 0,
    view(index_add(new_zeros(g, [n, 20]), 1, i * 5 + j, g), [n, 4, 5])

The order of the additions may differ from call to call. So torch's op stays if torch is asked for
deterministic algorithms. A `scatter_add` of one place along its dim to new zeros is what a group makes:

    scatter_add(new_zeros(g, [n, 50]), 1, i, g), i and g [n, 1], becomes gather_backward(g, [n, 50], 1, i)
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from ..fx.insert import Insert
from ..tracing import embeddings

aten = torch.ops.aten

_INDICES = (torch.int32, torch.int64)
_SUMS = (torch.float32, torch.float64)
_ZEROS = (aten.new_zeros.default, aten.zeros.default)


def add_elements(node: fx.Node) -> bool:
    """Replaces an `index_put` if that is faster; returns whether it did."""
    zeros, indices, values, *others = node.args
    if others != [True] or node.kwargs or not _is_new(zeros):
        return False
    places = [k for k, index in enumerate(indices) if index is not None]
    first, last = places[0], places[-1] + 1
    sizes = zeros.args[1]
    taken = sizes[first:last]
    if len(places) != len(taken):
        return False
    if not all(_is_known(n, zeros) for n in (*indices[first:last], values)):
        return False
    if any(type(s) is int and s == 0 for s in sizes) or not (
        len(taken) == 1 or all(type(s) is int for s in taken)
    ):
        return False
    ops = Insert(node, node)
    index = _joined(ops, indices[first:last], taken)
    before, behind = sizes[:first], sizes[last:]
    shape = zeros.meta["val"].shape
    expected = (*shape[:first], *index.meta["val"].shape, *shape[last:])
    if not _is_statically(values.meta["val"].shape, expected):
        return False  # what was inserted is dead
    whole = taken[0] if len(taken) == 1 else prod(taken)
    total = ops(aten.new_zeros.default, values, [*before, whole, *behind])
    index = ops(aten.reshape.default, index, [-1])
    source = ops(aten.reshape.default, values, [*before, -1, *behind])
    total = ops(aten.index_add.default, total, first, index, source)
    node.replace_all_uses_with(ops(aten.view.default, total, list(sizes)))
    return True


def add_at_one_place(node: fx.Node) -> bool:
    """Writes an addition to new zeros at one place along a dim, as in the gradient of `gather`, as the op
    that a group makes by comparisons."""
    zeros, dim, index, source = node.args
    made = zeros.meta["val"]
    if zeros.target not in _ZEROS or made.layout != torch.strided or len(zeros.users) > 1 or not made.dim():
        return False
    given, values = index.meta["val"], source.meta["val"]
    one = [1 if d == dim % made.dim() else size for d, size in enumerate(made.shape)]
    if not _is_statically(given.shape, one) or not _is_statically(values.shape, one):
        return False
    if given.dtype != torch.int64 or values.dtype != made.dtype or not made.dtype.is_floating_point:
        return False
    if not made.device == given.device == values.device:
        return False
    sizes = zeros.args[0] if zeros.target is aten.zeros.default else zeros.args[1]
    node.target, node.args = torch.ops.tsfuser.gather_backward.default, (source, sizes, dim, index)
    return True


def _is_statically(sizes: Any, wanted: Any) -> bool:
    return len(sizes) == len(wanted) and all(statically_known_true(a == b) for a, b in zip(sizes, wanted))


def _is_new(zeros: Any) -> bool:
    """Whether the node makes zeros on a device on which torch's op sorts, and nobody else reads them."""
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.new_zeros.default:
        return False
    made = zeros.meta["val"]
    if made.layout != torch.strided:
        return False
    sorts = made.device.type in embeddings.SORTING and not torch.are_deterministic_algorithms_enabled()
    return sorts and made.dtype in _SUMS and len(zeros.users) == 1


def _is_known(operand: Any, zeros: fx.Node) -> bool:
    """Whether the operand is on the device of the zeros, and holds elements that can be added to them, or
    indices."""
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(value, torch.Tensor) or free_unbacked_symbols(value):
        return False
    made = zeros.meta["val"]
    return value.device == made.device and value.dtype in (made.dtype, *_INDICES)


def _joined(ops: Insert, indices: list[fx.Node], sizes: list[Any]) -> fx.Node:
    """One index for dims of these `sizes` that are merged into one. If an index is beyond its dim, the result
    is beyond the merged dim, so that eager's error is raised, too."""
    places = []
    for index, size in zip(indices, sizes):
        below = ops(aten.lt.Scalar, index, 0)
        places.append(ops(aten.where.self, below, ops(aten.add.Tensor, index, size), index))
    if len(places) == 1:
        return places[0]
    places = [ops(aten._to_copy.default, place, dtype=torch.int64) for place in places]
    found, fits = places[0], _within(ops, places[0], sizes[0])
    for place, size in zip(places[1:], sizes[1:]):
        found = ops(aten.add.Tensor, ops(aten.mul.Tensor, found, size), place)
        fits = ops(aten.bitwise_and.Tensor, fits, _within(ops, place, size))
    return ops(aten.where.self, fits, found, ops(aten.full_like.default, found, prod(sizes)))


def _within(ops: Insert, place: fx.Node, size: int) -> fx.Node:
    return ops(aten.bitwise_and.Tensor, ops(aten.ge.Scalar, place, 0), ops(aten.lt.Scalar, place, size))
