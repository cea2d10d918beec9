"""A tensor inside of a larger one that has one number everywhere else: paddings, and gradients of parts.

In: a tensor, and where it lies along some dims. Out: the larger tensor; an element is chosen by its place,
and only what is inside is read. Example:

    constant_pad_nd(x, [2, 0], 0)[i, j] = x[i, j - 2] if 2 <= j else 0
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.fusion import Value
from ..ir.values import Window
from ..ir.windows import placed, within
from .casts import clone
from .elementwise import converted, round_number
from .parts import counted, part_of
from .table import ALL, composite
from .views import dim_of, unsqueezed


def _padded(
    b: Builder, name: str, self: Value, places: Sequence[tuple[int, sz.Size, sz.Size]], fill: Value
) -> Value:
    """`self` inside of a tensor that has `fill` elsewhere, row-major: of each dim in `places` where it
    begins, and how long the result's is."""
    value, tests = self, []
    for dim, start, size in places:
        if b.call.decide(sz.eq(size, 1)):
            if self.dims[dim] is not None or not b.call.decide(sz.eq(start, 0)):
                raise Refusal(f"{name} to a dim of size 1 is left to torch")
            continue
        axis = b.fresh_axis(size)
        window = Window((axis,), start, start + b.sizes(self)[dim])
        dims = [axis if d == dim else None for d in range(len(self.dims))]
        value = placed(b, value, dim, window)
        tests.append(within(b, dims, dim, window))
    for inside in tests:
        value = b.pointwise("where", (inside, value, fill), self.dtype, own_types=True, layouts=(), name=name)
    return b.contiguous(value if tests else b.pointwise("copy", (value,), self.dtype, name=name))


def _zero(b: Builder, self: Value) -> Value:
    return b.literal({"b": False, "i": 0, "f": 0.0, "c": 0j}[self.dtype.kind])


@composite(
    "aten::slice_backward",
    dtypes=ALL,
    sizes="own",
    symbolic=("input_sizes", "start", "end"),
    fixed=("dim",),
    only={"step": 1},
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
    return _padded(b, "slice_backward", grad_output, [(dim, first, size)], _zero(b, grad_output))


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
        size = have[dim] + before + behind
        if decide(sz.lt(size, 0)):
            raise Refusal("a padding that takes more than there is is an error in eager")
        places.append((dim, before, size))
    if all(decide(sz.le(p, 0)) for p in pad):  # which eager does not compute in the format of `self`
        for dim, before, size in places:
            self = part_of(b, "pad", self, dim, -1 * before, size)
        return clone(b, self)
    fill = _zero(b, self) if value is None else value
    if self.dtype.register is not self.dtype:
        fill = round_number(b, fill, self.dtype)
    made = _padded(b, "pad", self, places, fill)
    return b.in_format_of(made, self)


@composite("aten::constant_pad_nd", dtypes=ALL, sizes="own", symbolic=("pad",))
def constant_pad_nd(b: Builder, self, pad: list, value=None) -> Value:
    """`self` with so many elements of `value` before and behind each of its last dims"""
    return _constant_pad(b, self, pad, value)


@composite("aten::pad", dtypes=ALL, sizes="own", symbolic=("pad",), only={"mode": "constant"})
def pad_(b: Builder, self, pad: list, mode: str = "constant", value=None) -> Value:
    """`self` with so many elements of `value` before and behind each of its last dims"""
    return _constant_pad(b, self, pad, value)
