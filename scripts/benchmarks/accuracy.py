"""Whether what is measured is right: errors against float64, beside eager's.

In: what ran fused, in eager and in float64, a list of tensors each. Out: a number of roundings. Example:

    beyond([fused], [eager], [exact], torch.bfloat16)   # 0.0: at most four times as far off as eager
"""

import sys

import torch


def trained(run, tensors, gradient, dtype=None, steps=1):
    """Output and gradients, as float64, of the last of `steps` calls on copies in `dtype`; without a gradient
    the output alone."""
    operands = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad) for x in tensors]
    for _ in range(steps):
        for x in operands:
            x.grad = None
        out = run(*operands)
        if gradient is not None:
            out.backward(gradient.to(out.dtype))
    return [out.detach().double()] + [x.grad.double() for x in operands if x.grad is not None]


def beyond(fused, eager, exact, dtype):
    """The largest error that `fused` has beyond four times eager's, in roundings of the largest value. Huge
    where a value is NaN or infinite and the exact one is not."""
    worst = 0.0
    for mine, plain, right in zip(fused, eager, exact):
        error = (mine - right).abs().max() - 4 * (plain - right).abs().max()
        if error <= 0:  # also where everything is 0, as behind a relu, and nothing has a rounding
            continue
        roundings = (error / (right.abs().max() * torch.finfo(dtype).eps)).item()
        worst = max(worst, roundings if abs(roundings) <= sys.float_info.max else sys.float_info.max)
    return worst
