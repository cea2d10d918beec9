"""Values that are parts of one another: what eager copies to, or from, a range of places of another tensor.

In: values of a Draft. Out: a value over an axis of another size, whose elements are chosen by their place;
nothing is stored on the way, but where a value cannot be computed along another axis. Example, cat((x, y), 1)
with x[N, 3] and y[N, 5]:

    cat[i, j] = x[i, j] if j < 3 else y[i, j - 3]
"""

from __future__ import annotations

from collections.abc import Sequence

from . import size as sz
from .draft import Draft
from .dtypes import BOOL, INT64
from .fusion import Axis, Position, Value, Within
from .rematerialize import Move, moved
from .values import Window
from .views import through_memory


def placed(draft: Draft, value: Value, dim: int, window: Window) -> Value:
    """`value` along the axis of `window` in dim `dim`, where its elements lie in the window; not defined
    elsewhere. What is of size 1 there stays so."""
    return _moved(draft, value, dim, Move(window.axes[0], window.start, window))


def part(draft: Draft, value: Value, dim: int, start: sz.Size, size: sz.Size, step: int = 1) -> Value:
    """The `size` elements of `value` along dim `dim` at `start`, `start + step`..., all within its bounds."""
    axis = None if draft.call.decide(sz.eq(size, 1)) else draft.fresh_axis(size)
    return strided(draft, value, dim, axis, start, step)


def strided(
    draft: Draft,
    value: Value,
    dim: int,
    axis: Axis | None,
    first: sz.Size,
    step: int,
    window: Window | None = None,
) -> Value:
    """`value` along `axis` in dim `dim`, None for one element: element `i` is that of `value` at
    `first + i * step`, not defined outside of `window`. What is of size 1 there stays so."""
    return _moved(draft, value, dim, Move(axis, sz.const(0) - first, window, step))


def flipped(draft: Draft, value: Value, dim: int) -> Value:
    """`value` with the elements along dim `dim` in reverse order."""
    if value.dims[dim] is None:
        return value
    size = draft.sizes(value)[dim]
    return _moved(draft, value, dim, Move(draft.fresh_axis(size), 1 - size, step=-1))


def _moved(draft: Draft, value: Value, dim: int, move: Move) -> Value:
    copy = moved(draft, value, dim, move)
    if copy is None:
        copy = moved(draft, through_memory(draft, value, draft.layout(value)), dim, move)
    assert copy is not None, "what is read from memory can be read anywhere"
    return copy


def within(draft: Draft, dims: Sequence[Axis | None], dim: int, window: Window) -> Value:
    """Whether a place in dim `dim` of a tensor of `dims`, over the axis of `window`, is in the window."""
    output = draft.new("within", BOOL, (dims[dim], *(None for _ in dims[dim + 1 :])))
    draft.ops.append(Within("within", window, output))
    return output


def position(draft: Draft, dims: Sequence[Axis | None], dim: int) -> Value:
    """The number of a place in dim `dim` of a tensor of `dims`, in int64."""
    output = draft.new("position", INT64, (dims[dim], *(None for _ in dims[dim + 1 :])))
    draft.ops.append(Position("position", Window((dims[dim],), sz.const(0), None), output))
    return output
