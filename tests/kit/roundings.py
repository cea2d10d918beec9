"""Shakes each op of a program, forward and backward, by as much as rounding may put its result off.

In: a program in double, run under `Shaken`. Out: what it gives where each op is as wrong as one of a dtype
with that `epsilon` may be. The formulas (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 2.2
and 4.2), `d` being of the size of `2 epsilon`: an elementwise op gives `y (1 + d)`; a sum `y + d sum(|x|)`,
since terms that cancel leave far less than their roundings; what takes a mean away is off by that mean's
error, the same one everywhere. And where the positive or the negative terms of a sum alone overflow, the
order of additions decides between the sum, inf and nan: each seed takes another of them. So does whether
a product and a sum are one FMA, where the product alone overflows. And what torch's kernel itself gets
wrong is put right, shaken or not: that of a batch norm's derivative on the CPU reads gradient and operand in
one order, though only dims of one element hide that one is channels-last and the other is not. Example:

    with Shaken(seed) as shaken, shaken.by(2.0**-23):
        x.sum()
"""

import contextlib
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kit.support import EPSILON

aten = torch.ops.aten


class Shaken(TorchDispatchMode):
    """Shakes what runs inside of one of its `by`; elsewhere it gives what is exact."""

    def __init__(self, seed):
        super().__init__()
        self.epsilon = None
        self.beyond = (torch.nan, torch.inf, -torch.inf)[seed % 3]  # what sums become that may overflow
        self.generator = torch.Generator().manual_seed(seed)

    @contextlib.contextmanager
    def by(self, epsilon):
        """Roundings of that size; None for none."""
        before, self.epsilon = self.epsilon, epsilon
        try:
            yield
        finally:
            self.epsilon = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, place = kwargs or {}, func.overloadpacket
        written = [r.alias_info and r.alias_info.is_write for r in func._schema.returns]
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if place == aten.native_batch_norm_backward:
            args = (args[0].contiguous(), args[1].contiguous(), *args[2:])
        out = func(*args, **kwargs)
        if self.epsilon is None or is_view or _selects(place, args):
            return out
        outs = list(out) if isinstance(out, tuple) else [out]
        args = [a.double() if isinstance(a, torch.Tensor) and not a.is_complex() else a for a in args]
        for k, y in enumerate(outs):
            if isinstance(y, torch.Tensor) and y.dtype == torch.complex128:
                shaken = y + 2 * self.epsilon * y.abs() * torch.complex(self._random(y), self._random(y))
                outs[k] = y.copy_(shaken) if written[k] else shaken
            if not isinstance(y, torch.Tensor) or y.dtype != torch.float64:
                continue
            summed = _SUMMED[place](func, args, kwargs, outs) if k == 0 and place in _SUMMED else []
            shaken = y * (1 + 2 * self.epsilon * self._random(y))
            for magnitude in summed:  # never by next to nothing: there may be one element only
                d = self._random(magnitude)
                shaken = shaken + self.epsilon * (d + d.sign()) * magnitude
            if place in _ADDED:
                shaken = torch.where(self._may_overflow(func, args, kwargs, y), self.beyond, shaken)
            elif place in _SCALED and isinstance(args[_SCALED[place]], torch.Tensor):
                factor = args[_SCALED[place]]
                overflows = (factor * kwargs.get("alpha", 1)).abs() > self._largest()
                shaken = torch.where(overflows & factor.isfinite(), self.beyond, shaken)
            outs[k] = y.copy_(shaken) if written[k] else shaken
        return type(out)(outs) if isinstance(out, tuple) else outs[0]

    def _may_overflow(self, func, args, kwargs, y):
        """Where a sum, or what is divided to be a mean, may become `beyond` in some order of additions:
        inf if the positive terms overflow, -inf if the negative ones do, nan if both do. nan stands also
        for a sum that is finite in another order."""
        x, *rest = args
        count = x.numel() / max(y.numel(), 1) if func.overloadpacket == aten.mean else 1
        add = lambda terms: func(terms * 2.0**-64, *rest, **kwargs) * count
        largest = self._largest() * 2.0**-64
        up, down = add(x.relu()) > largest, add((-x).relu()) > largest
        either = (up | down) & (add(x).abs() <= largest)
        return {torch.inf: up, -torch.inf: down}.get(self.beyond, up & down | either)

    def _largest(self):
        """More is rounded to inf in registers: of doubles if those are shaken, else of floats."""
        dtype = torch.float64 if self.epsilon <= EPSILON[torch.float64] else torch.float32
        return torch.finfo(dtype).max * (1 + EPSILON[dtype] / 4)

    def _random(self, x):
        return torch.rand(x.shape, generator=self.generator, dtype=torch.float64) * 2 - 1


