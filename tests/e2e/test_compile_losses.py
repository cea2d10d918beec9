"""Losses with `torch.compile(backend="tsfuser")`: NaN, infinities and errors are eager's, whatever torch's
decompositions make of them."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tsfuser

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten")]
PARTS = (-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, math.nan, math.inf, -math.inf)
LOSSES = {
    "smooth_l1": F.smooth_l1_loss,
    "narrow smooth_l1": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.25),
    "smooth_l1 without a bend": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.0),
    "huber": F.huber_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "bce with logits": F.binary_cross_entropy_with_logits,
    "poisson": F.poisson_nll_loss,
}


def step(function, x, y):
    """A loss and its gradient."""
    x = x.clone().requires_grad_()
    loss = function(x, y)
    loss.backward(torch.ones_like(loss))
    return loss.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_special_values(device, name, reduction, dtype):
    x, y = torch.tensor([*itertools.product(PARTS, PARTS)], dtype=dtype, device=device).t().contiguous()

    def function(x, y):
        return LOSSES[name](x * 1.0, y, reduction=reduction) * 2.0

    found = step(torch.compile(function, backend="tsfuser"), x, y), step(function, x, y)
    near = 4 * torch.finfo(dtype).eps if dtype is torch.float16 else None  # eager rounds more often
    assert_close(*found, rtol=near, atol=near, equal_nan=True)
    assert tsfuser.stats()["launches"] >= 2  # forward and backward


@pytest.mark.parametrize(
    "x, y, who", [(1.5, 1.0, "input"), (-0.5, 1.0, "input"), (math.nan, 1.0, "input"), (0.5, 2.0, "target")]
)
def test_binary_cross_entropy_asks_for_numbers_from_0_to_1(x, y, who):
    """On a GPU eager stops the device."""

    def function(x, y):
        return F.binary_cross_entropy(x * 1.0, y) * 2.0

    run = torch.compile(function, backend="tsfuser")
    inside = torch.tensor([0.0, 0.25, 1.0])
    assert_close(step(run, inside, inside.flip(0)), step(function, inside, inside.flip(0)))
    for f in (function, run):
        with pytest.raises(RuntimeError, match=f"all elements of {who} should be between 0 and 1"):
            f(torch.tensor([0.5, x, 0.5]), torch.tensor([0.0, y, 1.0]))
