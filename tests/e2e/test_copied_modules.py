"""Compiled and scripted modules that are copied, or whose parameters are replaced, after they ran fused."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import assert_matches

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return torch.sigmoid(self.norm(self.linear(x))) * self.scale


def made(kind, place):
    """A module that has run fused, and a function that makes an eager one like it."""
    eager = Model().to(place)
    module = torch.compile(eager, backend="tsfuser") if kind == "compiled" else torch.jit.script(eager)
    return module


def train(module, x, calls=4):
    with tsfuser.fuser():
        for _ in range(calls):
            module.zero_grad()
            out = module(x)
            (out * torch.arange(6, device=x.device)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters())]


def plain(module, place, dtype=torch.float32):
    """An eager module with the parameters of another."""
    eager = Model().to(place)
    names = {name.removeprefix("_orig_mod."): value for name, value in module.state_dict().items()}
    eager.load_state_dict(names)
    return eager.to(dtype)


def assert_as_eager(module, x, place):
    reference = plain(module, place), plain(module, place, torch.float64)
    mine = train(module, x)
    eager, exact = train(reference[0], x), train(reference[1], x.double())
    for a, b, c in zip(mine, eager, exact):
        assert_matches(a, b, c, ops=40)


@pytest.mark.parametrize("kind", ["compiled", "scripted"])
def test_a_copy_has_parameters_of_its_own(kind, place):
    module, x = made(kind, place), torch.randn(5, 8, device=place)
    train(module, x)
    with torch.no_grad():  # else parameters of a scripted copy have a history
        other = copy.deepcopy(module)
        for p in other.parameters():
            p.requires_grad_().mul_(-1.5)
    assert_as_eager(other, x, place)
    assert_as_eager(module, x, place)
    places = [{p.data_ptr() for p in each.parameters()} for each in (module, other)]
    assert not places[0] & places[1]


@pytest.mark.parametrize("kind", ["compiled", "scripted"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_is_read(kind, assign, place):
    """With `assign` the parameters are other tensors, and the old ones stay as they were."""
    module, x = made(kind, place), torch.randn(5, 8, device=place)
    train(module, x)
    before = [p.detach().clone() for p in module.parameters()]
    held = [p.detach() for p in module.parameters()]
    state = {
        name: value * -1.5 if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    state = {name: value.abs() if "var" in name else value for name, value in state.items()}
    module.load_state_dict(state, assign=assign)
    assert_as_eager(module, x, place)
    if assign:
        assert all(torch.equal(a, b) for a, b in zip(before, held))


def test_an_assigned_state_may_have_another_dtype(place):
    module, x = made("compiled", place), torch.randn(5, 8, device=place)
    train(module, x)
    state = {
        name: value.double() if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    reference = plain(module, place, torch.float64)
    for a, b in zip(train(module, x.double()), train(reference, x.double())):
        assert_matches(a, b, ops=40)
