"""Sums of elements that an index brings to the same place, as reductions: each sum looks at all elements.

In: elements, and which place each goes to. Out: the sums by place. The order of the additions is the same in
every run, and no sum waits for another one, as atomics would. Example, of two rows of three:

    sums_at(x, 0, 2, i)[r, j] = sum over k of (x[k, j] if i[k] is r else 0)

Few sums are made side by side in one sweep over the elements. Others are elements of a reduction with a loop
more, so that the work is that of a look at each element for each place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL
from ..ir.fusion import Axis, Value
from ..ir.lookups import checked
from ..ir.windows import position
from .joins import joined
from .reduction import narrow
from .table import FLOATING, composite
from .views import dim_of, unsqueezed

#: The most elements that a group looks at. Above it, atomics or a loop over the elements are faster.
_LOOKED_AT = {"cpu": 1 << 14, "cuda": 1 << 21}
#: A call of larger sizes than the profiled one may look at this many times the elements; above, it runs
#: unfused.
_GROWN = 32


@composite(
    "tsfuser::sums_at",
    dtypes=FLOATING,
    sizes="own",
    fixed=("dim", "size"),
    table="index",
    places="index",
    needs_kernel=True,
)
def sums_at(b: Builder, source, dim: int, size: int, index) -> Value:
    """The sums of the parts of `source` along `dim` that have the same index, of which there are a few"""
    if not source.dims or len(index.dims) != 1:
        raise Refusal("sums of a number, or at indices of another rank than 1, are left to torch")
    dim = dim_of(len(source.dims), dim)
    if not b.call.decide(sz.eq(b.sizes(source)[dim], b.sizes(index)[0])):
        raise Refusal("an index and its values differ in size")
    index = checked(b, "sums_at", index, sz.const(size))
    for _ in range(len(source.dims) - dim - 1):
        index = unsqueezed(b, index, len(index.dims))
    zero, register, found = b.literal(0.0), source.dtype.register, []
    for place in range(size):
        here = b.pointwise("eq", (index, b.literal(place)), BOOL, own_types=True)
        chosen = b.pointwise("where", (here, source, zero), source.dtype, own_types=True)
        found.append(b.reduce("sums_at", "sum", chosen, [dim], True, register))
    sums = joined(b, "sums_at", found, dim) if size > 1 else found[0]
    return b.contiguous(narrow(b, "sums_at", sums, source.dtype))


def _most(device: str) -> int:
    return _LOOKED_AT[device.partition(":")[0]]


def _looks_at_too_many(
    device: str, source: Sequence[int], index: Sequence[int], *sums: Sequence[int]
) -> str | None:
    """Why torch's op is faster."""
    places = max((math.prod(of) for of in sums), default=0) * max(source, default=1)
    return f"a group would look at {places} elements" if places > _most(device) else None


@composite(
    "tsfuser::sums_by_place",
    dtypes=FLOATING,
    sizes="own",
    fixed=("dim", "parts", "checks"),
    symbolic=("sizes",),
    table="index",
    places="index",
    needs_kernel=True,
    left=_looks_at_too_many,
    left_unsized=lambda given: "it is not known how many elements a group would look at",
)
def sums_by_place(b: Builder, source, sizes: list, dim: int, index, parts: bool, checks: bool) -> Value:
    """The sums of the elements of `source` that have the same index along `dim`, or, with `parts`, of its
    parts there"""
    rank, decide = len(sizes), b.call.decide
    if not rank or len(source.dims) != rank or len(index.dims) != (1 if parts else rank):
        raise Refusal("sums of another number of dims are left to torch")
    dim, own = dim_of(rank, dim), b.sizes(source)
    size = sz.as_size(sizes[dim])
    wanted = [sz.as_size(s) for d, s in enumerate(sizes) if d != dim]
    expected = [s for d, s in enumerate(own) if d != dim]
    pairs = [*zip(wanted, expected), *zip(b.sizes(index), [own[dim]] if parts else own)]
    if not all(decide(sz.eq(one, other)) for one, other in pairs):
        raise Refusal("sums of a part of a tensor, or into one, are left to torch")
    if decide(sz.eq(size, 0)) or not decide(sz.le(size * sz.product(own), _GROWN * _most(b.device))):
        raise Refusal("sums at no places, or at so many that torch's op is faster, are left to torch")
    index = checked(b, "sums_by_place", index, size)
    for _ in range(rank - dim - 1 if parts else 0):
        index = unsqueezed(b, index, len(index.dims))
    axis = None if decide(sz.eq(size, 1)) else b.fresh_axis(size)
    before: list[Axis | None] = [None] * dim
    row = b.literal(0)
    if axis is not None:
        row = position(b, [*before, axis, *[None] * (rank - dim)], dim)
    apart = unsqueezed(b, index, 0 if parts else dim)
    here = b.pointwise("eq", (apart, row), BOOL, own_types=True)
    operands = (here, unsqueezed(b, source, dim), b.literal(0.0))
    chosen = b.pointwise("where", operands, source.dtype, own_types=True)
    summed = b.reduce("sums_by_place", "sum", chosen, [dim + 1], False, source.dtype.register)
    return b.contiguous(narrow(b, "sums_by_place", summed, source.dtype))
