"""Losses of class indices: of each row of log-probabilities the element of its class; and their gradient.

In: log-probabilities x[N, C] or x[N, C, ...], classes t[N, ...] and perhaps a weight for each class. Out: the
losses, their sum, or their mean. Example:

    nll_loss(x, t, w, mean) = sum over n of (-x[n, t[n]] * w[t[n]]) / sum over n of w[t[n]]

Where a class is `ignore_index`, both sums leave the row out, and nobody asks whether it is in range. A
log_softmax before it is not stored: the group computes that of the classes alone (ir/lookups.py).

The gradient is 0, but for one element of each row, so its sum over a row, which the gradient of log_softmax
asks for, is that element (ir/only_terms.py):

    nll_loss_backward(g, [2, 3], t=[2, 0], ...) = [[0, 0, -g], [-g, 0, 0]]
"""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, INT64
from ..ir.fusion import Value
from ..ir.windows import position
from .reduction import narrow
from .softmax import log_softmax
from .table import FLOATING, composite
from .views import unsqueezed

NONE, MEAN, SUM = range(3)  # reductions

_LOSS: dict[str, Any] = dict(dtypes=FLOATING, table="self weight", places="target", picked=1)


def _check(b: Builder, self: Value, target: Value, weight: Value | None) -> None:
    if len(self.dims) < 2 or len(target.dims) != len(self.dims) - 1 or target.dtype is not INT64:
        raise Refusal(
            "a loss of one row, or of classes that are not one int64 for each row, is left to torch"
        )
    if not all(b.call.decide(sz.eq(x, y)) for x, y in zip(b.sizes(target), _without_classes(b, self))):
        raise Refusal("a loss of classes that are not one for each row is an error in eager")
    if weight is not None and (weight.dtype is not self.dtype or len(weight.dims) != 1):
        raise Refusal("a loss with weights of another dtype, or of several dims, is left to torch")
    if weight is not None and not b.call.decide(sz.eq(b.sizes(weight)[0], b.sizes(self)[1])):
        raise Refusal("a loss with weights that are not one for each class is an error in eager")


def _without_classes(b: Builder, self: Value) -> tuple[sz.Size, ...]:
    sizes = b.sizes(self)
    return (sizes[0], *sizes[2:])


def _loss(
    b: Builder, self: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    """The loss, and the sum of the weights of all rows, 0 where nothing is reduced."""
    _check(b, self, target, weight)
    register, dims = self.dtype.register, list(range(len(target.dims)))
    counts = b.pointwise("ne", (target, b.literal(ignore_index)), BOOL, own_types=True)
    place = b.pointwise("where", (counts, target, b.literal(0)), INT64, own_types=True)
    walked = [0, *range(2, len(self.dims))]
    loss = b.pointwise("neg", (b.lookup("nll_loss", self, target.dims, walked, {1: place}),), register)
    own: Value = b.literal(1.0)
    if weight is not None:
        own = b.lookup("weight", weight, target.dims, [None for _ in dims], {0: place})
        loss = b.pointwise("mul", (loss, own), register)
    zero = b.literal(0.0)
    loss = b.pointwise("where", (counts, loss, zero), register, own_types=True, name="nll_loss")
    if reduction == NONE:
        return b.contiguous(narrow(b, "nll_loss", loss, self.dtype)), b.pointwise("copy", (zero,), self.dtype)
    loss = b.reduce("nll_loss", "sum", loss, dims, False, register)
    own = b.pointwise("where", (counts, own, zero), register, own_types=True, name="weight")
    total = b.reduce("total_weight", "sum", own, dims, False, register)
    if reduction == MEAN:
        loss = b.pointwise("div", (loss, total), register, name="nll_loss")
    return narrow(b, "nll_loss", loss, self.dtype), narrow(b, "total_weight", total, self.dtype)


@composite("aten::nll_loss_forward", sizes=("own", "own"), **_LOSS)
@composite("aten::nll_loss2d_forward", sizes=("own", "own"), **_LOSS)
def nll_loss_forward(
    b: Builder, self, target, weight, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    """The log-probabilities of classes, negative, and the sum of their weights"""
    return _loss(b, self, target, weight, reduction, ignore_index)


@composite("aten::nll_loss", sizes="own", **_LOSS)
@composite("aten::nll_loss2d", sizes="own", **_LOSS)
@composite("aten::nll_loss_nd", sizes="own", **_LOSS)
def nll_loss(b: Builder, self, target, weight=None, reduction: int = MEAN, ignore_index: int = -100) -> Value:
    """The log-probabilities of classes, negative"""
    return _loss(b, self, target, weight, reduction, ignore_index)[0]


@composite("aten::cross_entropy_loss", sizes="own", needs_kernel=True, only={"label_smoothing": 0.0}, **_LOSS)
def cross_entropy_loss(
    b: Builder,
    self,
    target,
    weight=None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing=None,
) -> Value:
    """`nll_loss` of `log_softmax`, of class indices, without label smoothing"""
    _check(b, self, target, weight)
    return _loss(b, log_softmax(b, self, 1), target, weight, reduction, ignore_index)[0]


@composite("tsfuser::nll_loss_backward", dtypes=FLOATING, sizes="own", places="target", symbolic=("sizes",))
def nll_loss_backward(
    b: Builder, gradient, sizes: list, target, weight, reduction: int, ignore_index: int, total_weight
) -> Value:
    """The gradient of `nll_loss` for log-probabilities of these sizes"""
    rows = (sizes[0], *sizes[2:])
    if target.dtype is not INT64 or len(target.dims) != len(rows):
        raise Refusal("the gradient of a loss of classes that are not one int64 for each row")
    given = [(b.sizes(target), rows), (b.sizes(gradient), rows if reduction == NONE else ())]
    if weight is not None:
        given.append((b.sizes(weight), (sizes[1],)))
    for found, wanted in given:
        if len(found) != len(wanted) or not all(b.call.decide(sz.eq(x, y)) for x, y in zip(found, wanted)):
            raise Refusal("the gradient of a loss of other sizes is an error in eager")
    register, zero, rank = gradient.dtype.register, b.literal(0.0), len(sizes)
    counts = b.pointwise("ne", (target, b.literal(ignore_index)), BOOL, own_types=True)
    counts, target = unsqueezed(b, counts, 1), unsqueezed(b, target, 1)
    by_class = gradient
    if reduction == MEAN:
        by_class = b.pointwise("div", (gradient, total_weight), register)
    by_class = b.pointwise("neg", (by_class,), register)
    if reduction == NONE:
        by_class = unsqueezed(b, by_class, 1)
    if weight is not None:
        for _ in range(rank - 2):
            weight = unsqueezed(b, weight, len(weight.dims))
        by_class = b.pointwise("mul", (by_class, weight), register)
    by_class = b.pointwise("where", (counts, by_class, zero), register, own_types=True)
    classes = sz.as_size(sizes[1])
    axis = None if b.call.decide(sz.eq(classes, 1)) else b.fresh_axis(classes)
    place = position(b, [None, axis, *[None] * (rank - 2)], 1) if axis is not None else b.literal(0)
    here = b.pointwise("eq", (target, place), BOOL, own_types=True)
    result = b.pointwise("where", (here, by_class, zero), register, own_types=True, name="nll_loss_backward")
    return b.contiguous(narrow(b, "nll_loss_backward", result, gradient.dtype))
