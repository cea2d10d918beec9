"""Places of values among sorted ones: searchsorted and bucketize, a binary search for each value.

In: a tensor in memory whose rows are sorted, and values. Out: before which place in its row each value
belongs. The search halves a range `[start, end)` as often as the longest row of its power of two needs:
each halving is a read of the row at a place that the last one named. Example, of 3 in [1, 3, 5, 7, 9]:

    [0, 5)   row[2] >= 3   [0, 2)   row[1] >= 3   [0, 1)   row[0] < 3   [1, 1): place 1

torch's kernels look at the same places in the same order, so the result is eager's also for NaN, and for rows
that are not sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, INT32, INT64
from ..ir.fusion import Value
from ..ir.symbols import define
from .elementwise import as_stored
from .table import NUMERIC, composite

_LONGEST = (1 << 31) - 1

define("middle", "({0} + (({1} - {0}) >> 1))", cheap=True)
define("of_row", "({0} < {1} ? {0} : {1} - 1)", cheap=True)
define("is_behind", "({0} < {1} && !({2} >= {3}))", cheap=True)
define("is_behind_equal", "({0} < {1} && !({2} > {3}))", cheap=True)
define("next_start", "({0} ? {1} + 1 : {2})", cheap=True)
define("next_end", "({0} ? {2} : {1})", cheap=True)
define("first_place", "({0} == {0} ? 0 : 0)", cheap=True)

_FACTS: dict[str, Any] = dict(dtypes=NUMERIC, flat=True, fixed=("out_int32", "right"))


def _found(
    b: Builder, name: str, rows: Value, values: Value, walked: Sequence[int | None], right: bool, narrow: bool
) -> Value:
    """The place of each of the `values` in its row of `rows`; `walked` as in `Builder.lookup`."""
    last = len(rows.dims) - 1
    length = b.sizes(rows)[last]
    if values.dtype is not rows.dtype:
        raise Refusal(f"{name} of values of another dtype than that of the sorted ones is left to torch")
    if b.call.decide(sz.lt(_LONGEST, length)):
        raise Refusal(f"{name} in rows of 2^31 elements or more is left to torch")
    (values,) = as_stored(b, values)
    start = b.pointwise("first_place", (values,), INT32, own_types=True)
    end = b.pointwise("convert", (b.extent(length),), INT32, own_types=True)
    halvings = 0
    while b.call.decide(sz.le(1 << halvings, length)):
        halvings += 1
    for _ in range(halvings):
        middle = b.pointwise("middle", (start, end), INT32)
        there = b.pointwise("of_row", (middle, b.extent(length)), INT32)
        element = b.lookup(name, rows, values.dims, walked, {last: there})
        symbol = "is_behind_equal" if right else "is_behind"
        behind = b.pointwise(symbol, (start, end, element, values), BOOL, own_types=True)
        start, end = (
            b.pointwise("next_start", (behind, middle, start), INT32, own_types=True),
            b.pointwise("next_end", (behind, middle, end), INT32, own_types=True),
        )
    dtype = INT32 if narrow else INT64
    return b.contiguous(b.pointwise("convert", (start,), dtype, own_types=True, name=name))


@composite("aten::bucketize", "Tensor", sizes="first", table="boundaries", **_FACTS)
def bucketize(b: Builder, self, boundaries, out_int32: bool = False, right: bool = False) -> Value:
    """Between which of the sorted `boundaries` each element of `self` lies"""
    if len(boundaries.dims) != 1:
        raise Refusal("bucketize by boundaries of another number of dims than 1 is an error in eager")
    return _found(b, "bucketize", boundaries, self, [None] * len(self.dims), right, out_int32)


@composite("aten::searchsorted", "Tensor", sizes="self", table="sorted_sequence", **_FACTS)
def searchsorted(
    b: Builder,
    sorted_sequence,
    self,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter=None,
) -> Value:
    """The place before which each element of `self` belongs in a sorted row, or in that of its own row"""
    if sorter is not None:
        raise Refusal("searchsorted with a sorter is left to torch")
    if side not in (None, "left", "right") or (side == "left" and right):
        raise Refusal("searchsorted with such a side is an error in eager")
    rank = len(self.dims)
    walked: list[int | None] = [None] * rank
    if len(sorted_sequence.dims) != 1:
        if len(sorted_sequence.dims) != rank or not rank:
            raise Refusal("searchsorted in rows of another number of dims is an error in eager")
        for d in range(rank - 1):
            size, rows = b.sizes(self)[d], b.sizes(sorted_sequence)[d]
            if not b.call.decide(sz.eq(size, rows)):
                raise Refusal("searchsorted in another number of rows is an error in eager")
            walked[d] = None if self.dims[d] is None else d
    return _found(b, "searchsorted", sorted_sequence, self, walked, right or side == "right", out_int32)
