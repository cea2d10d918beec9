"""A tensor inside of a larger one that has one number everywhere else: paddings, and gradients of parts.

In: a tensor, and where it lies along some dims. Out: the larger tensor; an element is chosen by its place,
and only elements inside of the tensor are read. Example:

    constant_pad_nd(x, [2, 0], 0)[i, j] = x[i, j - 2] if 2 <= j else 0
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.fusion import Value
from ..ir.values import Window
from ..ir.views import view
from ..ir.windows import part, placed, within
from .casts import clone
from .elementwise import converted, fit
from .parts import counted, part_of
from .table import ALL, CONVERTED, composite
from .views import dim_of, reshaped, unsqueezed


def _padded(
    b: Builder, name: str, self: Value, places: Sequence[tuple[int, sz.Size, sz.Size]], fill: Value
) -> Value:
    """`self` inside of a tensor that has `fill` elsewhere, row-major: of each dim in `places` where it
    begins, and how long the result's is."""
    value, tests, decide = self, [], b.call.decide
    for dim, start, size in places:
        if decide(sz.eq(size, 1)):  # its only place is inside, or nothing is
            if decide(sz.lt(0, start)) or not decide(sz.lt(-1 * start, b.sizes(self)[dim])):
                return _fill_alone(b, name, self, places, fill)
            value = part(b, value, dim, -1 * start, sz.const(1))
            continue
        axis = b.fresh_axis(size)
        window = Window((axis,), start, start + b.sizes(self)[dim])
        dims = [axis if d == dim else None for d in range(len(self.dims))]
        value = placed(b, value, dim, window)
        tests.append(within(b, dims, dim, window))
    for inside in tests:
        value = b.pointwise("where", (inside, value, fill), self.dtype, own_types=True, layouts=(), name=name)
    return b.contiguous(value if tests else b.pointwise("copy", (value,), self.dtype, name=name))


def _fill_alone(
    b: Builder, name: str, self: Value, places: Sequence[tuple[int, sz.Size, sz.Size]], fill: Value
) -> Value:
    """What `_padded` makes if nothing of `self` is inside."""
    dims = list(self.dims)
    for dim, _, size in places:
        dims[dim] = None if b.call.decide(sz.eq(size, 1)) else b.fresh_axis(size)
    one = b.pointwise("convert", (fill,), self.dtype, own_types=True, name=name)
    spread = view(b, name, one, dims, [sz.const(0)] * len(dims))
    return b.contiguous(b.pointwise("copy", (spread,), self.dtype, name=name))


def _zero(b: Builder, self: Value) -> Value:
    return b.literal({"b": False, "i": 0, "f": 0.0, "c": 0j}[self.dtype.kind])


@composite(
    "aten::slice_backward",
    dtypes=ALL,
    sizes="own",
    symbolic=("input_sizes", "start", "end"),
    fixed=("dim", "step"),
)
def slice_backward(
    b: Builder, grad_output, input_sizes: list, dim: int, start: int, end: int, step: int
) -> Value:
    """`grad_output` in zeros of `input_sizes`, where a slice was"""
    rank = len(grad_output.dims)
    if not rank or len(input_sizes) != rank:
        raise Refusal("slice_backward to another number of dims is an error in eager")
    dim = dim_of(rank, dim)
    size = sz.as_size(input_sizes[dim])
    first = counted(b, sz.as_size(start), size)
    if b.call.decide(sz.lt(first, 0)):
        first = sz.const(0)
    if step < 1:
        raise Refusal("a slice by steps of less than 1 is an error in eager")
    if step == 1:
        return _padded(b, "slice_backward", grad_output, [(dim, first, size)], _zero(b, grad_output))
    return _spread(b, grad_output, dim, first, size, step)


