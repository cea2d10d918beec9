"""Gradients of pooling, gathered: each element adds what it gets from the windows that hold it.

In: the gradient of the result, the windows, and, of max pooling, which element of each window is the largest.
Out: the gradient of the tensor. The order of the sum is the same in every run. Example:

    avg_pool1d_backward(g, x, 2)[i] = g[i // 2] / 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, INT32
from ..ir.fusion import Value
from ..ir.symbols import define
from ..ir.windows import position
from .pool_windows import Windows, divisor, facts, refuse, result_of, windows_of
from .reduction import narrow
from .table import composite

define("holder", "(({0} + {1}) / {2} - {3})", cheap=True)
define("place_in_window", "({0} + {3} - {1} * {2})", cheap=True)
define("holds", "({0} >= 0 && {0} < {1} && {2} <= {3} && {2} % {4} == 0)", cheap=True)
define("in_range", "({0} < 0 ? 0 : {0} < {1} ? {0} : {1} - 1)", cheap=True)
define("next_digit", "({0} * {1} + {2} / {3})", cheap=True)


def _holders(b: Builder, d: Windows, at: Value, count: Value) -> Iterator[tuple[Value, Value]]:
    """Of an element at place `at` along the dim: those of the `count` windows that may hold it, in order, as
    numbers that are in range, and whether they do."""
    for back in reversed(range(d.dilation * (d.kernel - 1) // d.step + 1)):
        numbers = map(b.literal, (d.padding, d.step, back))
        window = b.pointwise("holder", (at, *numbers), INT32)
        place = b.pointwise("place_in_window", (at, window, b.literal(d.step), b.literal(d.padding)), INT32)
        last = b.literal(d.dilation * (d.kernel - 1))
        holds = b.pointwise(
            "holds", (window, count, place, last, b.literal(d.dilation)), BOOL, own_types=True
        )
        yield b.pointwise("in_range", (window, count), INT32), holds


def gathered(
    b: Builder,
    name: str,
    gradient: Value,
    sizes: Sequence[sz.Size],
    like: Value,
    dims: Sequence[Windows],
    share: Callable,
) -> Value:
    """The gradient of each element of a tensor of `sizes`, in the format of `like`: the sum of the shares of
    it that windows give. `share(look, at, windows, holds)` gives one, and whether there is one: `look(table)`
    is the element of a tensor that belongs to the window, `at` the element's place along each of `dims`,
    `windows` are the window's numbers, and `holds` says whether it holds the element."""
    if not gradient.dtype.is_floating:
        raise Refusal(f"{name} of a gradient of {gradient.dtype} is an error in eager")
    first = dims[0].dim
    for d, (size, own) in enumerate(zip(b.sizes(gradient), sizes)):
        wanted = dims[d - first].count if d >= first else own
        refuse(b, sz.eq(sz.eq(size, wanted), 0), f"{name} of other sizes is an error in eager")
        refuse(
            b, sz.lt(sz.const((1 << 31) - 1), own), f"{name} along a dim of 2^31 elements is left to torch"
        )
    axes = [None if b.call.decide(sz.eq(size, 1)) else b.fresh_axis(size) for size in sizes]
    if b.call.decide(sz.eq(sz.product(sizes), 0)):
        zero = b.pointwise("convert", (b.literal(0.0),), gradient.dtype, own_types=True, name=name)
        return result_of(b, name, zero, axes, like)
    walked = [d if d < first and gradient.dims[d] is not None else None for d in range(len(axes))]
    at = []
    for d in range(first, len(axes)):
        alone = [axes[d] if e == d else None for e in range(len(axes))]
        place = b.literal(0) if axes[d] is None else position(b, alone, d)
        at.append(b.pointwise("convert", (place,), INT32, own_types=True))
    # The gradient's sizes, not numbers of the graph: one kernel serves all.
    counts = [
        b.pointwise("convert", (b.extent(size),), INT32, own_types=True) for size in b.sizes(gradient)[first:]
    ]
    holders = [list(_holders(b, *of_dim)) for of_dim in zip(dims, at, counts)]
    register, total = gradient.dtype.register, None
    for chosen in product(*holders):
        windows, tests = zip(*chosen)
        holds = tests[0]
        for test in tests[1:]:
            holds = b.pointwise("bitwise_and", (holds, test), BOOL)
        places = dict(enumerate(windows, first))
        given, holds = share(lambda table: b.lookup(name, table, axes, walked, places), at, windows, holds)
        operands = (holds, given, b.literal(0.0))
        given = b.pointwise("where", operands, register, own_types=True, layouts=())
        total = given if total is None else b.pointwise("add", (total, given, b.literal(1)), register)
    return result_of(b, name, narrow(b, name, total, gradient.dtype), axes, like)


def mean_shares(
    b: Builder, gradient: Value, dims: Sequence[Windows], padded: bool, divisor_override: int | None
) -> Callable:
    """Those of the elements of means (`share` of `gathered`)."""

    def share(look, at, windows, holds):
        by = divisor(b, dims, windows, padded, divisor_override)
        return b.pointwise("div", (look(gradient), by), gradient.dtype.register), holds

    return share


def _avg_pool_backward(count: int) -> None:
    name = f"avg_pool{count}d_backward"

    @composite(f"aten::{name}", **facts(table="grad_output"))
    def backward(
        b: Builder,
        grad_output,
        self,
        kernel_size: list,
        stride: list,
        padding: list,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        """The gradient of avg_pool: each element of a window gets its share"""
        dims = windows_of(b, name, b.sizes(self), kernel_size, stride, padding, ceil=ceil_mode)

        shares = mean_shares(b, grad_output, dims, count_include_pad, divisor_override)
        return gathered(b, name, grad_output, b.sizes(self), self, dims, shares)


@composite(
    "tsfuser::max_pool_backward",
    table="grad_output offsets",
    symbolic=("sizes",),
    needs_kernel=True,
    **facts("int8"),
)
def max_pool_backward(
    b: Builder,
    grad_output,
    offsets,
    sizes: list,
    kernel_size: list,
    stride: list,
    padding: list,
    dilation: list,
    ceil_mode: bool,
) -> Value:
    """The gradient of max_pool, from the numbers of the largest elements in their windows"""
    whole = [sz.as_size(size) for size in sizes]
    dims = windows_of(b, "max_pool2d", whole, kernel_size, stride, padding, dilation, ceil_mode)

    def share(look, at, windows, holds):
        number = b.literal(0)
        for d, there, window in zip(dims, at, windows):
            step, padding = b.literal(d.step), b.literal(d.padding)
            place = b.pointwise("place_in_window", (there, window, step, padding), INT32)
            operands = (number, b.literal(d.kernel), place, b.literal(d.dilation))
            number = b.pointwise("next_digit", operands, INT32)
        same = b.pointwise("eq", (look(offsets), number), BOOL, own_types=True)
        return look(grad_output), b.pointwise("bitwise_and", (holds, same), BOOL)

    return gathered(b, "max_pool_backward", grad_output, whole, grad_output, dims, share)


for _count in (2, 3):
    _avg_pool_backward(_count)
