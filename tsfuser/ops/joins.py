"""Tensors side by side in one: an element is chosen from one of them by its place, and read where it is.

In: tensors of equal sizes but for one dim. Out: a tensor with all their elements along that dim. A tensor
that is rolled or flipped has its own elements in another order. Example:

    cat((x, y), 0)[i] = x[i] if i < len(x) else y[i - len(x)]
    flip(x, [0])[i] = x[len(x) - 1 - i]
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refusal
from ..ir import layout as lay
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.fusion import Value
from ..ir.layout import Layout
from ..ir.values import Window
from ..ir.views import through_memory
from ..ir.windows import flipped, placed, within
from .parts import part_of
from .table import ALL, CONVERTED, composite
from .views import dim_of, reshaped, unsqueezed

#: Tensors of any kind. Where they are computed, a kernel asks for each of them whether an element is of it.
MAX_PIECES = 8
#: Tensors of one dtype in memory. A kernel finds the tensor that has the element, and loads from this one
#: alone (schedule/picks.py). Each has an address, an end, an offset and strides among the arguments of the
#: kernel: 32 of five dims take 1,152 of the 4,096 bytes that arguments may.
MAX_IN_MEMORY = 32


def _check(b: Builder, name: str, tensors: Sequence[Value]) -> None:
    if not tensors:
        raise Refusal(f"{name} of no tensors is an error in eager")
    if len(tensors) > MAX_IN_MEMORY:
        raise Refusal(f"{name} of more than {MAX_IN_MEMORY} tensors is left to torch")
    if len(tensors) > MAX_PIECES and len({v.dtype for v in tensors}) > 1:
        raise Refusal(f"{name} of more than {MAX_PIECES} tensors of different dtypes is left to torch")
    if len({len(v.dims) for v in tensors}) > 1:
        raise Refusal(f"{name} of tensors of different numbers of dims is left to torch")
    if b.device != "cpu" and any(not v.dims and b.is_on_cpu(v) for v in tensors):
        raise Refusal(f"{name} of 0-dim CPU tensors gives a CPU tensor")


def joined(b: Builder, name: str, tensors: Sequence[Value], dim: int) -> Value:
    """`tensors` behind one another along dim `dim`."""
    _check_sizes(b, name, tensors, dim)
    if len(tensors) > MAX_PIECES:
        tensors = [v if b.is_read(v) else through_memory(b, v, b.layout(v)) for v in tensors]
    dtype, sizes = b.promote(*tensors), [b.sizes(v)[dim] for v in tensors]
    total = sum(sizes, sz.const(0))
    if b.call.decide(sz.eq(total, 1)):  # all others are empty
        pieces, axis = [v for v in tensors if v.dims[dim] is None], None
    else:
        pieces, axis = list(tensors), b.fresh_axis(total)
    dims = [axis if d == dim else None for d in range(len(tensors[0].dims))]
    ends = [sum(sizes[:k], sz.const(0)) for k in range(len(sizes))][1:]
    if axis is not None:
        windows = [Window((axis,), start, stop) for start, stop in zip([sz.const(0), *ends], [*ends, None])]
        pieces = [placed(b, v, dim, window) for v, window in zip(pieces, windows)]
    pieces = [b.cast(v, dtype) for v in pieces]
    if len(pieces) == 1:
        return b.pointwise("copy", pieces, dtype, own_types=True, layouts=(), name=name)
    result = pieces[-1]
    for piece, stop in reversed(list(zip(pieces, ends))):
        here = within(b, dims, dim, Window((axis,), sz.const(0), stop))
        result = b.pointwise("where", (here, piece, result), dtype, own_types=True, layouts=(), name=name)
    return result


def _check_sizes(b: Builder, name: str, tensors: Sequence[Value], dim: int) -> None:
    for v in tensors[1:]:
        for d, (first, own) in enumerate(zip(tensors[0].dims, v.dims)):
            if d != dim and (first is None) != (own is None):
                raise Refusal(f"{name} of tensors of different sizes is an error in eager")


def _layout(b: Builder, tensors: Sequence[Value], sizes: Sequence[sz.Size]) -> Layout:
    """Channels-last where all tensors are, else row-major (ATen/native/TensorShape.cpp,
    `cat_compute_output_memory_format`)."""
    same = all(lay.is_channels_last(b.call, b.layout(v)) for v in tensors)
    return lay.channels_last(sizes) if same else lay.contiguous(sizes)


def _cat(kind: str) -> None:
    name = kind.removeprefix("aten::")

    @composite(kind, dtypes=CONVERTED, sizes="joined")
    def evaluate(b: Builder, tensors, dim: int = 0) -> Value:
        """`tensors`, at most 32, behind one another along `dim`"""
        _check(b, name, tensors)
        if not tensors[0].dims:
            raise Refusal(f"{name} of tensors without dims is an error in eager")
        made = joined(b, "cat", tensors, dim_of(len(tensors[0].dims), dim))
        b.layouts[made.name] = _layout(b, tensors, b.sizes(made))
        return made


for _kind in ("aten::cat", "aten::concat"):
    _cat(_kind)


@composite("aten::stack", dtypes=CONVERTED, sizes="own")
def stack(b: Builder, tensors, dim: int = 0) -> Value:
    """`tensors`, at most 32, of equal sizes, along a new dim `dim`"""
    _check(b, "stack", tensors)
    rank = len(tensors[0].dims)
    dim = dim_of(rank + 1, dim)
    layers = [unsqueezed(b, v, dim) for v in tensors]
    made = joined(b, "stack", layers, dim)
    if dim == rank:
        b.layouts[made.name] = _layout(b, layers, b.sizes(made))
        return made
    # eager joins along the dim that is there, and splits it
    sizes = list(b.sizes(made))
    count, length = sizes[dim : dim + 2]
    along = _layout(b, tensors, [*sizes[:dim], count * length, *sizes[dim + 2 :]]).strides
    strides = [*along[:dim], along[dim] * length, *along[dim:]]
    b.layouts[made.name] = Layout(tuple(sizes), tuple(strides), dense=True)
    return made


# ---- the elements of one tensor in another order


def _copy(b: Builder, name: str, value: Value) -> Value:
    return b.pointwise("copy", (value,), value.dtype, own_types=True, layouts=(), name=name)


def _rolled(b: Builder, value: Value, dim: int, shift: sz.Size) -> Value:
    """`value` with its elements shifted along `dim`, in the layout of the CPU's kernel, which joins two
    parts."""
    size, decide = b.sizes(value)[dim], b.call.decide
    first = (0 - shift) % size if decide(sz.lt(shift, 0)) else (size - shift % size) % size
    if value.dims[dim] is None or decide(sz.eq(first, 0)):
        return _copy(b, "roll", value)
    ranges = [(first, size - first), (sz.const(0), first)]
    parts = [part_of(b, "roll", value, dim, start, length) for start, length in ranges]
    made = joined(b, "roll", parts, dim)
    b.layouts[made.name] = _layout(b, parts, b.sizes(value))
    return made


_MOST_ROLLED = 2**62 - 1  # what torch hands on as a number, and not as a symbol


@composite("aten::roll", dtypes=ALL, sizes="first", symbolic=("shifts",), fixed=("dims",), moves=True)
def roll(b: Builder, self, shifts: list, dims: Sequence[int] = ()) -> Value:
    """`self` with its elements shifted along `dims`, or as one dim; what leaves at an end comes in at the
    other"""
    sizes = b.sizes(self)
    if any(b.call.decide(sz.eq(size, 0)) for size in sizes):
        return b.copied(_copy(b, "roll", self), self)
    if len(shifts) != len(dims or (0,)):
        raise Refusal("roll by another number of shifts than there are dims is an error in eager")
    for shift in map(sz.as_size, shifts):
        if b.call.decide(sz.lt(_MOST_ROLLED, shift)) or b.call.decide(sz.lt(shift, -_MOST_ROLLED)):
            raise Refusal("roll by more than torch takes is an error in eager")
    made = self
    if not dims:
        flat = reshaped(b, "roll", self, [sz.product(sizes)])
        return b.contiguous(
            _copy(b, "roll", reshaped(b, "roll", _rolled(b, flat, 0, sz.as_size(shifts[0])), sizes))
        )
    for dim, shift in zip(dims, shifts):
        made = _rolled(b, made, dim_of(len(self.dims), dim), sz.as_size(shift))
    return made if b.device == "cpu" else b.contiguous(made)


@composite("aten::flip", dtypes=ALL, sizes="first", fixed=("dims",), moves=True)
def flip(b: Builder, self, dims: list) -> Value:
    """`self` with its elements in reverse order along `dims`"""
    named = [dim_of(len(self.dims), d) for d in dims]
    if len(set(named)) < len(named):
        raise Refusal("flip of a dim named twice is an error in eager")
    made = self
    for dim in named if self.dims else ():
        made = flipped(b, made, dim)
    return b.copied(_copy(b, "flip", made), self)


@composite(
    "tsfuser::reshaped",
    dtypes=CONVERTED,
    sizes="viewed",
    symbolic=("shape",),
    reshapes=True,
    smooth=True,
    copies=True,
)
def reshaped_copy(b: Builder, self, shape: list) -> Value:
    """`aten::reshape` where nobody can tell a copy of `self` from a view"""
    made = reshaped(b, "reshape", self, shape)
    if sz.const(0) in b.layout(made).strides:
        raise Refusal("a view that repeats elements has to be one in memory, too")
    copy = b.pointwise("copy", (made,), self.dtype, layouts=())
    layout = lay.copied(b.call, b.layout(made))  # where there were gaps, nobody sees the strides
    b.layouts[copy.name] = Layout(layout.sizes, layout.strides, dense=True)
    return copy
