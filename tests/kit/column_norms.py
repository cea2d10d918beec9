"""Programs whose reductions keep the contiguous dim, and tensors for them."""

import torch

import tsfuser
from kit.batch_norms import Normed, parameters
from kit.reductions import tensor
from kit.support import assert_matches, no_fallback

GRADIENTS = """
def f(x, w, b, m, v, training: bool, momentum: float):
    return torch.relu(torch.batch_norm(x * 2.0, w, b, m, v, training, momentum, 1e-5, True))
"""
CENTRED = """
def f(x):
    y = x * 0.5
    mean = y.mean(0, True)
    return (y - mean) * torch.rsqrt(((y - mean) * (y - mean)).mean(0, True) + 1e-5), mean
"""
SOFTMAX = """
def f(x):
    y = torch.softmax(x * 0.5, 1)
    return y, y.sum(1)
"""


def last(*sizes, device, dtype=torch.float32):
    return tensor(*sizes, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)


def trained(function, x, parameters):
    """Result, running statistics and the gradients of x, weight and bias."""
    leaves = [
        p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in (x, *parameters[:2])
    ]
    statistics = [p.clone() for p in parameters[2:]]
    y = function(*leaves, *statistics, True, 0.1)
    y.backward(last(*y.shape, device=y.device, dtype=y.dtype))
    return [y.detach(), *statistics, *(p.grad for p in leaves)]


def check_gradients(sizes, dtype, place):
    """Compares the results and gradients of a batch norm over x of these sizes with eager's."""
    function, x, own = Normed(GRADIENTS), last(*sizes, device=place, dtype=dtype), parameters(sizes[1], place)
    with tsfuser.fuser(), no_fallback():
        actual = [trained(function.scripted, x, own) for _ in range(4)][-1]
    eager = trained(function.plain, x, own)
    exact = trained(function.plain, x.double(), [p.double() for p in own])
    for a, e, r in zip(actual, eager, exact):
        assert_matches(a, e, r, ops=64, precision=dtype)
