"""What ops of a Fusion are over: axes, values, and windows of axes.

In: sizes of a call. Out: frozen records, which are compared and printed. Example, a row of x[N, C] and its
first half:

    a0 = Axis("a0", leaf(0, "size0_1"))
    row, half = Value("x0", FLOAT, (None, a0)), Window((a0,), const(0), a0.extent // 2)
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import INT64, DType
from .size import Size, as_size, const


@dataclass(frozen=True)
class Axis:
    """A loop extent, shared by all values that have it."""

    name: str
    extent: Size

    def __hash__(self):
        return hash(self.name)


@dataclass(frozen=True)
class Value:
    """A tensor or a number.

    `dims` has one entry a dimension: its `Axis`, or None for a dimension of size 1. A 0-dim tensor has `()`;
    a Python number has None, and `literal` if its value is known, or `size` if it is one of the call's sizes.
    `dtype` is the logical one: a float16 value lives in registers as float.
    """

    name: str
    dtype: DType
    dims: tuple[Axis | None, ...] | None
    literal: bool | int | float | complex | None = None
    size: Size | None = None

    @property
    def is_number(self) -> bool:
        return self.dims is None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes over which the value varies, outermost dimension first."""
        return tuple([a for a in self.dims or () if a is not None])

    def __hash__(self):
        return hash(self.name)


def extent(size: Size | int) -> Value:
    """A size of the call as a number."""
    size = as_size(size)
    return Value(f"extent({size.text()})", INT64, None, size=size)


@dataclass(frozen=True)
class Window:
    """The places along a dim whose number is at least `start` and less than `stop`, None where they reach to
    the end of the dim. `axes` are those of the dim, outermost first."""

    axes: tuple[Axis, ...]
    start: Size
    stop: Size | None

    @property
    def ends(self) -> tuple[Size, ...]:
        """Where places in the window and others meet."""
        start = () if self.start is const(0) else (self.start,)
        return start if self.stop is None else (*start, self.stop)
