"""Places of extremes: argmax, argmin, and max, min and topk along a dim, which also give the elements.

An element and its place are one number of 64 bits, so that the largest of these numbers has the answer, and
any schedule of a maximum serves. From its highest bit on:

    order of the element (32 bits, signed) | places before it, negated (31 bits) | whether the element is -0.0

The order of a float is that of its bits, those of negative ones reversed; 0.0 and -0.0 have one, and NaN has
the largest. For the smallest element the order is reversed but for NaN. Of equal elements the first has the
largest number, as in eager. Elements of 64 bits do not fit and are left to torch.

The second largest element has the largest of the numbers below the largest one, and so on: no two are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, FLOAT, INT32, INT64
from ..ir.fusion import Value
from ..ir.symbols import define
from ..ir.windows import position
from .elementwise import as_stored
from .joins import joined
from .reduction import normalized
from .table import composite

DTYPES = ("uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32")
PLACES = 1 << 31
#: Each element of a topk is a sweep over the row. torch sorts digits, whatever their number.
_MOST_FOUND, _LONGEST = 8, 1024

define("bits_of_float", "bit_cast<int>({0} + 0.0f)", cheap=True)
define("order_of_bits", "({0} ^ ({0} >> 31 & 0x7fffffff))", cheap=True)
define("reversed_order", "(~{0})", cheap=True)
define("nan_last", "({1} != {1} ? 0x7fffffff : {0})", cheap=True)
define("is_minus_zero", "(bit_cast<unsigned>({0}) == 0x80000000u)", cheap=True)
define("with_place", "({0} * 4294967296 + (0x7fffffff - {1}) * 2 + {2})", cheap=True)
define("pair_below", "({0} < {1} ? {0} : -0x7fffffffffffffff - 1)", cheap=True)
define("order_of_pair", "({0} >> 32)", cheap=True)
define("place_of_pair", "(0x7fffffff - (({0} & 0xffffffff) >> 1))", cheap=True)
define("float_of_bits", "(({1} & 1) != 0 ? -0.0f : bit_cast<float>({0}))", cheap=True)


def pairs(
    b: Builder, self: Value, dims: Sequence[int], largest: bool, nan_wins: bool, symbol: str = "with_place"
) -> Value:
    """Of each element the number that it makes, by `symbol`, with its place among those along `dims`.
    `nan_wins`: NaN is found before all others also where the smallest is looked for."""
    sizes = b.sizes(self)
    (self,) = as_stored(b, self)
    sign = b.literal(0)
    if self.dtype.is_floating:
        bits = b.pointwise("bits_of_float", (self,), INT32, FLOAT)
        order = b.pointwise("order_of_bits", (bits,), INT32)
        sign = b.pointwise("is_minus_zero", (self,), BOOL, FLOAT)
    else:
        order = b.pointwise("convert", (self,), INT32, self.dtype)
    steps = [] if largest else ["reversed_order"]
    if self.dtype.is_floating:
        steps.insert(len(steps) if nan_wins else 0, "nan_last")
    for step in steps:
        order = b.pointwise(step, (order, self) if step == "nan_last" else (order,), INT32, own_types=True)
    return b.pointwise(symbol, (order, _place(b, self, dims, sizes), sign), INT64, name="with_place")


def _check(b: Builder, name: str, self: Value, dims: Sequence[int]) -> None:
    count = sz.product([b.sizes(self)[d] for d in dims])
    if b.call.decide(sz.eq(count, 0)):
        raise Refusal(f"{name} of no elements is an error in eager")
    if not b.call.decide(sz.lt(count, PLACES)):
        raise Refusal(f"{name} of 2^31 elements or more is left to torch")


def _extreme_pair(b: Builder, name: str, self: Value, dim: int | None, keepdim: bool, largest: bool) -> Value:
    """The largest of these numbers along `dim`, or in the whole tensor."""
    dims = normalized(self, dim)
    _check(b, name, self, dims)
    return b.reduce(name, "max", pairs(b, self, dims, largest, True), dims, keepdim, INT64)


def _place(b: Builder, self: Value, dims: Sequence[int], sizes: Sequence[sz.Size]) -> Value:
    """Of each element, its number among those that are reduced together."""
    place = b.literal(0)
    for d in dims:
        if self.dims[d] is not None:
            place = b.pointwise("mul", (place, b.extent(sizes[d])), INT64)
            place = b.pointwise("add", (place, position(b, self.dims, d), b.literal(1)), INT64)
    return place


def element(b: Builder, name: str, pair: Value, self: Value, largest: bool) -> Value:
    """The element, of the dtype of `self`, of each number."""
    order = b.pointwise("convert", (b.pointwise("order_of_pair", (pair,), INT64),), INT32, INT64)
    if not largest:
        order = b.pointwise("reversed_order", (order,), INT32)
    if not self.dtype.is_floating:
        return b.cast(order, self.dtype)
    bits = b.pointwise("order_of_bits", (order,), INT32)
    return b.pointwise("float_of_bits", (bits, pair), self.dtype, own_types=True, name=name)


@composite("aten::argmax", dtypes=DTYPES, sizes="reduced", selects=True, flat=True, jumps=True)
def argmax(b: Builder, self, dim: int | None = None, keepdim: bool = False) -> Value:
    """The place of the largest element along `dim`, the first of equal ones; NaN is the largest"""
    return _places(b, "argmax", self, dim, keepdim, True)


@composite("aten::argmin", dtypes=DTYPES, sizes="reduced", selects=True, flat=True, jumps=True)
def argmin(b: Builder, self, dim: int | None = None, keepdim: bool = False) -> Value:
    """The place of the smallest element along `dim`, the first of equal ones; NaN is the smallest"""
    return _places(b, "argmin", self, dim, keepdim, False)


def _places(b: Builder, name: str, self: Value, dim: int | None, keepdim: bool, largest: bool) -> Value:
    return b.pointwise(
        "place_of_pair", (_extreme_pair(b, name, self, dim, keepdim, largest),), INT64, name=name
    )


@composite("aten::max", "dim", dtypes=DTYPES, sizes=("reduced",) * 2, selects=True, without_gradient=(1,))
def max_along(b: Builder, self, dim: int, keepdim: bool = False):
    """The largest element along `dim` and its place, the first of equal ones; NaN is the largest"""
    return _extreme(b, "max", self, dim, keepdim, True)


@composite("aten::min", "dim", dtypes=DTYPES, sizes=("reduced",) * 2, selects=True, without_gradient=(1,))
def min_along(b: Builder, self, dim: int, keepdim: bool = False):
    """The smallest element along `dim` and its place, the first of equal ones; NaN is the smallest"""
    return _extreme(b, "min", self, dim, keepdim, False)


def _extreme(b: Builder, name: str, self: Value, dim: int, keepdim: bool, largest: bool):
    pair = _extreme_pair(b, name, self, dim, keepdim, largest)
    return element(b, name, pair, self, largest), b.pointwise("place_of_pair", (pair,), INT64)


def _is_too_long(device: str, *sizes: Sequence[int]) -> str | None:
    before, after = sizes[0], sizes[-1]
    longest = max((n for n, found in zip(before, after) if n != found), default=0)
    return f"torch's topk of rows of more than {_LONGEST} is faster" if longest > _LONGEST else None


@composite(
    "aten::topk",
    dtypes=DTYPES,
    sizes=("own", "own"),
    fixed=("k", "dim", "largest", "sorted"),
    selects=True,
    without_gradient=(1,),
    left=_is_too_long,
)
def topk(b: Builder, self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
    """The `k` largest or smallest elements along `dim`, at most 8 of 1,024, sorted, and their places; of
    equal ones the first come first"""
    if k < 1 or k > _MOST_FOUND:
        raise Refusal(f"topk of no element, or of more than {_MOST_FOUND}, is left to torch")
    (dim,) = normalized(self, dim)
    size = b.sizes(self)[dim]
    if b.call.decide(sz.lt(size, k)):
        raise Refusal("topk of more elements than there are is an error in eager")
    if b.call.decide(sz.lt(4 * _LONGEST, size)):
        raise Refusal("topk of rows that have become so long is left to torch")
    _check(b, "topk", self, [dim])
    pair = pairs(b, self, [dim], largest, False)
    found: list[Value] = []
    for _ in range(k):
        rest = b.pointwise("pair_below", (pair, found[-1]), INT64) if found else pair
        found.append(b.reduce("topk", "max", rest, [dim], True, INT64))
    top = b.contiguous(joined(b, "topk", found, dim))
    return element(b, "topk", top, self, largest), b.pointwise("place_of_pair", (top,), INT64)
