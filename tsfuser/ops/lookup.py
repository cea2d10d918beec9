"""Elements at places that a tensor of indices holds, over `Builder.lookup`; where PYTORCH_NVFUSER_ENABLE asks
for `graph_op_fusion`, as in nvFuser. And the gradient of `x[index]`.

In: a tensor in memory, a dim of it, indices. Out: a result whose dims are those of the indices. Example, rows
2 and 0 of x[3, 4]:

    index_select(x, 0, [2, 0])[i, j] = x[index[i], j]      gather(x, 0, index)[i, j] = x[index[i, j], j]

An index out of range is an error, as in eager (codegen/runtime/lookup.h).

The gradient of a row of x is the sum of the gradients of all places whose index is that row. A group looks at
each place for each row, and so adds in an order that is the same in every run; eager sorts the indices first,
which on a GPU takes a dozen launches. For a small table, as of the relative positions in an attention, to
look at all is far cheaper:

    index_backward(g, [3, 4], [2, 0, 2])[i, j] = sum over k of (g[k, j] if index[k] is i else 0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL
from ..ir.fusion import Value
from ..ir.symbols import define
from ..ir.values import extent
from ..ir.windows import position
from .reduction import narrow
from .table import ALL, FLOATING, composite
from .views import dim_of, unsqueezed

Sizes = Sequence[int]

_OPTION = "graph_op_fusion"


def _check(name: str, self: Value) -> None:
    if not self.dims:
        raise Refusal(f"{name} from a tensor without dims is not supported")


@composite(
    "aten::gather",
    dtypes=ALL,
    sizes="own",
    selects=True,
    fixed=("dim",),
    option=_OPTION,
    table="self",
    places="index",
)
def gather(b: Builder, self, dim: int, index, sparse_grad: bool = False) -> Value:
    """Elements of `self`, each at the place of its index, but along `dim` where the index says"""
    _check("gather", self)
    dim = dim_of(len(self.dims), dim)
    if len(index.dims) != len(self.dims):
        raise Refusal("gather with an index of another rank is not supported")
    for d, (wanted, size) in enumerate(zip(b.sizes(index), b.sizes(self))):
        if d != dim and not b.call.decide(sz.le(wanted, size)):
            raise Refusal("gather with an index that is larger than the tensor is an error in eager")
    return b.lookup("gather", self, dim, index, index.dims)


@composite(
    "aten::index_select",
    dtypes=ALL,
    sizes="own",
    selects=True,
    fixed=("dim",),
    option=_OPTION,
    table="self",
    places="index",
)
def index_select(b: Builder, self, dim: int, index) -> Value:
    """The parts of `self` whose places along `dim` the index holds"""
    _check("index_select", self)
    dim = dim_of(len(self.dims), dim)
    if len(index.dims) > 1:
        raise Refusal("index_select with an index of more than one dim is an error in eager")
    dims = [None if axis is None else b.fresh_axis(b.axis(axis).extent) for axis in self.dims]
    dims[dim] = index.dims[0] if index.dims else None
    return b.lookup("index_select", self, dim, index, dims)


#: Whether an index, which may count from the end, is this place of so many.
define("is_at", "({0} == {1} || {0} == {1} - {2})", cheap=True)

#: The largest number of elements that a group may look at. Above it, eager's sort is faster.
_LOOKED_AT = {"cpu": 1 << 14, "cuda": 1 << 25}
#: How many times as many in calls of other sizes than those profiled, before they run unfused.
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
