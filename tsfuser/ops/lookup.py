"""Elements at places that a tensor of indices holds, over `Builder.lookup`; where PYTORCH_NVFUSER_ENABLE asks
for `graph_op_fusion`, as in nvFuser.

In: a tensor in memory, a dim of it, indices. Out: a result whose dims are those of the indices. Example, rows
2 and 0 of x[3, 4]:

    index_select(x, 0, [2, 0])[i, j] = x[index[i], j]      gather(x, 0, index)[i, j] = x[index[i, j], j]

An index out of range is an error, as in eager (codegen/runtime/lookup.h).
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.fusion import Value
from .table import ALL, composite
from .views import dim_of

_OPTION = "graph_op_fusion"
_INDICES = ("int32", "int64")


def _check(name: str, self: Value, index: Value) -> None:
    if not self.dims:
        raise Refusal(f"{name} from a tensor without dims is not supported")
    if index.dtype.name not in _INDICES:
        raise Refusal(f"{name} with {index.dtype} indices is not supported")


@composite("aten::gather", dtypes=ALL, sizes="own", fixed=("dim",), option=_OPTION, table="self")
def gather(b: Builder, self, dim: int, index, sparse_grad: bool = False) -> Value:
    """Elements of `self`, each at the place of its index, but along `dim` where the index says"""
    _check("gather", self, index)
    dim = dim_of(len(self.dims), dim)
    if len(index.dims) != len(self.dims):
        raise Refusal("gather with an index of another rank is not supported")
    for d, (wanted, size) in enumerate(zip(b.sizes(index), b.sizes(self))):
        if d != dim and not b.call.decide(sz.le(wanted, size)):
            raise Refusal("gather with an index that is larger than the tensor is an error in eager")
    return b.lookup("gather", self, dim, index, index.dims)


@composite("aten::index_select", dtypes=ALL, sizes="own", fixed=("dim",), option=_OPTION, table="self")
def index_select(b: Builder, self, dim: int, index) -> Value:
    """The parts of `self` whose places along `dim` the index holds"""
    _check("index_select", self, index)
    dim = dim_of(len(self.dims), dim)
    if len(index.dims) > 1:
        raise Refusal("index_select with an index of more than one dim is an error in eager")
    dims = [None if axis is None else b.fresh_axis(b.axis(axis).extent) for axis in self.dims]
    dims[dim] = index.dims[0] if index.dims else None
    return b.lookup("index_select", self, dim, index, dims)
