"""Pooling to a given size that divides that of the tensor: windows side by side, or, of many elements, sums.

In: a tensor, and the sizes of the result along its last dims. Out: the mean or the largest element of each
window, with its place; and the gradient of the mean. Example, of x[12]:

    adaptive_avg_pool1d(x, [4])[i] = (x[3 * i] + x[3 * i + 1] + x[3 * i + 2]) / 3

Windows of sizes that do not divide differ in length and overlap: they are left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.fusion import Value
from .pool_gradients import gathered, mean_shares
from .pool_windows import MOST, Windows, facts, result_of
from .pooling import best_and_place, mean_of_windows
from .reduction import mean
from .table import composite
from .trials import NodeArg
from .views import reshaped


def _windows(b: Builder, name: str, whole: Sequence[sz.Size], parts: Sequence[sz.Size]) -> list[Windows]:
    """The windows of dims of size `whole` of which there are `parts`. Raises Refusal where these do not
    divide them, and for what eager rejects."""
    count, call, found = int(name[name.index("pool") + 4]), b.call, []
    if len(whole) not in (count + 1, count + 2) or len(parts) != count:
        raise Refusal(f"{name} of {len(whole)} dims to {len(parts)} sizes is an error in eager")
    for size in whole[1:]:
        if not call.made_up and call.decide(sz.eq(size, 0)):
            raise Refusal(f"{name} along a dim without elements is left to torch")
    for dim, part in enumerate(parts, len(whole) - count):
        kernel = call.value(whole[dim]) // max(1, call.value(part))
        if call.made_up:
            kernel = max(1, kernel)
        elif kernel < 1 or not call.decide(sz.eq(part * kernel, whole[dim])):
            raise Refusal(f"{name} to a size that does not divide the tensor's is left to torch")
        axis = None if call.decide(sz.eq(part, 1)) else b.fresh_axis(part)
        found.append(Windows(dim, kernel, kernel, 0, 1, whole[dim], part, axis, False))
    return found


def _left(most: float):
    """The reason to leave windows of sizes that do not divide, or of more than `most` elements, to torch."""

    def reason(device: str, before: Sequence[int], *after: Sequence[int]) -> str | None:
        pairs = list(zip(before, after[-1]))
        if any(part == 0 or size % part for size, part in pairs):
            return "pooling to a size that does not divide the tensor's is left to torch"
        many = math.prod(size // part for size, part in pairs) > most
        return f"the largest of windows of more than {most} elements is left to torch" if many else None

    return reason


def _left_unsized(given: Mapping[str, NodeArg]) -> str | None:
    """Sizes of 1 divide any."""
    size = given.get("output_size")
    if size is not None and isinstance(size.constant, Sequence) and set(size.constant) == {1}:
        return None
    return "it is not known whether the size divides the tensor's"


def _in_eagers_format(b: Builder, value: Value, self: Value) -> Value:
    """`value`, which has just been made: volumes are row-major, whatever those of `self` are."""
    return b.contiguous(value) if len(value.dims) == 5 else b.in_format_of(value, self)


def _mean(b: Builder, name: str, self: Value, sizes: Sequence[int]) -> Value:
    dims = _windows(b, name, b.sizes(self), [sz.as_size(size) for size in sizes])
    first, elements = dims[0].dim, math.prod([d.kernel for d in dims])
    if all(size == 1 for size in sizes):
        found = mean(b, self, list(range(first, len(self.dims))), True)
    elif elements <= MOST:
        found = mean_of_windows(b, name, self, dims, b.literal(elements))
    else:
        shape = list(b.sizes(self)[:first])
        for d in dims:
            shape += [d.count, sz.const(d.kernel)]
        parted = reshaped(b, "view", self, shape)
        found = mean(b, parted, list(range(first + 1, len(shape), 2)), False)
    return _in_eagers_format(b, found, self)


def _avg_pool(kind: str, name: str, **more) -> None:
    @composite(kind, left=_left(math.inf), left_unsized=_left_unsized, **{**facts(), **more})
    def evaluate(b: Builder, self, output_size: list) -> Value:
        """The mean of each window, of sizes that divide the tensor's"""
        return _mean(b, name, self, output_size)


def _max_pool(name: str) -> None:

    @composite(
        f"aten::{name}",
        left=_left(MOST),
        left_unsized=_left_unsized,
        **facts(selects=True, without_gradient=(1,)),
    )
    def evaluate(b: Builder, self, output_size: list):
        """The largest element of each window, of sizes that divide the tensor's, and its place"""
        dims = _windows(b, name, b.sizes(self), [sz.as_size(size) for size in output_size])
        if math.prod([d.kernel for d in dims]) > MOST:
            raise Refusal(f"{name} with windows of more than {MOST} elements is left to torch")
        best, place = best_and_place(b, name, self, dims)
        given = (result_of(b, name, value, best.dims, self) for value in (best, place))
        return tuple(_in_eagers_format(b, value, self) for value in given)


def _avg_pool_backward(count: int) -> None:
    name = f"adaptive_avg_pool{count}d_backward"

    @composite(
        f"aten::_{name}", left=_backward_left, left_unsized=_left_unsized, **facts(table="grad_output")
    )
    def evaluate(b: Builder, grad_output, self) -> Value:
        """The gradient of adaptive_avg_pool: each element of a window gets its share"""
        if len(self.dims) not in (count + 1, count + 2) or len(grad_output.dims) != len(self.dims):
            raise Refusal(f"{name} of so many dims is an error in eager")
        dims = _windows(b, name, b.sizes(self), b.sizes(grad_output)[-count:])
        shares = mean_shares(b, grad_output, dims, True, None)
        return _in_eagers_format(b, gathered(b, name, grad_output, b.sizes(self), self, dims, shares), self)


def _backward_left(device: str, gradient: Sequence[int], *others: Sequence[int]) -> str | None:
    return _left(math.inf)(device, others[-1], gradient)


for _count in (1, 2, 3):
    _name = f"adaptive_avg_pool{_count}d"
    # Scripted, it may be the mean of all, which torch makes fast alone.
    _avg_pool(f"aten::{_name}", _name, gradient="strict", slow_on_gpu=())
    if _count > 1:
        _avg_pool(f"aten::_{_name}", _name)
        _avg_pool_backward(_count)
    _max_pool(f"adaptive_max_pool{_count}d")
