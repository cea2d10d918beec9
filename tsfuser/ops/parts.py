"""Parts of a tensor along one dim: eager's views of them, read where they are.

In: a tensor, a dim of it, a range of places. Out: a value of another size along that dim, or without it. As
other views a part never leaves a group. Example, of x[N, 6]:

    x[:, 2:5][i, j] = x[i, j + 2]        x[:, 4][i] = x[i, 4]
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.fusion import Value
from ..ir.views import view
from ..ir.windows import part
from .table import CONVERTED, composite
from .views import dim_of


def part_of(
    b: Builder, name: str, self: Value, dim: int, start: sz.Size, size: sz.Size, step: int = 1
) -> Value:
    """`size` elements of `self` along `dim`, from `start` on."""
    strides = [s * step if d == dim else s for d, s in enumerate(b.layout(self).strides)]
    if (start, size) == (sz.const(0), b.sizes(self)[dim]):  # whatever the size: `x[:, 0:]`
        return view(b, name, self, self.dims, strides)
    if self.dims[dim] is not None:
        made = part(b, self, dim, start, size, step)
        return view(b, name, made, made.dims, strides)
    axis = None if b.call.decide(sz.eq(size, 1)) else b.fresh_axis(size)  # of the one element, or empty
    return view(b, name, self, [*self.dims[:dim], axis, *self.dims[dim + 1 :]], strides)


def _dim(self: Value, dim: int, name: str) -> int:
    if not self.dims:
        raise Refusal(f"{name} of a tensor without dims is an error in eager")
    return dim_of(len(self.dims), dim)


def counted(b: Builder, place: sz.Size, size: sz.Size) -> sz.Size:
    """A place that may count from the end, counted from the start."""
    return place + size if b.call.decide(sz.lt(place, 0)) else place


def clamped(b: Builder, place: sz.Size | None, size: sz.Size, default: sz.Size) -> sz.Size:
    """An end of a range as Python takes it."""
    if place is None:
        return default
    place = counted(b, place, size)
    if b.call.decide(sz.lt(place, 0)):
        return sz.const(0)
    return place if b.call.decide(sz.le(place, size)) else size


@composite(
    "aten::slice",
    "Tensor",
    dtypes=CONVERTED,
    sizes="sliced",
    symbolic=("start", "end"),
    fixed=("dim", "step"),
    moves=True,
)
def slice_(
    b: Builder, self, dim: int = 0, start: sz.Size | None = None, end: sz.Size | None = None, step: int = 1
):
    """The part of `self` from `start` to `end` along `dim`"""
    dim = _dim(self, dim, "slice")
    if step < 1:
        raise Refusal("a slice whose step is not positive is an error in eager")
    size = b.sizes(self)[dim]
    first = clamped(b, start, size, sz.const(0))
    last = clamped(b, end, size, size)
    length = last - first if b.call.decide(sz.lt(first, last)) else sz.const(0)
    return part_of(b, "slice", self, dim, first, sz.ceildiv(length, step), step)


@composite(
    "aten::narrow", dtypes=CONVERTED, sizes="own", symbolic=("start", "length"), fixed=("dim",), moves=True
)
def narrow(b: Builder, self, dim: int, start: sz.Size, length: sz.Size) -> Value:
    """The part of `self` of `length` elements from `start` on along `dim`"""
    dim = _dim(self, dim, "narrow")
    size = b.sizes(self)[dim]
    first = counted(b, start, size)
    decide = b.call.decide
    if decide(sz.lt(first, 0)) or decide(sz.lt(length, 0)) or not decide(sz.le(first + length, size)):
        raise Refusal("narrow to a part that there is not is an error in eager")
    return part_of(b, "narrow", self, dim, first, length)


@composite(
    "aten::select", "int", dtypes=CONVERTED, sizes="selected", symbolic=("index",), fixed=("dim",), moves=True
)
def select(b: Builder, self, dim: int, index: sz.Size) -> Value:
    """The part of `self` at place `index` of `dim`, without that dim"""
    dim = _dim(self, dim, "select")
    size = b.sizes(self)[dim]
    place = counted(b, index, size)
    if b.call.decide(sz.lt(place, 0)) or not b.call.decide(sz.lt(place, size)):
        raise Refusal("select of a place that there is not is an error in eager")
    made = part_of(b, "select", self, dim, place, sz.const(1))
    kept = [d for d in range(len(self.dims)) if d != dim]
    strides = b.layout(made).strides
    return view(b, "select", made, [made.dims[d] for d in kept], [strides[d] for d in kept])
