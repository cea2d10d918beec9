"""Gradients of indexing on a GPU: elements are added by atomics, as in inductor. torch's own op sorts the
indices, which is slower.

In: an FX graph. Out: the same graph, in which an addition to new zeros at several indices is an `index_add`
at one index. Before:

    index_put(new_zeros(g, [n, 4, 5]), [None, i, j], g, accumulate=True)
becomes, once negative indices are counted from 0,
    view(index_add(new_zeros(g, [n, 20]), 1, i * 5 + j, g), [n, 4, 5])

The order of the additions may differ from call to call. So torch's op stays if torch is asked for
deterministic algorithms. A `scatter_add` whose index names whole parts is an `index_add`, too, and sums of 16
bits are added up in float32:

    scatter_add(zeros([n, 4]), 0, expand(i, [e, 4]), g), i [e, 1], becomes
    _to_copy(index_add(zeros([n, 4], float32), 0, view(i, [e]), _to_copy(g, float32)), bfloat16)

Groups add where they compute what is added (groups/added_at.py). A `scatter_add` of one place along its dim
to new zeros is what a group makes:

    scatter_add(new_zeros(g, [n, 50]), 1, i, g), i and g [n, 1], becomes gather_backward(g, [n, 50], 1, i)

and so is a `scatter`, as in the gradient of `x.max(1)`: `extreme_backward`. Sums at few places are made
there, too:

    index_add(zeros([2, 768]), 0, i, g) becomes sums_at(g, 0, 2, i)
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from ..fx.insert import Insert
from ..fx.types import hint
from ..tracing import embeddings

aten = torch.ops.aten

_INDICES = (torch.int32, torch.int64)
_NARROW = (torch.float16, torch.bfloat16)
_SUMS = (torch.float32, torch.float64, *_NARROW)
_MOST_ROUNDED = 2  # elements of 16-bit results for each that is added: to clear and round more takes longer
FEW = 4  # sums that are made side by side: a comparison and an addition each for every element
_ZEROS = (aten.new_zeros.default, aten.zeros.default)
#: The same, with sizes that are those of the first operand, or that stand before the number.
_FILLED = {aten.full.default: 0, aten.new_full.default: 1}


def add_elements(node: fx.Node) -> bool:
    """Replaces an `index_put` if that is faster; returns whether it did."""
    zeros, indices, values, *others = node.args
    if others != [True] or node.kwargs or not _is_new(zeros):
        return False
    places = [k for k, index in enumerate(indices) if index is not None]
    first, last = places[0], places[-1] + 1
    ops = Insert(node, node)
    sizes = _sizes(ops, zeros)
    taken = sizes[first:last]
    if len(places) != len(taken):
        return False
    if not all(_is_known(n, zeros) for n in (*indices[first:last], values)) or not _pays(zeros, values):
        return False
    if any(type(s) is int and s == 0 for s in sizes) or not (
        len(taken) == 1 or all(type(s) is int for s in taken)
    ):
        return False
    index = _joined(ops, indices[first:last], taken)
    before, behind = sizes[:first], sizes[last:]
    shape = zeros.meta["val"].shape
    expected = (*shape[:first], *index.meta["val"].shape, *shape[last:])
    if not _is_statically(values.meta["val"].shape, expected):
        return False  # what was inserted is dead
    whole = taken[0] if len(taken) == 1 else prod(taken)
    index = ops(aten.reshape.default, index, [-1])
    source = ops(aten.reshape.default, values, [*before, -1, *behind])
    total = _added(ops, [*before, whole, *behind], first, index, source)
    node.replace_all_uses_with(ops(aten.view.default, total, list(sizes)))
    return True


def add_parts(node: fx.Node) -> bool:
    """Makes an `index_add` of a `scatter_add` to new zeros whose index is the same for all elements of a part
    along its dim; returns whether it did."""
    zeros, dim, index, source = node.args
    if not _is_new(zeros) or node.kwargs:
        return False
    part = index.args[0] if index.target is aten.expand.default else index
    given, sizes, whole = (x.meta["val"].shape for x in (part, source, zeros))
    if not (_is_known(source, zeros) and _is_known(index, zeros) and _pays(zeros, source)):
        return False
    if not len(given) == len(sizes) == len(whole):
        return False
    along = dim % len(whole) if len(whole) else 0
    ones = [size if d == along else 1 for d, size in enumerate(sizes)]
    rest = [size if d == along else whole[d] for d, size in enumerate(sizes)]
    if not whole or not all(_is_statically(*pair) for pair in ((given, ones), (sizes, rest))):
        return False
    if not _is_statically(index.meta["val"].shape, sizes):
        return False
    ops = Insert(node, node)
    at = ops(aten.reshape.default, part, [-1])
    node.replace_all_uses_with(_added(ops, _sizes(ops, zeros), along, at, source))
    return True


def add_wide(node: fx.Node) -> bool:
    """Adds up in float32 what an `index_add` of 16 bits adds to new zeros, has groups make few sums, and has
    other ones add to zeros that stay outside of groups; returns whether it did."""
    if len(node.args) != 4 or node.kwargs or not _is_new(node.args[0]):
        return False
    zeros, dim, index, source = node.args
    dtype, sizes = zeros.meta["val"].dtype, zeros.meta["val"].shape
    if dtype not in _NARROW and zeros.target in _ZEROS and not (sizes and _is_few(sizes[dim])):
        return False
    if not _is_known(source, zeros) or source.meta["val"].dtype != dtype or not _pays(zeros, source):
        return False
    ops = Insert(node, node)
    node.replace_all_uses_with(_added(ops, _sizes(ops, zeros), dim, index, source))
    return True


def _added(ops: Insert, sizes: list[Any], dim: int, index: fx.Node, source: fx.Node) -> fx.Node:
    """New zeros, to which the source is added."""
    ranks = [value.meta["val"].dim() for value in (index, source)]
    if _is_few(sizes[dim]) and ranks == [1, len(sizes)]:
        return ops(torch.ops.tsfuser.sums_at.default, source, dim, sizes[dim], index)
    dtype = source.meta["val"].dtype
    wide = torch.float32 if dtype in _NARROW else dtype
    if wide != dtype:
        source = ops(aten._to_copy.default, source, dtype=wide)
    zeros = ops(aten.new_zeros.default, source, sizes)
    total = ops(aten.index_add.default, zeros, dim, index, source)
    return total if wide == dtype else ops(aten._to_copy.default, total, dtype=dtype)


def _is_few(size: Any) -> bool:
    """Whether a group makes that many sums side by side, where atomics would meet at the same places."""
    return type(size) is int and 0 < size <= FEW


def _pays(zeros: fx.Node, source: fx.Node) -> bool:
    """Whether sums in float32, which are cleared and rounded in passes of their own, take less time than
    what they save."""
    made, added = zeros.meta["val"], source.meta["val"]
    if made.dtype not in _NARROW:
        return True
    elements, count = hint(made.numel()), hint(added.numel())
    return elements is not None and count is not None and elements <= _MOST_ROUNDED * count


def _sizes(ops: Insert, zeros: fx.Node) -> list[Any]:
    if zeros.target is aten.zeros_like.default:
        given = zeros.args[0]
        known = given.meta["val"].shape
        return [n if type(n) is int else ops(aten.sym_size.int, given, d) for d, n in enumerate(known)]
    return zeros.args[{aten.zeros.default: 0, aten.full.default: 0}.get(zeros.target, 1)]


_AT_ONE_PLACE = {
    aten.scatter_add.default: "gather_backward",
    aten.scatter.src: "extreme_backward",
}


def put_at_one_place(node: fx.Node) -> bool:
    """Writes an addition to new zeros at one place along a dim, as in the gradient of `gather`, or a scatter
    there, as in that of `max`, as the op that a group makes by comparisons."""
    zeros, dim, index, source = node.args
    if not isinstance(zeros, fx.Node) or node.kwargs:
        return False
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
    node.target = getattr(torch.ops.tsfuser, _AT_ONE_PLACE[node.target]).default
    node.args = source, _sizes(Insert(node, node), zeros), dim, index
    return True


def _is_statically(sizes: Any, wanted: Any) -> bool:
    return len(sizes) == len(wanted) and all(statically_known_true(a == b) for a, b in zip(sizes, wanted))


def _is_new(zeros: Any) -> bool:
    """Whether the node makes zeros on a device on which torch's op sorts, or adds in any order, and nobody
    else reads them."""
    if not isinstance(zeros, fx.Node) or len(zeros.users) != 1:
        return False
    filled = _FILLED.get(zeros.target)
    if zeros.target not in (*_ZEROS, aten.zeros_like.default) and (
        filled is None or zeros.args[filled + 1] != 0
    ):
        return False
    made = zeros.meta["val"]
    if made.layout != torch.strided or made.dtype not in _SUMS or not made.is_contiguous():
        return False
    return made.device.type in embeddings.SORTING and not torch.are_deterministic_algorithms_enabled()


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
