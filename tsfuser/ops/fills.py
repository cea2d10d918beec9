"""Numbers written to parts of a tensor, one part after another (csrc_stubs/torchscript/filled_parts.cpp).

In: the tensor as it was, and parts of it by slices along some dims. Out: a tensor in which each element is
chosen by its place. Example, of the parts [:2, 1:] and [2:] of x[3, 4]:

    filled(x, ..., [3., 5.])[i, j] = 5 if 2 <= i else 3 if 1 <= j and i < 2 else x[i, j]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL
from ..ir.fusion import Value
from ..ir.symbols import define
from ..ir.values import Window
from ..ir.windows import within
from .elementwise import round_number
from .parts import clamped
from .table import REAL, composite
from .views import dim_of

#: A number in the place of an element.
define("number_for", "convert<{ctype}>({1})", cheap=True)


@composite(
    "tsfuser::filled",
    dtypes=REAL,
    sizes="first",
    symbolic=("ends",),
    fixed=("dims", "counts", "numbers"),
    needs_kernel=True,
)
def filled(b: Builder, self, dims: list, counts: list, ends: list, numbers: list) -> Value:
    """`self` with numbers in parts of it. A part is given by slices: for each slice a dim and two ends"""
    if len(counts) != len(numbers) or sum(counts) != len(dims) or len(ends) != 2 * len(dims):
        raise Refusal("the numbers of parts, of their slices and of fill values do not agree")
    value, first = b.pointwise("copy", (self,), self.dtype, name="filled"), 0
    for count, number in zip(counts, numbers):
        slices = [(dims[k], *ends[2 * k : 2 * k + 2]) for k in range(first, first + count)]
        value = _with_part(b, value, slices, _number(b, self, number))
        first += count
    return b.copied(value, self)


def _with_part(
    b: Builder, value: Value, slices: Sequence[tuple[int, sz.Size, sz.Size]], number: Value
) -> Value:
    """`value`, but for the part that `slices` are, which is `number`."""
    windows = list(_windows(b, value, slices))
    if any(window is None for _, window in windows):
        return value
    if not windows:
        return b.pointwise("number_for", (value, number), value.dtype, own_types=True, name="filled")
    made = number
    for dim, window in reversed(windows):
        here = within(b, value.dims, dim, window)
        made = b.pointwise("where", (here, made, value), value.dtype, own_types=True, name="filled")
    return made


def _windows(
    b: Builder, value: Value, slices: Sequence[tuple[int, sz.Size, sz.Size]]
) -> Iterator[tuple[int, Window | None]]:
    """The windows of the slices that leave something out; None for one that leaves nothing."""
    decide = b.call.decide
    for dim, start, end in slices:
        dim = dim_of(len(value.dims), dim)
        size = b.sizes(value)[dim]
        first, last = (clamped(b, sz.as_size(place), size, size) for place in (start, end))
        if not decide(sz.lt(first, last)):
            yield dim, None
        elif value.dims[dim] is not None and not (decide(sz.eq(first, 0)) and decide(sz.eq(last, size))):
            yield dim, Window((value.dims[dim],), sz.const(0) if decide(sz.eq(first, 0)) else first, last)


def _number(b: Builder, self: Value, number: float) -> Value:
    """The number as an element of `self`. Integers keep its lowest bits."""
    dtype = self.dtype
    if dtype.kind == "f":
        value = b.literal(number)
        return round_number(b, value, dtype) if dtype.register is not dtype else value
    if dtype is BOOL:
        return b.literal(number != 0)
    if not abs(number) < 2.0**63:
        raise Refusal(f"{number} is no {dtype}")
    bits = 8 * dtype.itemsize
    low = 0 if dtype.name.startswith("u") else -(1 << bits - 1)
    return b.literal((int(number) - low) % (1 << bits) + low)
