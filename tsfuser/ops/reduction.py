"""Reductions, and the sums and moments that normalisations are made of.

Sums are accumulated in float, in double for double and in int64 for integers. A variance is the mean of
squared distances from the mean, never a difference of squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, DOUBLE, INT64, UINT8, DType
from ..ir.fusion import Value
from ..ir.symbols import define
from .table import ALL, FLOATING, REAL, composite, scalar_type

#: By the reciprocal of a count: one division a thread, not one a row.
define("mean", "({0} * (1 / {1}))", cheap=True)
define("var", "({0} / ({1} > {2} ? {1} - {2} : 0))", cheap=True)
define("nan_to_zero", "({0} == {0} ? {0} : 0)", cheap=True)
define("finite_or_zero", "({0} - {0} == 0 ? {0} : 0)", cheap=True)
define("to_bool", "convert<bool>({0})", cheap=True)
define("count_nonzero", "({0} != 0 ? 1 : 0)", cheap=True)
define("exp_of_difference", "exp({0} - {1})")
define("log_plus", "(log({0}) + {1})")


def normalized(value: Value, dims: int | Sequence[int] | None) -> list[int]:
    """The dims of a reduction of `value`, sorted and not negative; None and an empty list mean all. Raises
    Refusal for a tensor without dims, as nvFuser did, and for arguments that eager rejects."""
    rank = len(value.dims)
    if rank == 0:
        raise Refusal("a reduction of a tensor without dimensions")
    if rank > 64:
        raise Refusal("a reduction of more than 64 dimensions is an error in eager")
    if isinstance(dims, int):
        dims = [dims]
    found = [d + rank if d < 0 else d for d in dims or range(rank)]
    if len(set(found)) < len(found) or not all(0 <= d < rank for d in found):
        raise Refusal("reduced dimensions that are out of range, or named twice, are an error in eager")
    return sorted(found)


def total(b: Builder, name: str, value: Value, dims: Sequence[int], keepdim: bool = True) -> Value:
    """The sum over `dims` in the accumulation dtype: float for 16-bit floats."""
    return b.reduce(name, "sum", value, dims, keepdim, value.dtype.register)


def mean_of(b: Builder, value: Value, dims: Sequence[int], keepdim: bool = True) -> Value:
    """The mean over `dims`, in the accumulation dtype."""
    summed = total(b, "sum", value, dims, keepdim)
    return b.pointwise("mean", (summed, b.count(value, dims)), summed.dtype)


def squares(b: Builder, value: Value, dims: Sequence[int], dtype: DType | None = None) -> tuple[Value, Value]:
    """(mean, sum of squared distances from it) over `dims`, which stay as size 1, in `dtype`, else the
    accumulation dtype: one pass over the data, or what schedule/moments.py makes of it."""
    dtype = dtype or value.dtype.register
    mean_value, squared = (b.reduce(part, part, value, dims, True, dtype) for part in ("mean", "squares"))
    return mean_value, squared


def narrow(b: Builder, name: str, value: Value, dtype: DType) -> Value:
    """A result in the accumulation dtype as `dtype`; not rounded inside a group."""
    return value if value.dtype is dtype else b.pointwise("copy", (value,), dtype, name=name)


def without(b: Builder, name: str, value: Value, dims: Sequence[int], keepdim: bool, dtype: DType) -> Value:
    """A result that kept its reduced `dims` as size 1: without them unless `keepdim`, `dtype`, row-major."""
    if keepdim:
        return (
            b.contiguous(b.pointwise("copy", (value,), dtype, name=name))
            if value.dtype is not dtype
            else value
        )
    return b.reduce(name, "sum", value, dims, False, dtype)


def operand_of(b: Builder, self: Value, dtype: int | None) -> tuple[Value, DType]:
    """The operand of a sum or product in the dtype asked for, and that dtype; integers become int64."""
    wanted = scalar_type(dtype) if dtype is not None else INT64 if self.dtype.kind in "bi" else self.dtype
    if wanted is BOOL or (self.dtype.is_complex and not wanted.is_complex):
        raise Refusal(f"a sum or product of {self.dtype} in {wanted} is not supported")
    return (self if wanted.register is wanted else b.cast(self, wanted)), wanted


# ---- sums and products


@composite("aten::sum", "", "dim_IntList", dtypes=ALL, sizes="reduced")
def sum_(b: Builder, self, dim: list | None = None, keepdim: bool = False, dtype: int | None = None) -> Value:
    """The sum over `dim`, or over all elements"""
    operand, wanted = operand_of(b, self, dtype)
    return b.reduce("sum", "sum", operand, normalized(self, dim), keepdim, wanted)


@composite("aten::nansum", dtypes=REAL, sizes="reduced")
def nansum(
    b: Builder, self, dim: list | None = None, keepdim: bool = False, dtype: int | None = None
) -> Value:
    """The sum over `dim`, or over all elements, NaN counting as 0"""
    operand, wanted = operand_of(b, self, dtype)
    numbers = b.pointwise("nan_to_zero", (operand,), operand.dtype, name="nan_to_num")
    return b.reduce("nansum", "sum", numbers, normalized(self, dim), keepdim, wanted)


@composite("aten::prod", "", "dim_int", dtypes=ALL, sizes="reduced")
def prod(b: Builder, self, dim: int | None = None, keepdim: bool = False, dtype: int | None = None) -> Value:
    """The product over `dim`, or over all elements"""
    operand, wanted = operand_of(b, self, dtype)
    return b.reduce("prod", "prod", operand, normalized(self, dim), keepdim, wanted)


@composite("aten::mean", "", "dim", dtypes=ALL, sizes="reduced")
def mean(b: Builder, self, dim: list | None = None, keepdim: bool = False, dtype: int | None = None) -> Value:
    """The sum over `dim` divided by the number of elements"""
    operand, wanted = operand_of(b, self, dtype)
    if dtype is None and self.dtype.kind in "bi" or wanted.kind in "bi":
        raise Refusal("a mean of integers is an error in eager")
    dims = normalized(self, dim)
    summed = b.reduce("sum", "sum", operand, dims, keepdim, wanted.register)
    return b.pointwise("div", (summed, b.count(self, dims)), wanted, name="mean")


# ---- extremes and truth


def _check_not_empty(b: Builder, self: Value, dims: Sequence[int]) -> None:
    if b.call.decide(sz.eq(sz.product([b.sizes(self)[d] for d in dims]), 0)):
        raise Refusal("the largest or smallest of no elements is an error in eager")


def _extreme(b: Builder, name: str, how: str, self: Value, dim, keepdim: bool) -> Value:
    dims = normalized(self, dim)
    _check_not_empty(b, self, dims)
    return b.reduce(name, how, self, dims, keepdim, self.dtype)


@composite("aten::amax", sizes="reduced", selects=True)
def amax(b: Builder, self, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """The largest element along `dim`; NaN if there is one"""
    return _extreme(b, "amax", "max", self, dim, keepdim)


@composite("aten::amin", sizes="reduced", selects=True)
def amin(b: Builder, self, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """The smallest element along `dim`; NaN if there is one"""
    return _extreme(b, "amin", "min", self, dim, keepdim)


@composite("aten::max", "", sizes="reduced", selects=True)
def max_(b: Builder, self) -> Value:
    """The largest element; NaN if there is one"""
    return _extreme(b, "max", "max", self, None, False)


@composite("aten::min", "", sizes="reduced", selects=True)
def min_(b: Builder, self) -> Value:
    """The smallest element; NaN if there is one"""
    return _extreme(b, "min", "min", self, None, False)


@composite("aten::aminmax", sizes=("reduced", "reduced"), selects=True)
def aminmax(b: Builder, self, dim: int | None = None, keepdim: bool = False):
    """The smallest and the largest element along `dim`; NaN if there is one"""
    if dim is None and keepdim:
        raise Refusal("aminmax over all dimensions that stays of their number")
    return _extreme(b, "amin", "min", self, dim, keepdim), _extreme(b, "amax", "max", self, dim, keepdim)


def _truth(b: Builder, name: str, self: Value, dim, keepdim: bool) -> Value:
    """any or all. Eager keeps uint8 there, all else becomes bool."""
    truth = self
    if self.dtype is not BOOL:
        truth = b.pointwise("to_bool", (self,), BOOL, self.dtype, name="nonzero")
    result = b.reduce(name, name, truth, normalized(self, dim), keepdim, BOOL)
    return b.cast(result, UINT8) if self.dtype is UINT8 else result


@composite("aten::any", "", "dim", "dims", dtypes=ALL, sizes="reduced", jumps=True, flat=True)
def any_(b: Builder, self, dim: int | list | None = None, keepdim: bool = False) -> Value:
    """Whether an element along `dim` is not 0"""
    _check_named(dim)
    return _truth(b, "any", self, dim, keepdim)


@composite("aten::all", "", "dim", "dims", dtypes=ALL, sizes="reduced", jumps=True, flat=True)
def all_(b: Builder, self, dim: int | list | None = None, keepdim: bool = False) -> Value:
    """Whether all elements along `dim` are not 0"""
    _check_named(dim)
    return _truth(b, "all", self, dim, keepdim)


def _check_named(dim) -> None:
    if dim == [] or dim == ():
        raise Refusal("any and all over an empty list of dimensions reduce nothing")


# ---- variance

#: Devices on which eager computes variances in double, so that squares of float32 values do not overflow.
VARIANCES_IN_DOUBLE = ("cpu",)


def _moments(b: Builder, self, dim, unbiased, correction) -> tuple[Value, Value, list[int]]:
    """Variance and mean with reduced dims as size 1, in the accumulation dtype, and the dims. The divisor is
    never negative, as in eager."""
    dims = normalized(self, dim)
    mean_value, summed = squares(b, self, dims, DOUBLE if b.device in VARIANCES_IN_DOUBLE else None)
    less = correction if correction is not None else b.literal(1 if unbiased else 0)
    return b.pointwise("var", (summed, b.count(self, dims), less), summed.dtype), mean_value, dims


def _spread(name: str, root: bool, with_mean: bool) -> None:
    """The row of var, std, var_mean or std_mean."""

    @composite(
        f"aten::{name}",
        "",
        "dim",
        "correction",
        dtypes=FLOATING,
        sizes=("reduced",) * (1 + with_mean),
        instead="(it knows var and mean)" if with_mean and not root else "",
    )
    def evaluate(
        b: Builder,
        self,
        dim: list | None = None,
        unbiased: bool = True,
        keepdim: bool = False,
        correction=None,
    ):
        """The mean of squared distances from the mean, or its root"""
        result, mean_value, dims = _moments(b, self, dim, unbiased, correction)
        if root:
            result = b.pointwise("sqrt", (result,), result.dtype, name="std")
        result = without(b, name, result, dims, keepdim, self.dtype)
        return (result, without(b, "mean", mean_value, dims, keepdim, self.dtype)) if with_mean else result


for _name in ("var", "std", "var_mean", "std_mean"):
    _spread(_name, _name.startswith("std"), _name.endswith("_mean"))


# ---- norms


def _norm(b: Builder, self: Value, p: Value | None, dim, keepdim: bool, dtype: int | None) -> Value:
    order = 2.0 if p is None else p.literal
    if order is None:
        raise Refusal("a norm whose order is not a constant")
    assert not isinstance(order, complex), "Row.build refuses it"
    wanted = self.dtype if dtype is None else scalar_type(dtype)
    if not wanted.is_floating or wanted.itemsize < self.dtype.itemsize:
        raise Refusal(f"a norm of {self.dtype} in {wanted}")
    dims, register = normalized(self, dim), wanted.register
    size = b.pointwise("abs", (self,), register)
    if order != 0 and not math.isnan(order) and all(self.dims[d] is None for d in dims):
        # Of one element, whose square may overflow; row-major, as any reduction.
        return without(b, "norm", b.contiguous(size), dims, keepdim, wanted)
    if math.isinf(order):
        _check_not_empty(b, self, dims)
        return b.reduce("norm", "max" if order > 0 else "min", size, dims, keepdim, wanted)
    if order == 1:
        return b.reduce("norm", "sum", size, dims, keepdim, wanted)
    if order == 0:
        count = b.pointwise("count_nonzero", (self,), register, name="nonzero")
        return b.reduce("norm", "sum", count, dims, keepdim, wanted)
    if math.isnan(order):
        raise Refusal("a norm whose order is not a number")
    if order != 2:
        if abs(order) > register.largest:
            raise Refusal(f"a norm whose order is no number of {register}")
        power = b.pointwise("pow", (size, b.literal(float(order))), register)
        summed = b.reduce("sum", "sum", power, dims, keepdim, register)
        return b.pointwise("pow", (summed, b.literal(1.0 / order)), wanted, name="norm")
    squared = b.pointwise("square", (self,), register)
    summed = b.reduce("sum", "sum", squared, dims, keepdim, register)
    return b.pointwise("sqrt", (summed,), wanted, name="norm")


@composite(
    "aten::norm",
    "Scalar",
    "ScalarOpt_dim",
    "ScalarOpt_dim_dtype",
    "ScalarOpt_dtype",
    dtypes=FLOATING,
    sizes="reduced",
    selects=True,
)
def norm(
    b: Builder, self, p=None, dim: Sequence[int] = (), keepdim: bool = False, dtype: int | None = None
) -> Value:
    """The norm of order `p` along `dim`"""
    return _norm(b, self, p, dim, keepdim, dtype)


@composite("aten::linalg_vector_norm", dtypes=FLOATING, sizes="reduced", selects=True)
def vector_norm(
    b: Builder, self, ord=None, dim: list | None = None, keepdim: bool = False, dtype: int | None = None
) -> Value:
    """The norm of order `ord` along `dim`"""
    return _norm(b, self, ord, dim, keepdim, dtype)


# ---- the logarithm of a sum


@composite("aten::logsumexp", dtypes=REAL, sizes="reduced")
@composite("aten::special_logsumexp", dtypes=REAL, sizes="reduced")
def logsumexp(b: Builder, self, dim: list, keepdim: bool = False) -> Value:
    """`log(sum(exp(self)))` along `dim`, of distances from the largest element"""
    if not dim:
        raise Refusal("logsumexp over an empty list of dimensions is an error in eager")
    wanted = b.floating(self.dtype)
    x, dims = b.cast(self, wanted), normalized(self, dim)
    largest = b.reduce("amax", "max", x, dims, True, wanted.register)
    origin = b.pointwise("finite_or_zero", (largest,), largest.dtype, name="finite")
    power = b.pointwise("exp_of_difference", (x, origin), largest.dtype, name="exp")
    result = b.pointwise("log_plus", (total(b, "sum", power, dims), origin), largest.dtype, name="logsumexp")
    return without(b, "logsumexp", result, dims, keepdim, wanted)


# ---- undoing a broadcast


@composite("aten::sum_to_size", dtypes=ALL, sizes="own", symbolic=("size",), fresh=False, secret_view=True)
@composite(
    "aten::_grad_sum_to_size",
    dtypes=ALL,
    sizes="own",
    symbolic=("size",),
    fresh=False,
    slow_on_gpu=("bfloat16", "float16", "float32"),  # sums of columns, which torch reads at half of bandwidth
)
def sum_to_size(b: Builder, self, size: list | None) -> Value:
    """`self` summed over leading dims and over dims that become 1, so that its sizes are `size`"""
    if size is None:
        return self
    leading = len(self.dims) - len(size)
    if leading < 0:
        raise Refusal("sum_to_size to more dimensions")
    summed, kept = list(range(leading)), []
    for d, target in enumerate(size, leading):
        own = 1 if self.dims[d] is None else b.axis(self.dims[d]).extent
        if b.call.decide(sz.eq(target, own)):
            continue
        if self.dims[d] is None or not b.call.decide(sz.eq(target, 1)):
            raise Refusal("sum_to_size to sizes that do not broadcast to those of the operand")
        summed.append(d)
        kept.append(d)
    dtype = INT64 if self.dtype.kind in "bi" else self.dtype
    if not summed:
        return self if size else b.cast(self, dtype)  # eager sums to no dims whatever there is
    return b.reduce("sum", "sum", self, summed, kept, dtype)
