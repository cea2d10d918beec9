"""Derivatives that have no derivative in torch, in forms that have one, for second derivatives."""

from __future__ import annotations

import math

from ...errors import Refusal
from ..terms import DTYPE_NUMBERS


def silu_backward(grad_output, self):
    slope = self.sigmoid()
    return grad_output * (slope * (self * (1 - slope) + 1))


def mish_backward(grad_output, self):
    bent = self.softplus().tanh()
    return grad_output * (bent + self * ((1 - bent * bent) * self.sigmoid()))


def logit_backward(grad_output, self, eps):
    low, beyond = (0.0, math.nan) if eps is None else (eps, 0.0)
    return ((self >= low) & (self <= 1 - low)).where(grad_output / (self * (1 - self)), beyond)


def native_group_norm_backward(grad_out, input, rstd, weight, N, C, group, output_mask):
    """What the variance lacks is the epsilon."""
    rows = _wide(input).reshape([N, group, -1])
    epsilon = (_wide(rstd).reshape([N, group, 1]) ** -2 - _variance(rows)).detach()
    made = _group_norm(grad_out, input, weight, N, C, group, epsilon)
    return tuple(m if wanted else None for m, wanted in zip(made, output_mask))


def group_norm_backward(grad_out, input, num_groups, weight, eps):
    return _group_norm(grad_out, input, weight, input.size(0), input.size(1), num_groups, eps)


def instance_norm_backward(grad_out, input, weight, eps):
    """Each channel of each image is a group."""
    return _group_norm(grad_out, input, weight, input.size(0), input.size(1), input.size(1), eps)


def _group_norm(grad_out, input, weight, batch, channels, groups, eps):
    """The statistics have gradients, so they are computed again."""
    rows = _wide(input).reshape([batch, groups, -1])
    scale = (_variance(rows) + eps).rsqrt()
    normed, grad = (rows - rows.mean([2], True)) * scale, _wide(grad_out).reshape([batch, channels, -1])
    scaled = grad if weight is None else grad * _wide(weight).reshape([1, channels, 1])
    scaled = scaled.reshape([batch, groups, -1])
    moved = scaled - scaled.mean([2], True) - normed * (scaled * normed).mean([2], True)
    parameter = input if weight is None else weight
    return (
        _as((moved * scale).reshape(input.sizes), input),
        _as((grad * normed.reshape([batch, channels, -1])).sum([0, 2]), parameter),
        _as(grad.sum([0, 2]), parameter),
    )


def _variance(rows):
    centred = rows - rows.mean([2], True)
    return (centred * centred).mean([2], True)


def _wide(value):
    if value.facts.dtype in ("float32", "float64"):
        return value
    return value.writer("aten::to", value, DTYPE_NUMBERS["float32"], False, False)


def _as(value, like):
    dtype = like.facts.dtype
    if dtype not in DTYPE_NUMBERS:
        raise Refusal(f"a norm's gradient in {dtype} is an error in eager")
    if dtype == value.facts.dtype:
        return value
    return value.writer("aten::to", value, DTYPE_NUMBERS[dtype], False, False)


FORMS = {
    f"{space}::{form.__name__}": form
    for space, forms in {
        "aten": (silu_backward, mish_backward, logit_backward, native_group_norm_backward),
        "tsfuser": (group_norm_backward, instance_norm_backward),
    }.items()
    for form in forms
}
