"""Sums along dims of which one is contiguous in some operands, while the others are contiguous along what is
kept: the operands go through tiles of shared memory."""

import pytest
import torch

from kit.support import assert_matches, no_fallback
from tsfuser.schedule import transposed_reduction

pytestmark = pytest.mark.usefixtures("forgotten")


@pytest.fixture
def taken(target, monkeypatch):
    """The parameters of the schedule each time that it is taken; where blocks have threads it has to be."""
    made, propose = [], transposed_reduction.propose

    def spied(*args):
        found = propose(*args)
        return found if isinstance(found, str) else made.append(found.params) or found

    monkeypatch.setattr(transposed_reduction, "propose", spied)
    yield made
    assert bool(made) == (target != "cpu")


def channels_last(x, z, weight):
    """As the backward of a ConvNeXt block: x[N, C, H, W] beside z[N, H, W, C]."""
    y = x.permute(0, 2, 3, 1)
    stored = (y * weight).to(torch.bfloat16).contiguous()
    return stored, (y * z).sum((0, 1, 2)), stored.float().sum((0, 1, 2))


def packed(x, z, weight):
    """As the gradients of q, k and v: one of three operands of a stack lies the other way."""
    y = x.permute(0, 2, 3, 1)
    stored = torch.stack((z, y, z * weight), 3).contiguous()
    return stored, stored.float().sum((0, 1, 2))


def of_each_image(x, z, weight):
    y = z + x.permute(0, 2, 3, 1)
    return y * weight, y.amax((1, 2))


def operands(device, sizes, dtypes=(torch.float32, torch.bfloat16)):
    torch.manual_seed(0)
    n, c, h, w = sizes
    x = torch.randn(n, c, h, w, device=device).to(dtypes[0])
    return x, torch.randn(n, h, w, c, device=device).to(dtypes[1]), torch.randn(c, device=device)


def check(function, arguments, count):
    with no_fallback():
        found = torch.compile(function, backend="tsfuser")(*arguments)
    exact = function(*(a.double() for a in arguments))
    for own, eager, value in zip(found, function(*arguments), exact):
        assert own.stride() == eager.stride()
        assert_matches(own, eager, value, ops=count)


SIZES = {
    "whole tiles": (1, 64, 8, 16),
    "tiles that are cut": (2, 40, 5, 17),
    "narrow tiles": (1, 96, 4, 24),
    "one column more": (1, 65, 6, 16),
    "several splits": (5, 33, 24, 20),
}


@pytest.mark.each_value
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", [channels_last, packed, of_each_image])
def test_results_are_eagers(device, taken, function, size):
    n, _, h, w = SIZES[size]
    check(function, operands(device, SIZES[size]), n * h * w)


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes(device, taken, dtypes):
    check(channels_last, operands(device, (2, 40, 8, 20), dtypes), 320)


def test_an_operand_that_begins_inside_of_another(device, taken):
    """Its address and its rows allow narrow accesses only."""
    x, z, weight = operands(device, (2, 33, 8, 23))
    check(channels_last, (x[:, :, :, 2:-1], z[:, :, 2:-1, :], weight), 320)


def test_another_size_runs_the_same_graph(device, taken):
    compiled = torch.compile(channels_last, backend="tsfuser", dynamic=True)
    for sizes in ((2, 40, 5, 17), (3, 72, 6, 20), (1, 40, 30, 41)):
        arguments = operands(device, sizes)
        exact = channels_last(*(a.double() for a in arguments))
        with no_fallback():
            found = compiled(*arguments)
        for own, eager, value in zip(found, channels_last(*arguments), exact):
            assert_matches(own, eager, value, ops=sizes[0] * sizes[2] * sizes[3])
