"""Scans: running sums, products and extremes along a dim.

Accumulated as sums are: in float for 16-bit floats, in int64 for integers; on the CPU, as eager does, in
double for floats. An extreme and its place are one number, as in places.py, but of equal elements the
last one is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import INT64, DType
from ..ir.fusion import LONGEST_LONE_SCAN, Value
from ..ir.symbols import define
from . import places
from .reduction import operand_of
from .table import ALL, FLOATING, composite
from .views import dim_of

define("with_later_place", "({0} * 4294967296 + {1} * 2 + {2})", cheap=True)
define("later_place_of_pair", "(({0} & 0xffffffff) >> 1)", cheap=True)


def _is_one_line(device: str, *sizes: Sequence[int]) -> str | None:
    if device.startswith("cuda") and max(sizes[0], default=0) > LONGEST_LONE_SCAN:
        if all(n == 1 for n in sorted(sizes[0])[:-1]):
            return f"one row of more than {LONGEST_LONE_SCAN} elements is scanned by several blocks in torch"
    return None


def _scan(b: Builder, name: str, how: str, self: Value, dim: int, dtype: DType) -> Value:
    """The scan along `dim`; of a tensor without dims a copy."""
    dim = dim_of(len(self.dims), dim)
    if not self.dims:
        return b.contiguous(b.pointwise("copy", (self,), dtype, name=name))
    if not dtype.is_floating and dtype.itemsize < 4:
        raise Refusal(f"{name} in {dtype} is left to torch: threads exchange values of 32 bits or more")
    return b.scan(name, how, self, dim, dtype)


_SCANNED: dict[str, Any] = {
    "dtypes": ALL,
    "sizes": "first",
    "along": "dim",
    "error": "operands",
    "left": _is_one_line,
}


@composite("aten::cumsum", **_SCANNED)
def cumsum(b: Builder, self, dim: int, dtype: int | None = None) -> Value:
    """The sum of the elements along `dim` up to each of them"""
    operand, wanted = operand_of(b, self, dtype)
    return _scan(b, "cumsum", "sum", operand, dim, wanted)


@composite("aten::cumprod", **{**_SCANNED, "error": "result"})
def cumprod(b: Builder, self, dim: int, dtype: int | None = None) -> Value:
    """The product of the elements along `dim` up to each of them"""
    operand, wanted = operand_of(b, self, dtype)
    return _scan(b, "cumprod", "prod", operand, dim, wanted)


@composite("aten::logcumsumexp", **{**_SCANNED, "dtypes": FLOATING})
def logcumsumexp(b: Builder, self, dim: int) -> Value:
    """`log(cumsum(exp(self)))` along `dim`, without overflow"""
    return _scan(b, "logcumsumexp", "log_sum", self, dim, self.dtype)


_EXTREME: dict[str, Any] = {"dtypes": places.DTYPES, "sizes": ("first", "first"), "along": "dim",
                            "selects": True, "without_gradient": (1,), "left": _is_one_line}  # fmt: skip


@composite("aten::cummax", **_EXTREME)
def cummax(b: Builder, self, dim: int):
    """The largest element along `dim` up to each of them and its place, the last of equal ones; NaN is the
    largest"""
    return _extreme(b, "cummax", self, dim, True)


@composite("aten::cummin", **_EXTREME)
def cummin(b: Builder, self, dim: int):
    """The smallest element along `dim` up to each of them and its place, the last of equal ones; NaN is the
    smallest"""
    return _extreme(b, "cummin", self, dim, False)


def _extreme(b: Builder, name: str, self: Value, dim: int, largest: bool):
    along = [dim_of(len(self.dims), dim)] if self.dims else []
    sizes = b.sizes(self)
    if not b.call.decide(sz.lt(sz.product([sizes[d] for d in along]), places.PLACES)):
        raise Refusal(f"{name} of 2^31 elements or more is left to torch")
    pair = places.pairs(b, self, along, largest, True, "with_later_place")
    pair = _scan(b, name, "max", pair, dim, INT64)
    element = places.element(b, name, pair, self, largest)
    return element, b.pointwise("later_place_of_pair", (pair,), INT64)
