"""Gradients of programs whose backward compares what it computes again with what was saved."""

import torch


def leaves(device, dtype, *shape):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2)]


def gradients(function, given):
    """Of a sum of all results, each times other numbers."""
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(3)
    incoming = [torch.rand_like(r, dtype=torch.float32).to(r.dtype) + 0.5 for r in results]
    return torch.autograd.grad(results, given, incoming)
