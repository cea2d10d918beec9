"""Operands and training steps of programs with one batch norm."""

import torch
import torch.nn.functional as F

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def operands(device, dtype=torch.float32, sizes=(4, 6, 9, 11), channels_last=False):
    generator = torch.Generator().manual_seed(9)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator).to(
            device, dtype if dtype == torch.float64 else torch.float32
        )

    x = normal(*sizes).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    w, b = (normal(sizes[1]).requires_grad_() for _ in range(2))
    return x.requires_grad_(), w, b, normal(sizes[1]) * 0.1, normal(sizes[1]).abs() + 0.5


def trained(function, tensors, gradient, training, calls=1):
    """The result, and the gradients of those that ask for them. Running statistics are fresh in each call."""
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    for _ in range(calls):
        x, w, b, mean, var = tensors
        y = function(x, w, b, mean.clone(), var.clone(), training)
        gradients = torch.autograd.grad(y, leaves, gradient.to(y.dtype))
    return [y.detach(), *gradients]


def evaluated(function, tensors):
    """The result of an evaluation, and its gradients, before which a norm in training has moved the running
    statistics."""
    x, w, b, mean, var = tensors
    moved, spread = mean.clone(), var.clone()
    y = function(x, w, b, moved, spread, False)
    F.batch_norm(x.detach() * 3 + 1, moved, spread, training=True, momentum=0.5)
    return [y.detach(), *torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]
