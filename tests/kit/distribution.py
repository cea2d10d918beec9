"""What the tests of random ops share: bounds of statistics, and shapes.

Statistics are over fixed seeds, so a test passes always or never. Bounds are 5 standard deviations: of right
measurements, one of 2 million is outside.
"""

import math

import torch

SIGMAS = 5
SHAPES = [(1 << 16,), (257, 333), (64, 7, 129), (8, 16, 24, 20), (4099, 3), (3, 8191)]


def ones(shape, device, dtype=torch.float32):
    return torch.ones(shape, device=device, dtype=dtype)


def close(measured, expected, deviation, count):
    """Whether the mean of `count` numbers of standard deviation `deviation` is where it should be."""
    assert abs(measured - expected) <= SIGMAS * deviation / math.sqrt(count), (measured, expected, count)


def correlation(a, b):
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return ((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()).item()


def state_of(device):
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def set_state(device, state):
    torch.cuda.set_rng_state(state) if device == "cuda" else torch.set_rng_state(state)