def _spread(b: Builder, self: Value, dim: int, first: sz.Size, size: sz.Size, step: int) -> Value:
    """`self` in zeros, at every `step`th place of `dim` from `first` on: one column of a matrix with rows of
    `step` elements, which are walked through one after another, as far as `size`."""
    if any(b.call.decide(sz.eq(n, 0)) for n in (size, *b.sizes(self))):
        return _fill_alone(b, "slice_backward", self, [(dim, first, size)], _zero(b, self))
    rows = sz.ceildiv(size, step)
    places = [(dim, first // step, rows), (dim + 1, first % step, sz.const(step))]
    matrix = _padded(b, "slice_backward", unsqueezed(b, self, dim + 1), places, _zero(b, self))
    sizes = list(b.sizes(self))
    sizes[dim] = rows * step
    whole = reshaped(b, "slice_backward", matrix, sizes)
    made = part_of(b, "slice_backward", whole, dim, sz.const(0), size)
    return b.contiguous(b.pointwise("copy", (made,), self.dtype, name="slice_backward"))


@composite(
    "aten::select_backward",
    dtypes=ALL,
    sizes="own",
    symbolic=("input_sizes", "index"),
    fixed=("dim",),
)
def select_backward(b: Builder, grad_output, input_sizes: list, dim: int, index: int) -> Value:
    """`grad_output` in zeros of `input_sizes`, where a part was selected"""
    dim = dim_of(len(input_sizes), dim)
    size = sz.as_size(input_sizes[dim])
    place = counted(b, sz.as_size(index), size)
    layer = unsqueezed(b, grad_output, dim)
    return _padded(b, "select_backward", layer, [(dim, place, size)], _zero(b, grad_output))


def _constant_pad(b: Builder, self: Value, pad: Sequence[sz.Size], value: Value | None) -> Value:
    rank, have, decide = len(self.dims), b.sizes(self), b.call.decide
    if len(pad) % 2 or len(pad) > 2 * rank:
        raise Refusal("a padding of more dims than there are is an error in eager")
    if value is not None:
        if value.dtype.is_complex and not self.dtype.is_complex:
            raise Refusal("a complex padding of a real tensor is an error in eager")
        converted(b, "a padding", self.dtype, value)
    places = []
    for k in range(len(pad) // 2):
        dim, before, behind = rank - 1 - k, sz.as_size(pad[2 * k]), sz.as_size(pad[2 * k + 1])
        if before is sz.const(0) and behind is sz.const(0):
            continue
        size, left = have[dim] + before + behind, have[dim]
        for amount in (before, behind):
            left = left + amount if decide(sz.lt(amount, 0)) else left
        if decide(sz.lt(left, 0)):
            raise Refusal("a padding that takes more than there is is an error in eager")
        places.append((dim, before, size))
    if all(decide(sz.le(p, 0)) for p in pad):  # which eager does not compute in the format of `self`
        for dim, before, size in places:
            self = part_of(b, "pad", self, dim, -1 * before, size)
        return clone(b, self)
    fill = _zero(b, self) if value is None else value
    [fill] = fit(b, (fill,), self.dtype, exact=True)
    made = _padded(b, "pad", self, places, fill)
    return b.in_format_of(made, self)


@composite("aten::constant_pad_nd", dtypes=CONVERTED, sizes="padded", symbolic=("pad",), moves=True)
def constant_pad_nd(b: Builder, self, pad: list, value=None) -> Value:
    """`self`, padded with `value` before and behind each of its last dims"""
    return _constant_pad(b, self, pad, value)


# TorchScript: where nothing but groups could tell a copy from the operand
@composite(
    "tsfuser::pad",
    dtypes=CONVERTED,
    sizes="padded",
    symbolic=("pad",),
    only={"mode": "constant"},
    fresh=False,
)
@composite(
    "aten::pad", dtypes=CONVERTED, sizes="padded", symbolic=("pad",), only={"mode": "constant"}, moves=True
)
def pad_(b: Builder, self, pad: list, mode: str = "constant", value=None) -> Value:
    """`self`, padded with `value` before and behind each of its last dims"""
    return _constant_pad(b, self, pad, value)
