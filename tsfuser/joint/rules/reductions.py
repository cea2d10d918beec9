"""Derivatives of reductions, softmaxes and scans."""

from __future__ import annotations

import math

from .table import known_rank, rule, structural


def _dims(self, dim):
    """The dims as ascending numbers; all for none."""
    dim = structural(dim, "the dims of a reduction")
    rank = known_rank(self)
    if dim is None or dim == []:
        return list(range(rank))
    chosen = [structural(d, "a dim of a reduction") for d in (dim if isinstance(dim, list) else [dim])]
    return sorted(d % rank if rank else 0 for d in chosen) if rank else []


def restored(value, self, dim, keepdim):
    """`value`, with the dims of size 1 that a reduction of `self` has dropped."""
    if structural(keepdim, "keepdim"):
        return value
    for d in _dims(self, dim):
        value = value.unsqueeze(d)
    return value


def count(self, dim):
    """How many elements a reduction takes together: a number of the graph."""
    dims = _dims(self, dim)
    product = 1
    for d in dims:
        product = self.size(d) * product if product != 1 or d != dims[0] else self.size(d)
    return product


@rule("aten::sum")
def sum_(grad, self, dim=None, keepdim=False):
    return restored(grad, self, dim, keepdim).expand(self.sizes)


@rule("aten::nansum")
def nansum(grad, self, dim=None, keepdim=False):
    return restored(grad, self, dim, keepdim) * ~self.isnan()


@rule("aten::mean")
def mean(grad, self, dim=None, keepdim=False):
    return restored(grad, self, dim, keepdim).expand(self.sizes) / count(self, dim)


@rule("aten::_grad_sum_to_size", "aten::sum_to_size", "aten::expand", "aten::broadcast_to")
def resized(grad, self):
    return grad.writer("aten::_grad_sum_to_size", grad, self.sizes)


@rule("aten::amax", "aten::amin")
def extreme(grad, self, result, dim, keepdim):
    """Equal elements share the gradient."""
    chosen = restored(result, self, dim, keepdim) == self
    shared = restored(grad, self, dim, keepdim) * chosen
    return shared / chosen.sum(_dims(self, dim), True)


@rule("aten::max", "aten::min", of="self")
def largest(grad, self, result, results, dim=None, keepdim=False):
    """Those of two tensors are `maximum` and `minimum` (expansions.py)."""
    if dim is not None:
        return _at(grad, self, dim, results[1], keepdim)
    chosen = self == result
    return grad * chosen / chosen.sum()


@rule("aten::aminmax")
def aminmax(grads, self, results, dim=None, keepdim=False):
    shares = [extreme(g, self, r, dim, keepdim) for g, r in zip(grads, results) if g is not None]
    return shares[0] if len(shares) == 1 else shares[0] + shares[1]


@rule("aten::median", "aten::nanmedian")
def median(grad, self, result, results, dim=None, keepdim=False):
    if dim is not None:
        return _at(grad, self, dim, results[1], keepdim)
    chosen = (self == result) | (self.isnan() & result.isnan())
    return grad * chosen / chosen.sum()


@rule("aten::mode", "aten::kthvalue", "aten::cummax", "aten::cummin")
def selected(grad, self, results, dim, keepdim=True):
    return _at(grad, self, dim, results[1], keepdim)


@rule("aten::sort", "aten::topk")
def ordered(grad, self, results, dim):
    return _at(grad, self, dim, results[1], True)


def _at(grad, self, dim, indices, keepdim):
    """Zeros, but for the gradient where `indices` say along `dim`. Elements chosen twice add up."""
    dims = [dim]
    grad, indices = restored(grad, self, dims, keepdim), restored(indices, self, dims, keepdim)
    return grad.new_zeros(self.sizes).scatter_add(dim, indices, grad)


@rule("aten::var")
def var(grad, self, dim=None, keepdim=False, correction=None, unbiased=True):
    return _var(grad, self, dim, keepdim, correction, unbiased)


@rule("aten::std")
def std(grad, self, result, dim=None, keepdim=False, correction=None, unbiased=True):
    return _var((grad / (result * 2)).masked_fill(result == 0, 0), self, dim, keepdim, correction, unbiased)


@rule("aten::var_mean")
def var_mean(grads, self, dim=None, keepdim=False, correction=None, unbiased=True):
    by_mean = None if grads[1] is None else mean(grads[1], self, dim, keepdim)
    by_var = None if grads[0] is None else _var(grads[0], self, dim, keepdim, correction, unbiased)
    return by_mean if by_var is None else by_var if by_mean is None else by_var + by_mean


