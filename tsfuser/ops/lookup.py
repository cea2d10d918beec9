"""Elements at places that a tensor of indices holds, over `Builder.lookup`; and the gradient of `x[index]`.

In: a tensor in memory, indices, the dims of the tensor that they count. Out: a result with the dims of the
indices in the place of those. Example, rows 2 and 0 of x[3, 4]:

    index_select(x, 0, [2, 0])[i, j] = x[index[i], j]      gather(x, 0, index)[i, j] = x[index[i, j], j]

An index out of range is an error, as in eager (codegen/runtime/lookup.h). Indices of `x[i]` may count from
the end.

The gradient of a row of x is the sum of the gradients of all places whose index is that row. A group looks at
each place for each row, and so adds in an order that is the same in every run; eager sorts the indices first,
which on a GPU takes a dozen launches. For a small table, as of the relative positions in an attention, to
look at all is far cheaper:

    index_backward(g, [3, 4], [2, 0, 2])[i, j] = sum over k of (g[k, j] if index[k] is i else 0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import Refusal
from ..ir import layout as lay
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, INT64
from ..ir.fusion import Axis, Value
from ..ir.lookups import checked
from ..ir.symbols import define
from ..ir.values import extent
from ..ir.windows import position
from .reduction import narrow
from .table import ALL, FLOATING, composite
from .views import dim_of, unsqueezed

Sizes = Sequence[int]

_LOOKUP: dict[str, Any] = dict(dtypes=ALL, sizes="own", selects=True)


def _check(name: str, self: Value) -> None:
    if not self.dims:
        raise Refusal(f"{name} from a tensor without dims is not supported")


def _own_dims(b: Builder, table: Value) -> list[Axis | None]:
    """Dims as large as those of `table`, for the dims beside the indexed one: over axes of their own, as
    other values may vary along the table's."""
    return [None if axis is None else b.fresh_axis(b.axis(axis).extent) for axis in table.dims]


@composite("aten::gather", fixed=("dim",), table="self", places="index", picked="dim", **_LOOKUP)
def gather(b: Builder, self, dim: int, index, sparse_grad: bool = False) -> Value:
    """Elements of `self`, each at the place of its index, but along `dim` where the index says"""
    _check("gather", self)
    dim = dim_of(len(self.dims), dim)
    if len(index.dims) != len(self.dims):
        raise Refusal("gather with an index of another rank is not supported")
    for d, (wanted, size) in enumerate(zip(b.sizes(index), b.sizes(self))):
        if d != dim and not b.call.decide(sz.le(wanted, size)):
            raise Refusal("gather with an index that is larger than the tensor is an error in eager")
    walked = [None if d == dim else d for d in range(len(self.dims))]
    return b.lookup("gather", self, index.dims, walked, {dim: index})


@composite("aten::take_along_dim", fixed=("dim",), table="self", places="indices", **_LOOKUP)
def take_along_dim(b: Builder, self, indices, dim: int | None = None) -> Value:
    """Elements of `self` as `gather` takes them; sizes broadcast but along `dim`, and all indices wrap"""
    _check("take_along_dim", self)
    if dim is None or len(indices.dims) != len(self.dims) or indices.dtype is not INT64:
        raise Refusal(
            "take_along_dim over all dims, or with int32 or an index of another rank, is left to torch"
        )
    dim = dim_of(len(self.dims), dim)
    dims, walked, size = list(indices.dims), [], b.sizes(self)[dim]
    if b.call.decide(sz.eq(size, 0)):
        raise Refusal("take_along_dim along a dim without elements is an error in eager")
    for d, (axis, own) in enumerate(zip(_own_dims(b, self), self.dims)):
        if d != dim and axis is not None:
            if dims[d] is not None and not b.call.decide(sz.eq(b.sizes(indices)[d], b.sizes(self)[d])):
                raise Refusal("take_along_dim of sizes that do not broadcast is an error in eager")
            dims[d] = axis if dims[d] is None else dims[d]
        walked.append(None if d == dim or own is None else d)
    place = b.pointwise("remainder", (indices, extent(size)), INT64)
    return b.lookup("take_along_dim", self, dims, walked, {dim: place})


@composite("aten::index_select", fixed=("dim",), table="self", places="index", picked="dim", **_LOOKUP)
def index_select(b: Builder, self, dim: int, index) -> Value:
    """The parts of `self` whose places along `dim` the index holds"""
    _check("index_select", self)
    dim = dim_of(len(self.dims), dim)
    if len(index.dims) > 1:
        raise Refusal("index_select with an index of more than one dim is an error in eager")
    dims, walked = _own_dims(b, self), [None if d == dim else d for d in range(len(self.dims))]
    dims[dim] = index.dims[0] if index.dims else None
    return b.lookup("index_select", self, dims, walked, {dim: index})


