"""The layouts that eager would give to results, while a Fusion is built.

In: a value that an op has just made, and the operands that eager would look at. Out: where its elements lie
in memory, in the draft's `layouts`. Example, of an op whose result is always row-major:

    return b.contiguous(b.pointwise("softmax", (powers, sums), dtype))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from . import layout as lay
from .call import Call
from .draft import Draft
from .dtypes import DType
from .fusion import Axis, Value

_WITHOUT_DIMS = lay.Layout((), (), dense=True)


class ResultLayouts(Draft):
    """A Draft that knows eager's rules; `device` is where the group runs (`cpu`, `cuda:0`), on which some of
    them depend."""

    def __init__(self, call: Call, device: str):
        super().__init__(call)
        self.device = device
        # memo: (sizes, layouts of the operands) -> that of the result; (layout,) -> that of a copy
        self._known_layouts: dict[tuple, lay.Layout] = {}

    def contiguous(self, value: Value) -> Value:
        """`value`, which an op of the caller has just made, row-major in memory, as eager's normalisations
        and softmax leave it."""
        self.layouts[value.name] = lay.contiguous(self.sizes(value))
        return value

    def like(self, value: Value, other: Value) -> Value:
        """`value`, which an op of the caller has just made, in the layout of an elementwise result of
        `other`."""
        self.layouts[value.name] = self.pointwise_layout(value.dims, self.layouts_of((other,)))
        return value

    def copied(self, value: Value, other: Value) -> Value:
        """`value`, which an op of the caller has just made, in the layout of a copy of `other`."""
        (layout,) = self.layouts_of((other,), numbers=True)
        self.layouts[value.name] = self._known((layout,), lambda: lay.copied(self.call, layout))
        return value

    def packed(self, value: Value, other: Value) -> Value:
        """`value`, which an op of the caller has just made, row-major in memory but for the last two dims,
        the nearer of which in `other` is inside."""
        self.layouts[value.name] = lay.packed(self.call, self.layout(other))
        return value

    def with_room(self, value: Value, dim: int) -> Value:
        """`value`, of two dims or more, which `packed` has made, with room behind dim `dim`, one of the last
        two; see `layout.with_room`."""
        self.layouts[value.name] = lay.with_room(self.call, self.layout(value), dim)
        return value

    def laid_out(self, value: Value, order: Sequence[int]) -> Value:
        """`value`, which an op of the caller has just made, with its dims in that `order` in memory,
        outermost first, without gaps."""
        self.layouts[value.name] = lay.laid_out(self.sizes(value), order)
        return value

    def in_format_of(self, value: Value, other: Value) -> Value:
        """`value`, which an op of the caller has just made, channels-last in memory where `other` would be,
        else row-major."""
        make = lay.channels_last if lay.is_channels_last(self.call, self.layout(other)) else lay.contiguous
        self.layouts[value.name] = make(self.sizes(value))
        return value

    def in_packed_format_of(self, value: Value, other: Value) -> Value:
        """The same where strides of dims of size 1 do not count: channels-last also where `other` fills
        memory in that order, and not row-major."""
        layout = self.layout(other)
        if lay.is_contiguous(self.call, layout) or not lay.is_packed_channels_last(self.call, layout):
            return self.in_format_of(value, other)
        self.layouts[value.name] = lay.channels_last(self.sizes(value))
        return value

    def has_format(self, value: Value) -> bool:
        """Whether `value` lies row-major or channels-last in memory."""
        layout = self.layout(value)
        return lay.is_contiguous(self.call, layout) or lay.is_channels_last(self.call, layout)

    def cast_layouts(self, operands: Sequence[Value], dtype: DType) -> tuple[lay.Layout, ...]:
        """The layouts of `operands`, which are tensors or numbers, those of another dtype being cast to
        `dtype` first."""
        own = self.layouts_of(operands, numbers=True)
        return tuple(
            layout
            if v.dtype is dtype or not layout.sizes
            else self._known((layout,), partial(lay.copied, self.call, layout))
            for v, layout in zip(operands, own)
        )

    def promoted_layouts(self, operands: Sequence[Value], dtype: DType) -> tuple[lay.Layout, ...]:
        """The layouts of `operands` as eager's iterator meets them in an op that promotes them to `dtype`: on
        the CPU it casts them first, elsewhere while it computes."""
        return (
            self.cast_layouts(operands, dtype)
            if self.device == "cpu"
            else self.layouts_of(operands, numbers=True)
        )

    def layouts_of(self, operands: Sequence[Value], numbers: bool = False) -> tuple[lay.Layout, ...]:
        """The layouts of `operands`; numbers, which are tensors without dims to eager's iterator, only where
        it sees them."""
        return tuple(
            _WITHOUT_DIMS if v.is_number else self.layout(v) for v in operands if numbers or not v.is_number
        )

    def pointwise_layout(self, dims: Sequence[Axis | None], layouts: Sequence[lay.Layout]) -> lay.Layout:
        """That of an elementwise result of `dims` of operands that lie in memory by `layouts`."""
        sizes, layouts = self.extents(dims), tuple(dict.fromkeys(layouts))
        if not layouts:
            return lay.contiguous(sizes)
        return self._known((sizes, layouts), lambda: lay.pointwise(self.call, sizes, layouts))

    def _known(self, key: tuple, make: Callable[[], lay.Layout]) -> lay.Layout:
        """What `make` gives, the same layout each time for a `key`."""
        if key not in self._known_layouts:
            self._known_layouts[key] = make()
        return self._known_layouts[key]
