"""Windows of pooling: where they lie along each dim, and the elements that they have.

In: a tensor, and for each of its last dims the size, step, padding and dilation of the windows. Out: for each
place in a window the elements there, over the windows: a window of k elements is k reads of the tensor, one
behind the other in one thread. Example, windows of 2 by steps of 2 along a dim:

    place 0: x[2 * i]    place 1: x[2 * i + 1]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, INT64
from ..ir.fusion import Axis, Pointwise, Value
from ..ir.symbols import define, find
from ..ir.values import Window
from ..ir.views import in_own_order, view
from ..ir.windows import position, strided, within
from .elementwise import as_stored
from .table import FLOATING

#: A window of more elements is a loop of its own, which torch's kernels have.
MOST = 32
#: Ops in all that are computed once more for each place in a window, instead of stored.
MOST_REPEATED = 64

_Elements = tuple[int, Value, Union[Value, None]]

define("window_start", "({0} * {1} - {2})", cheap=True)
define("window_length", "(({0} + {1} < {2} ? {0} + {1} : {2}) - ({0} < {3} ? {3} : {0}))", cheap=True)


@dataclass(frozen=True)
class Windows:
    """The windows along one dim: where they begin, and how far they go."""

    dim: int
    kernel: int
    step: int
    padding: int
    dilation: int
    size: sz.Size  # of the tensor
    count: sz.Size  # of windows
    axis: Axis | None  # of windows
    ceil: bool

    def elements(self, b: Builder, value: Value) -> Iterator[_Elements]:
        """For each place in a window: its number; the elements of `value` there, and whether there are any,
        None where there are in each window."""
        for k in range(self.kernel):
            first = k * self.dilation - self.padding
            # A last window that rounding up begins may end behind the tensor; others, behind its padding.
            beyond = self.padding if not self.ceil else math.inf if k else 0
            ends = beyond > self.dilation * (self.kernel - 1 - k)
            if self.axis is None:
                if first >= 0 and (not ends or b.call.decide(sz.lt(first, self.size))):
                    yield k, strided(b, value, self.dim, None, sz.const(first), self.step), None
                continue
            window = None
            if first < 0 or ends:
                low, high = max(0, -(first // self.step)), sz.ceildiv(self.size - first, self.step)
                window = Window((self.axis,), sz.const(low), high)
            found = strided(b, value, self.dim, self.axis, sz.const(first), self.step, window)
            yield k, found, None if window is None else within(b, self.dims(value), self.dim, window)

    def dims(self, value: Value) -> list[Axis | None]:
        """Those of a value that varies along this dim alone."""
        return [self.axis if d == self.dim else None for d in range(len(value.dims))]

    def windows(self, b: Builder, value: Value) -> Value:
        """The number of each window."""
        return b.literal(0) if self.axis is None else position(b, self.dims(value), self.dim)

    def start(self, b: Builder, window: Value) -> Value:
        """The place of the first element of a window in the tensor, perhaps in the padding before it."""
        return b.pointwise("window_start", (window, b.literal(self.step), b.literal(self.padding)), INT64)

    def length(self, b: Builder, window: Value, padded: bool) -> Value:
        """The number of elements of a window; `padded`: with those in the padding."""
        end, begin = (self.size + self.padding, -self.padding) if padded else (self.size, 0)
        numbers = b.literal(self.kernel), b.extent(end), b.literal(begin)
        return b.pointwise("window_length", (self.start(b, window), *numbers), INT64)


def has_windows(kernel: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether groups have such windows, whatever the sizes of the tensor."""
    return math.prod(kernel) <= MOST and not any(p and d > 1 for p, d in zip(padding, dilation))