@composite("aten::embedding", table="weight", places="indices", picked=0, **_LOOKUP)
def embedding(
    b: Builder,
    weight,
    indices,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """The rows of `weight` that `indices` name"""
    if len(weight.dims) != 2:
        raise Refusal("embedding of a weight that is no matrix is an error in eager")
    dims = (*indices.dims, _own_dims(b, weight)[1])
    return b.lookup("embedding", weight, dims, [*(None for _ in indices.dims), 1], {0: indices})


#: An index that may count from the end, counted from the beginning.
define("from_end", "({0} < 0 ? {0} + {1} : {0})", cheap=True)


@composite("aten::index", "Tensor", table="self", places="indices", **_LOOKUP)
def index(b: Builder, self, indices) -> Value:
    """`self[i, j]` for tensors i and j of places, which broadcast; `:` and `None` may be between them"""
    if indices is None:
        raise Refusal("x[...] with a list of indices that is not known is left to torch")
    rank, taken = len(self.dims), {d: i for d, i in enumerate(indices) if i is not None}
    if not taken or len(indices) > rank:
        raise Refusal("x[...] without an index, or with more of them than x has dims, is left to torch")
    places = {
        d: b.pointwise("from_end", (i, extent(b.sizes(self)[d])), INT64, own_types=True, name="index")
        for d, i in taken.items()
    }
    found, met = b.broadcast(list(places.values()))
    own, first, last = _own_dims(b, self), min(taken), max(taken)
    between = last - first + 1 > len(taken)  # a dim that stays: then the dims of the indices come first
    at = 0 if between else first
    stay = [d for d in range(rank) if d not in taken]
    walked: list[int | None] = [*stay[:at], *(None for _ in found), *stay[at:]]
    dims = [*(own[d] for d in stay[:at]), *found, *(own[d] for d in stay[at:])]
    layout = _index_layout(b, self, list(taken.values()), dims, walked)
    return b.lookup("index", self, dims, walked, dict(zip(taken, met)), layout)


def _index_layout(
    b: Builder,
    self: Value,
    indices: Sequence[Value],
    dims: Sequence[Axis | None],
    walked: Sequence[int | None],
) -> lay.Layout:
    """That which eager's iterator gives the result, It meets the tensor, which does not move along the dims
    of the indices, and then the indices, of size 1 along the others."""
    own, behind = b.layout(self).strides, 0 if None not in walked else walked[::-1].index(None)
    read = [lay.Layout(b.extents(dims), tuple(sz.const(0) if d is None else own[d] for d in walked))]
    for index in indices:
        ahead, layout = len(walked) - behind - len(index.dims), b.layout(index)
        ones = [sz.const(1)] * ahead, [sz.const(1)] * behind
        sizes, strides = ((*ones[0], *known, *ones[1]) for known in (layout.sizes, layout.strides))
        read.append(lay.Layout(sizes, strides))
    return b.pointwise_layout(dims, read)


_PLACED: dict[str, Any] = dict(
    dtypes=FLOATING, sizes="own", fixed=("dim",), table="index", places="index", symbolic=("sizes",)
)


@composite("tsfuser::gather_backward", **_PLACED)
def gather_backward(b: Builder, gradient, sizes: list, dim: int, index) -> Value:
    """The gradient of `gather(x, dim, index)` for x of these sizes, of one index along `dim`"""
    added = b.pointwise("add", (gradient, b.literal(0.0)), gradient.dtype.register)  # 0 + -0 is 0
    return _placed(b, "gather_backward", gradient, added, sizes, dim, index)


@composite("tsfuser::extreme_backward", **_PLACED)
def extreme_backward(b: Builder, gradient, sizes: list, dim: int, index) -> Value:
    """The gradient of `x.max(dim)` for x of these sizes, with its places as `index`, of one along `dim`"""
    return _placed(b, "extreme_backward", gradient, gradient, sizes, dim, index)


def _placed(
    b: Builder, name: str, gradient: Value, element: Value, sizes: list, dim: int, index: Value
) -> Value:
    rank, found = len(sizes), b.sizes(index)
    if not rank or rank != len(index.dims) or rank != len(gradient.dims):
        raise Refusal(f"{name} to another number of dims is left to torch")
    dim, size = dim_of(rank, dim), sz.as_size(sizes[dim_of(rank, dim)])
    wanted = [sz.const(1) if d == dim else sz.as_size(s) for d, s in enumerate(sizes)]
    for other in (found, b.sizes(gradient)):
        if not all(b.call.decide(sz.eq(x, y)) for x, y in zip(other, wanted)):
            raise Refusal(f"{name} of more than one index along its dim, or of a part, is left to torch")
    index = checked(b, name, index, size)
    axis = None if b.call.decide(sz.eq(size, 1)) else b.fresh_axis(size)
    dims: list[Axis | None] = [None] * rank
    dims[dim] = axis
    place = b.literal(0) if axis is None else position(b, dims, dim)
    here = b.pointwise("eq", (index, place), BOOL, own_types=True)
    register, zero = gradient.dtype.register, b.literal(0.0)
    result = b.pointwise("where", (here, element, zero), register, own_types=True, name=name)
    return b.contiguous(narrow(b, name, result, gradient.dtype))


@composite(
    "tsfuser::add_at",
    dtypes=("float32", "float64"),
    sizes="first",
    fixed=("dim",),
    table="index",
    places="index",
    fresh=False,
)
def add_at(b: Builder, self, dim: int, index, source) -> Value:
    """`self`, to whose memory the source is added along `dim`, at the places that the index holds"""
    rank = len(self.dims)
    dim = dim_of(rank, dim)
    if len(index.dims) != 1 or len(source.dims) != rank:
        raise Refusal("an index of another rank than 1, or a source of another rank, is left to torch")
    for _ in range(rank - dim - 1):
        index = unsqueezed(b, index, len(index.dims))
    for _ in range(dim):
        index = unsqueezed(b, index, 0)
    value = b.pointwise("copy", (source,), source.dtype, name="add_at")
    b.add_at(self, value, dim, index)
    return self


@composite("aten::one_hot", dtypes=("int64",), sizes="own", table="self", fixed=("num_classes",))
def one_hot(b: Builder, self, num_classes: int = -1) -> Value:
    """1 at the place that an index names, of `num_classes`, and 0 elsewhere"""
    if num_classes < 1:
        raise Refusal("one_hot without a number of classes is left to torch: the size depends on the indices")
    size = sz.const(num_classes)
    index = unsqueezed(b, checked(b, "one_hot", self, size), len(self.dims))
    axis = b.fresh_axis(size) if num_classes > 1 else None
    place = position(b, [axis], 0) if axis is not None else b.literal(0)
    here = b.pointwise("eq", (index, place), BOOL, own_types=True)
    return b.contiguous(b.cast(here, INT64))


#: Whether an index, which may count from the end, is place {1} of a dim of size {2}.
define("is_at", "({0} == {1} || {0} == {1} - {2})", cheap=True)

#: The largest number of elements that a group may look at. Above it, eager's sort is faster.
_LOOKED_AT = {"cpu": 1 << 14, "cuda": 1 << 25}
#: A call of larger sizes than the profiled one may look at this many times the elements; above, it runs
#: unfused.
_GROWN = 32


def _most(device: str) -> int:
    return _LOOKED_AT[device.partition(":")[0]]


def _looks_at_too_many(device: str, gradient: Sizes, index: Sizes, result: Sizes) -> str | None:
    """Why eager's sort of the indices is faster."""
    looked_at = math.prod(index) * math.prod(result)
    return f"a group would look at {looked_at} elements" if looked_at > _most(device) else None


@composite(
    "tsfuser::index_backward",
    dtypes=FLOATING,
    sizes="own",
    places="index",
    symbolic=("sizes",),
    needs_kernel=True,
    left=_looks_at_too_many,
)
def index_backward(b: Builder, gradient, sizes: list, index) -> Value:
    """The gradient of `x[index]` for x of these sizes"""
    places, rank = list(range(1, 1 + len(index.dims))), len(sizes)
    if not rank or len(gradient.dims) != len(index.dims) + rank - 1:
        raise Refusal("index_backward to another number of dims is an error in eager")
    rows = sz.as_size(sizes[0])
    if not b.call.decide(sz.le(rows * sz.product(b.sizes(gradient)), _GROWN * _most(b.device))):
        raise Refusal("x[index] has become so large that eager's sort of the indices is faster")
    chosen = unsqueezed(b, gradient, 0)
    if not b.call.decide(sz.eq(rows, 1)):  # of one row all places are
        for _ in range(rank - 1):
            index = unsqueezed(b, index, len(index.dims))
        row = position(b, [b.fresh_axis(rows), *(None for _ in gradient.dims)], 0)
        here = b.pointwise("is_at", (index, row, extent(rows)), BOOL, own_types=True, name="eq")
        zero = b.literal(0.0)
        chosen = b.pointwise("where", (here, chosen, zero), gradient.dtype, own_types=True, name="where")
    register = gradient.dtype.register
    summed = b.reduce("index_backward", "sum", chosen, places, False, register) if places else chosen
    return narrow(b, "index_backward", summed, gradient.dtype)
