"""Max and average pooling, over the windows of pool_windows.py.

In: a tensor, and the windows along its last dims. Out: for each window the largest element and its place, or
the mean. Example:

    max_pool1d(x, 2)[i] = max(x[2 * i], x[2 * i + 1])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..ir import layout as lay
from ..ir.build import Builder
from ..ir.dtypes import BOOL, INT8, INT32, INT64
from ..ir.fusion import Value
from ..ir.symbols import define
from .pool_windows import Windows, divisor, elements_of, facts, in_memory, result_of, windows_of
from .table import composite

define("exceeds", "({0} > {1} || {0} != {0})", cheap=True)
define("place_or_first", "({1} < 0 ? 0 : {0})", cheap=True)
define("behind_padding", "({0} + ({1} < 0 ? -{1} : 0))", cheap=True)
define("digit", "({0} / {1} % {2})", cheap=True)


def _largest(
    b: Builder, name: str, self: Value, dims: Sequence[Windows], none: bool = False
) -> tuple[Value, Value]:
    """The largest element of each window, the first of equal ones but the last NaN, and its number there;
    with `none` the number is -1 where no element is larger than -inf."""
    self = in_memory(b, self, dims)
    best, place = (b.literal(-math.inf), b.literal(-1)) if none else (None, _first(b, self, dims))
    for k, element, inside in elements_of(b, self, dims):
        if inside is not None:
            operands = (inside, element, b.literal(-math.inf))
            element = b.pointwise("where", operands, self.dtype, own_types=True, layouts=(), name=name)
        if best is None:
            best = element
            continue
        taken = b.pointwise("exceeds", (element, best), BOOL, own_types=True)
        best = b.pointwise("where", (taken, element, best), self.dtype, own_types=True, layouts=(), name=name)
        place = b.pointwise("where", (taken, b.literal(k), place), INT32, own_types=True, layouts=())
    return best, place


def _first(b: Builder, self: Value, dims: Sequence[Windows]) -> Value:
    """The number in each window of the first place that is not in the padding."""
    number = b.literal(0)
    for d in dims:
        number = b.pointwise("mul", (number, b.literal(d.kernel)), INT32)
        if d.padding:
            operands = (number, d.start(b, d.windows(b, self)))
            number = b.pointwise("behind_padding", operands, INT32, own_types=True)
    return number


def _place(b: Builder, name: str, self: Value, dims: Sequence[Windows], number: Value) -> Value:
    """The places in the tensor, as one number, of elements that have a `number` in their window."""
    place, within_window = b.literal(0), math.prod([d.kernel for d in dims])
    for d in dims:
        within_window //= d.kernel
        digits = (number, b.literal(within_window), b.literal(d.kernel))
        offset = b.pointwise("digit", digits, INT32)
        step = b.pointwise("mul", (offset, b.literal(d.dilation)), INT64)
        there = b.pointwise("add", (d.start(b, d.windows(b, self)), step, b.literal(1)), INT64)
        before = b.pointwise("mul", (place, b.extent(d.size)), INT64)
        place = b.pointwise("add", (before, there, b.literal(1)), INT64, name=name)
    return place


def has_no_place_of_minus_inf(b: Builder, self: Value) -> bool:
    """Whether eager gives 0, the place of the first element of all, for windows of -inf alone: its kernel for
    images in channels last on CUDA does (ATen/native/cuda/DilatedMaxPool2d.cu)."""
    return b.device != "cpu" and lay.is_channels_last(b.call, b.layout(self))


_Results = Callable[[Builder, str, Value, Sequence[Windows]], tuple[Value, ...]]


def _best(b: Builder, name: str, self: Value, dims: Sequence[Windows]) -> tuple[Value, ...]:
    """The largest element of each window, NaN if it has one"""
    return (_largest(b, name, self, dims)[0],)


def _with_places(b: Builder, name: str, self: Value, dims: Sequence[Windows]) -> tuple[Value, ...]:
    """The largest element of each window and its place, the first of equal ones; NaN is the largest"""
    return best_and_place(b, name, self, dims, has_no_place_of_minus_inf(b, self))


def best_and_place(
    b: Builder, name: str, self: Value, dims: Sequence[Windows], none: bool = False
) -> tuple[Value, Value]:
    """The largest element of each window and its place; with `none` 0 where none is larger than -inf."""
    best, number = _largest(b, name, self, dims, none)
    place = _place(b, name, self, dims, number)
    if none:
        place = b.pointwise("place_or_first", (place, number), INT64, own_types=True)
    return best, place


def _with_offsets(b: Builder, name: str, self: Value, dims: Sequence[Windows]) -> tuple[Value, ...]:
    """The largest element of each window and its number there, in 8 bits"""
    best, number = _largest(b, name, self, dims)
    return best, b.pointwise("convert", (number,), INT8, own_types=True)


def _max_pool(kind: str, count: int, results: _Results, **more: Any) -> None:
    name = f"max_pool{count}d"

    def largest(
        b: Builder,
        self,
        kernel_size: list,
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ):
        dims = windows_of(b, name, b.sizes(self), kernel_size, stride, padding, dilation, ceil_mode)
        best, *others = results(b, name, self, dims)
        found = tuple(result_of(b, name, value, best.dims, self) for value in (best, *others))
        return found if others else found[0]

    largest.__doc__ = results.__doc__
    composite(kind, **facts(selects=True, **more))(largest)


_PLACES: dict[str, Any] = dict(without_gradient=(1,))
for _count in (1, 2, 3):
    _max_pool(f"aten::max_pool{_count}d", _count, _best)
for _count in (2, 3):
    _max_pool(f"aten::max_pool{_count}d_with_indices", _count, _with_places, **_PLACES)
_max_pool("tsfuser::max_pool", 2, _with_offsets, needs_kernel=True, **_PLACES)


# ---- means


def mean_of_windows(b: Builder, name: str, self: Value, dims: Sequence[Windows], by: Value) -> Value:
    """The sum of each window, divided by `by`."""
    self = in_memory(b, self, dims)
    register, total = self.dtype.register, b.literal(0.0)
    for _, element, inside in elements_of(b, self, dims):
        if inside is not None:
            operands = (inside, element, b.literal(0.0))
            element = b.pointwise("where", operands, register, own_types=True, layouts=())
        total = b.pointwise("add", (total, element, b.literal(1)), register)
    result = b.pointwise("div", (total, by), self.dtype, register, name=name)
    return result_of(b, name, result, result.dims, self)


def _avg_pool(count: int) -> None:
    name = f"avg_pool{count}d"

    @composite(f"aten::{name}", **facts())
    def mean(
        b: Builder,
        self,
        kernel_size: list,
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        """The mean of each window"""
        dims = windows_of(b, name, b.sizes(self), kernel_size, stride, padding, ceil=ceil_mode)
        windows = [d.windows(b, self) for d in dims]
        by = divisor(b, dims, windows, count_include_pad, divisor_override)
        return mean_of_windows(b, name, self, dims, by)


for _count in (1, 2, 3):
    _avg_pool(_count)
