"""New tensors like one that a group computes: the group goes on behind them."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


def noisy(x):
    y = (x * 2.0).sin()
    return y.cos() * torch.empty_like(y).bernoulli_(0.7)


def into_zeros(x):
    y = (x * 2.0).sin()
    return y.cos() + y.new_zeros(y.shape[0], 1)


def of_another_dtype(x):
    y = (x * 2.0).sin()
    return y.cos() * torch.empty_like(y, dtype=torch.float64).bernoulli_(0.7)


CASES = [noisy, into_zeros, of_another_dtype]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", CASES)
def test_one_group_computes_what_is_before_and_after(device, function, dynamic):
    compiled = torch.compile(function, backend="tsfuser", dynamic=dynamic)
    for rows in (8, 9):
        x = torch.randn(rows, 16, device=device)
        compiled(x)
        before = tsfuser.stats()["launches"]
        torch.manual_seed(1)
        found = compiled(x)
        assert tsfuser.stats()["launches"] - before == 1
        torch.manual_seed(1)
        assert_matches(found, function(x), ops=60, precision=torch.float32)


@pytest.mark.parametrize("sizes", [(), (0, 3), (1, 1), (4, 3, 5, 7)])
@pytest.mark.parametrize("function", [noisy, of_another_dtype])
def test_noise_has_the_order_of_memory(device, function, sizes):
    """That which AOTAutograd gives it, whatever the layout of the tensor."""
    x = torch.randn(sizes, device=device)
    forms = [x, x.transpose(0, -1)] if x.dim() > 1 else [x]
    forms += [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
    for given in forms:
        torch.manual_seed(1)
        found = torch.compile(function, backend="tsfuser", dynamic=False)(given)
        torch.manual_seed(1)
        expected = torch.compile(function, backend="aot_eager", dynamic=False)(given)
        assert_matches(found, expected, ops=60, precision=torch.float32)


def test_gradients(device):
    x = torch.randn(8, 16, device=device, requires_grad=True)
    for function in CASES:
        compiled, grads = torch.compile(function, backend="tsfuser"), []
        for run in (compiled, function):
            torch.manual_seed(1)
            grads += torch.autograd.grad(run(x).sum(), x)
        assert_matches(*grads, ops=100)
