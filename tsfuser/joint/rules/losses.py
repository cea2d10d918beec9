"""Derivatives of losses."""

from __future__ import annotations

from .table import is_whole, rule, structural

_REDUCED = {0: "none", 1: "mean", 2: "sum"}


def _both(kind):
    """What the loss is symmetric in, `self` and `target`, have gradients by the same op. It takes no whole
    numbers in the first place."""

    @rule(f"aten::{kind}", of="self target", broadcasts=True)
    def write(grad, self, target, reduction, beta=None, delta=None):
        def of(one, other):
            if is_whole(one):
                return None
            return grad.writer(f"aten::{kind}_backward", grad, one, other, reduction, *more)

        more = [n for n in (beta, delta) if n is not None]
        return of(self, target), of(target, self)


for _kind in ("mse_loss", "smooth_l1_loss", "huber_loss"):
    _both(_kind)


@rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(grad, self, target, weight, reduction, ignore_index, results):
    """It reads nothing of the log-probabilities but their sizes."""
    more = (target, weight, reduction, ignore_index, results[1])
    return grad.writer("tsfuser::nll_loss_backward", grad, self.sizes, *more)


@rule("aten::binary_cross_entropy", of="self target", broadcasts=True)
def binary_cross_entropy(grad, self, target, weight, reduction):
    by_self = grad.binary_cross_entropy_backward(self, target, weight, reduction)
    by_target = (1 - self).log().clamp_min(-100) - self.log().clamp_min(-100)
    return by_self, _shared(grad * _weighted(by_target, weight), self, reduction)


@rule("aten::binary_cross_entropy_with_logits", of="self target", broadcasts=True)
def binary_cross_entropy_with_logits(grad, self, target, weight, pos_weight, reduction):
    if pos_weight is None:
        by_self, by_target = self.sigmoid() - target, -self
    else:
        positive = pos_weight * target
        by_self = (positive + 1 - target) * self.sigmoid() - positive
        by_target = (-self).log_sigmoid() - pos_weight * self.log_sigmoid()
    return tuple(_shared(grad * _weighted(by, weight), self, reduction) for by in (by_self, by_target))


def _weighted(by, weight):
    return by if weight is None else by * weight


def _shared(grad, self, reduction):
    if _REDUCED[structural(reduction, "the reduction of a loss")] != "mean":
        return grad
    return grad / self.numel()
