"""Branches that return views, which several ops read: they run once, whatever else the graph does. A view
that ops of several groups read is copied for each of them; a branch that depends on data is not."""

import warnings

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fuse, groups, kinds

pytestmark = pytest.mark.graphs


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tsfuser.TsfuserWarning)
        yield


class Branch(torch.nn.Module):
    """A batch norm that trains, so that the graph writes; then a branch that returns a view."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x, i):
        y = self.norm(x)
        if bool(i.sum() > 0):
            z = torch.relu(y.t()).t()
        else:
            z = y
        return z * 2.0 + 1.0, z.sin() * 0.5


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_that_returns_views_behind_a_norm_that_trains(device, sign):
    module, eager = Branch().to(device), Branch().to(device)
    x, i = torch.randn(6, 8, device=device), torch.full((3,), sign, device=device)
    scripted = torch.jit.script(module)
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(4):
            found, wanted = scripted(x, i), eager(x, i)
    for one, other in zip(found, wanted):
        assert_matches(one, other, ops=12)
    assert [kinds(group) for group in groups(scripted)]


def test_a_branch_that_draws_numbers_draws_them_once(device):
    def program(x, i):
        y = x * 2.0
        if bool(i.sum() > 0):
            z = torch.dropout(y.t(), 0.5, True).t()
        else:
            z = y
        return z * 2.0 + 1.0, z.sin() + 1.0

    x, i = torch.rand(24, 16, device=device) + 0.5, torch.ones(3, device=device)
    scripted = fuse(program, x, i)
    assert groups(scripted)
    first, second = scripted(x, i)
    assert torch.equal(first == 1.0, second == 1.0)


class Chunks(torch.nn.Module):
    """A batch norm that trains, and two ops before a chunk, both of which move behind it."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x, y):
        n = self.norm(x)
        a, b = torch.chunk((torch.relu(y) + 1.0) * 2.0, 2, 1)
        return torch.sigmoid(a) * torch.tanh(b), n


def test_ops_move_behind_a_chunk_beside_a_norm_that_trains(device):
    module, eager = Chunks().to(device), Chunks().to(device)
    x, y = torch.randn(6, 8, device=device), torch.randn(6, 16, device=device)
    scripted = torch.jit.script(module)
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(4):
            found, wanted = scripted(x, y), eager(x, y)
    for one, other in zip(found, wanted):
        assert_matches(one, other, ops=12)
    assert [kinds(group) for group in groups(scripted)]