def _selects(place, args):
    """Whether an op gives some of its elements, which are not rounded: backwards compare them with the
    rest."""
    order = args[1] if len(args) > 1 else 2
    return place in _SELECTING or (place == aten.linalg_vector_norm and abs(order) == torch.inf)


_SELECTING = (aten.amax, aten.amin, aten.max, aten.min, aten.median, aten.sort, aten.aminmax)


# ---- op -> the magnitudes of the terms of its first result; one of fewer elements is shared by many of the
# result's


def _of_sum(func, args, kwargs, outs):
    return [func(*(a.abs() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)]


def _of_product_and_sum(func, args, kwargs, outs):
    return [args[0].abs() + (outs[0] - args[0]).abs()]


def _of_logsumexp(func, args, kwargs, outs):
    return [args[0].abs().amax(*args[1:])] if args[0].numel() else []


def _of_log_softmax(func, args, kwargs, outs):
    return [args[0].abs().amax(args[1], True)] if args[0].numel() else []


def _of_softmax_backward(func, args, kwargs, outs):
    grad, y, dim = args[:3]
    return [y * (grad.abs() + (grad * y).abs().sum(dim, True))]


def _of_log_softmax_backward(func, args, kwargs, outs):
    grad, y, dim = args[:3]
    return [grad.abs() + y.exp() * grad.abs().sum(dim, True)]


def _of_layer_norm(func, args, kwargs, outs):
    x, sizes = args[:2]
    return [outs[2] * x.abs().mean(list(range(-len(sizes), 0)), True)]


def _of_batch_norm(func, args, kwargs, outs):
    x = args[0]
    return [_of_channels(outs[2], x) * x.abs().mean(_but_channels(x), True)]


def _by_group(x, groups):
    return x.reshape(len(x), groups, math.prod(x.shape[1:]) // groups)  # -1 is nothing of no elements


def _of_group_norm(func, args, kwargs, outs):
    x, groups = args[0], args[6]
    return [
        (outs[2][..., None] * _by_group(x, groups).abs())
        .mean(2, True)
        .expand(-1, -1, x.size(1) // groups)
        .reshape(*x.shape[:2], *[1] * (x.dim() - 2))
    ]


def _of_layer_norm_backward(func, args, kwargs, outs):
    grad, x, sizes, mean, rstd = args[:5]
    dims = list(range(-len(sizes), 0))
    return _of_normal_backward(grad, (x - mean) * rstd, rstd, dims)


def _of_batch_norm_backward(func, args, kwargs, outs):
    grad, x, mean, rstd = args[0], args[1], *(_of_channels(v, args[1]) for v in args[5:7])
    return _of_normal_backward(grad, (x - mean) * rstd, rstd, _but_channels(x))


def _of_group_norm_backward(func, args, kwargs, outs):
    grad, x, mean, rstd, groups = *args[:4], args[8]
    grad, rows = (_by_group(v, groups) for v in (grad, x))
    hat = (rows - mean[..., None]) * rstd[..., None]
    found = _of_normal_backward(grad, hat, rstd[..., None], [2])
    return [m.expand_as(rows).reshape(x.shape) for m in found]


def _of_normal_backward(grad, hat, rstd, dims):
    """Of `rstd (g - mean(g) - hat mean(g hat))`."""
    slope = (grad * hat).abs().mean(dims, True)
    return [rstd * grad.abs().mean(dims, True), rstd * (grad.abs() + hat.abs() * slope)]


def _but_channels(x):
    return [d for d in range(x.dim()) if d != 1]


def _of_channels(value, x):
    return value.reshape(-1, *[1] * (x.dim() - 2))


_ADDED = (aten.sum, aten.mean)
_SCALED = {aten.add: 1, aten.sub: 1, aten.rsub: 0}  # op -> the operand that is multiplied by `alpha`
_SUMMED = dict.fromkeys((aten.sum, aten.mean, aten.cumsum), _of_sum) | {
    aten.addcmul: _of_product_and_sum, aten.addcdiv: _of_product_and_sum, aten.lerp: _of_product_and_sum,
    aten.logsumexp: _of_logsumexp, aten._log_softmax: _of_log_softmax,
    aten._softmax_backward_data: _of_softmax_backward,
    aten._log_softmax_backward_data: _of_log_softmax_backward,
    aten.native_layer_norm: _of_layer_norm, aten.native_layer_norm_backward: _of_layer_norm_backward,
    aten.native_batch_norm: _of_batch_norm, aten.native_batch_norm_backward: _of_batch_norm_backward,
    aten.native_group_norm: _of_group_norm, aten.native_group_norm_backward: _of_group_norm_backward,
}  # fmt: skip