@rule("aten::std_mean")
def std_mean(grads, self, results, dim=None, keepdim=False, correction=None, unbiased=True):
    by_std = None if grads[0] is None else std(grads[0], self, results[0], dim, keepdim, correction, unbiased)
    by_mean = None if grads[1] is None else mean(grads[1], self, dim, keepdim)
    return by_mean if by_std is None else by_std if by_mean is None else by_std + by_mean


def _var(grad, self, dim, keepdim, correction, unbiased):
    if correction is None:
        correction = 1 if structural(unbiased, "unbiased") else 0
    freedom = count(self, dim) - correction
    scale = math.nan if isinstance(freedom, int) and freedom == 0 else 2.0 / freedom
    centred = self - self.mean(_dims(self, dim), True)
    return restored(grad, self, dim, keepdim) * scale * centred


@rule("aten::logsumexp", "aten::special_logsumexp")
def logsumexp(grad, self, result, dim, keepdim):
    return restored(grad, self, dim, keepdim) * (self - restored(result, self, dim, keepdim)).exp()


@rule("aten::prod")
def prod(grad, self, result, dim=None, keepdim=False):
    """Without zeros it is the product over the element; with one the product of the others; with two, 0."""
    dims = _dims(self, dim)
    zero = self == 0
    zeros = zero.sum(dims, True) if dims else zero
    ones = self.masked_fill(zero, 1)
    others = ones.prod() if dim is None else ones.prod(dim, True)
    by_others = others.expand(self.sizes).masked_fill(~(zero & (zeros == 1)), 0)
    grad, result = restored(grad, self, dim, keepdim), restored(result, self, dim, keepdim)
    return grad * (zeros == 0).where(result / ones, by_others)


@rule("aten::linalg_vector_norm")
def vector_norm(grad, self, result, ord, dim=None, keepdim=False):
    return _norm(grad, self, result, structural(ord, "the order of a norm"), dim, keepdim)


@rule("aten::norm")
def norm(grad, self, result, p=2, dim=None, keepdim=False):
    return _norm(grad, self, result, 2 if p is None else structural(p, "the order of a norm"), dim, keepdim)


def _norm(grad, self, result, p, dim, keepdim):
    """derivatives.yaml's norm_backward for real numbers."""
    grad, result = restored(grad, self, dim, keepdim), restored(result, self, dim, keepdim)
    if p == 0:
        return grad.new_zeros(self.sizes)
    if p == 1:
        return self.sgn() * grad
    if p == 2:
        return grad * (self / result).masked_fill(result == 0, 0)
    if p in (float("inf"), float("-inf")):
        chosen = (self.abs() == result) | (self.isnan() & result.isnan())
        return self.sgn() * ((grad / chosen.sum(_dims(self, dim), True)) * chosen)
    if p < 1:
        scaled = (self.sgn() * self.abs() ** (p - 1)).masked_fill(self == 0, 0)
        return scaled * grad * result ** (1 - p)
    if p < 2:
        scaled = self.sgn() * self.abs() ** (p - 1)
        return scaled * (grad / result ** (p - 1)).masked_fill(result == 0, 0)
    scaled = self * self.abs() ** (p - 2)
    return scaled * (grad / result ** (p - 1)).masked_fill(result == 0, 0)


@rule("aten::softmax", "aten::_softmax")
def softmax(grad, self, result, dim):
    return grad._softmax_backward_data(result, dim, grad.writer.dtype_of(self))


@rule("aten::log_softmax", "aten::_log_softmax")
def log_softmax(grad, self, result, dim):
    return grad._log_softmax_backward_data(result, dim, grad.writer.dtype_of(self))


# ---- scans


def _from_the_end(x, dim):
    return x.flip([dim]).cumsum(dim).flip([dim])


@rule("aten::cumsum")
def cumsum(grad, dim):
    return _from_the_end(grad, dim)


@rule("aten::cumprod")
def cumprod(grad, self, result, dim):
    """Before the first zero the products are divided by the element, at it they are made without it, and
    behind it they are 0."""
    zero = self == 0
    zeros = zero.cumsum(dim)
    first = zero & (zeros == 1)
    others = self.masked_fill(first, 1).cumprod(dim)
    at_first = _from_the_end(grad * others, dim)
    before = _from_the_end(grad * result, dim) / self.masked_fill(zero, 1)
    return (zeros == 0).where(before, at_first.masked_fill(~first, 0))


@rule("aten::logcumsumexp")
def logcumsumexp(grad, self, result, dim):
    """Of gradients of both signs apart, whose logarithms do not overflow."""

    def share(part):
        sums = (part.log() - result).flip([dim]).logcumsumexp(dim).flip([dim])
        return (sums + self).exp()

    return share(grad.relu()) - share((-grad).relu())