def windows_of(
    b: Builder,
    name: str,
    sizes: Sequence[sz.Size],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> list[Windows]:
    """The windows along each of the last dims. Raises Refusal for what eager rejects, and where there are too
    many elements in a window."""
    count = int(name[name.index("pool") + 4])
    if len(sizes) not in (count + 1, count + 2):
        raise Refusal(f"{name} of a tensor of {len(sizes)} dims is an error in eager")
    given = []
    for words in (kernel_size, stride or kernel_size, padding, dilation):
        if len(words) not in (1, count):
            raise Refusal(f"{name} with {len(words)} numbers for {count} dims is an error in eager")
        given.append(list(words) * (count // len(words)))
    if not has_windows(given[0], given[2], given[3]):
        why = f"windows of more than {MOST} elements, or with both padding and dilation,"
        raise Refusal(f"{name} with {why} is left to torch")
    first, decide = len(sizes) - count, b.call.decide
    refuse(b, sz.eq(sizes[first - 1], 0), f"{name} of no channels is an error in eager")
    found = []
    for dim, (k, step, pad, apart) in enumerate(zip(*given), first):
        if k < 1 or step < 1 or apart < 1 or not 0 <= 2 * pad <= k:
            raise Refusal(f"{name} with such windows is an error in eager")
        beyond = sizes[dim] + 2 * pad - apart * (k - 1) - 1  # that the last window may begin at
        refuse(b, sz.lt(beyond, 0), f"{name} of less than a window is left to torch")
        windows = (sz.ceildiv(beyond, step) if ceil else beyond // step) + 1
        if ceil and step > 1 and decide(sz.le(sizes[dim] + pad, (windows - 1) * step)):
            windows = windows - 1  # it would begin in the padding behind the tensor
        axis = None if decide(sz.eq(windows, 1)) else b.fresh_axis(windows)
        found.append(Windows(dim, k, step, pad, apart, sizes[dim], windows, axis, ceil and step > 1))
    return found


def refuse(b: Builder, condition: sz.Size, reason: str) -> None:
    """Raises Refusal where the sizes of a call meet the condition."""
    if not b.call.made_up and b.call.decide(condition):
        raise Refusal(reason)


def in_memory(b: Builder, self: Value, dims: Sequence[Windows]) -> Value:
    """`self` as eager stores it; in memory where windows overlap, as else each element would be computed in
    several, unless that costs a few instructions."""
    overlap = any(d.dilation * (d.kernel - 1) >= d.step for d in dims)
    stored = as_stored(b, self)[0]
    if overlap and not b.is_read(self) and not _is_cheap(b, stored, dims):
        return in_own_order(b, self)
    return stored


def _is_cheap(b: Builder, value: Value, dims: Sequence[Windows]) -> bool:
    """Whether `value` is read as one tensor and a few instructions: computed again for each place in a window
    it takes less time than memory does."""
    along = {b.axis(axis) for axis in (value.dims[d.dim] for d in dims) if axis is not None}

    def varies(v: Value) -> bool:
        return not along.isdisjoint(map(b.axis, v.axes))

    ops = [op for op in b.needed([value]) if varies(op.output)]
    if not (b.computes_fast and all(isinstance(op, Pointwise) and find(op.symbol).cheap for op in ops)):
        return False
    reads = {read.value.name for read in b.reads if varies(read.value)}
    reads &= {v.name for op in ops for v in op.operands}
    places = math.prod([d.kernel for d in dims])
    return len(reads) == 1 and places * len(ops) <= MOST_REPEATED


def elements_of(
    b: Builder, self: Value, dims: Sequence[Windows]
) -> Iterator[tuple[int, Value, Value | None]]:
    """The number of each place in a window; the elements there, and whether there are any, None where there
    are in each window."""
    rest = dims[1:]
    for k, found, inside in dims[0].elements(b, self):
        if not rest:
            yield k, found, inside
            continue
        for j, element, there in elements_of(b, found, rest):
            both = [test for test in (inside, there) if test is not None]
            test = b.pointwise("bitwise_and", both, BOOL) if len(both) == 2 else both[0] if both else None
            yield k * math.prod([d.kernel for d in rest]) + j, element, test


def facts(*places: str, **facts: Any) -> dict[str, Any]:
    """Facts of a row; `places`: dtypes of its numbers or places of elements."""
    windows = "kernel_size stride padding dilation ceil_mode count_include_pad divisor_override"
    fixed = [*windows.split(), "output_size"]
    # torch's kernels read each window by itself, and take several times as long as its bytes
    slow = ("bfloat16", "float16", "float32")
    return dict(dtypes=FLOATING + places, sizes="own", fixed=fixed, slow_on_gpu=slow, **facts)


def result_of(b: Builder, name: str, value: Value, dims: Sequence[Axis | None], self: Value) -> Value:
    """`value`, which may vary along fewer dims, as a result in the format of `self`."""
    whole = view(b, name, value, dims, [sz.const(0)] * len(dims)) if value.dims != tuple(dims) else value
    return b.in_format_of(b.pointwise("copy", (whole,), value.dtype, layouts=(), name=name), self)


def divisor(
    b: Builder, dims: Sequence[Windows], windows: Sequence[Value], padded: bool, divisor_override: int | None
) -> Value:
    """By what the sum of the window with these numbers is divided: how many elements it has."""
    if divisor_override == 0:
        raise Refusal("a mean with a divisor of 0 is an error in eager")
    if divisor_override is not None:
        return b.literal(divisor_override)
    if not any(d.ceil or (d.padding and not padded) for d in dims):
        return b.literal(math.prod([d.kernel for d in dims]))
    number = b.literal(1)
    for d, window in zip(dims, windows):
        number = b.pointwise("mul", (number, d.length(b, window, padded)), INT64)
    return number
