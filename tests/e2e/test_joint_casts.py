"""Casts of biases in joint graphs are done where the biases are read (tsfuser/joint/casts.py). For all that
torch knows, a bias might be the statistics that a norm updates."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from kit.support import all_graphs, assert_matches, counted, groups

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs", "fused_or_error")]

NARROW = torch.bfloat16


class Gate(nn.Module):
    """The squeeze and excitation of EfficientNet, as autocast for CUDA has it computed."""

    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.down, self.up = (nn.Parameter(torch.randn(*s, 1, 1, dtype=NARROW)) for s in ((3, 6), (6, 3)))
        self.first, self.second = (nn.Parameter(torch.randn(n).to(dtype)) for n in (3, 6))

    def forward(self, x):
        x = F.silu(self.norm(x))
        y = F.conv2d(x.mean([2, 3], True), self.down, None)
        y = F.silu(y + self.first.to(torch.bfloat16).unsqueeze(-1).unsqueeze(-1))
        y = F.conv2d(y, self.up, None)
        return x * torch.sigmoid(y + self.second.to(torch.bfloat16).unsqueeze(-1).unsqueeze(-1))


class Exact(Gate):
    """The same without casts."""

    def forward(self, x):
        x = F.silu(self.norm(x))
        y = F.silu(F.conv2d(x.mean([2, 3], True), self.down) + self.first[:, None, None])
        return x * torch.sigmoid(F.conv2d(y, self.up) + self.second[:, None, None])


def exact(module):
    made = copy.deepcopy(module).double()
    for gate in made:
        gate.__class__ = Exact
    return made


def step(module, x):
    given = [x, *module.parameters()]
    y = module(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), given), *module.buffers()]


def network(dtype):
    torch.manual_seed(2)
    return nn.Sequential(Gate(dtype), Gate(dtype))


def launches(dtype, device):
    eager = network(dtype).to(device)
    scripted = torch.jit.script(copy.deepcopy(eager))
    with tsfuser.fuser():
        for rows in (3, 3, 3, 3, 1, 3):
            x = torch.randn(rows, 6, 5, 3, device=device).to(NARROW).requires_grad_()
            true = step(exact(eager), x.detach().double().requires_grad_())
            with counted() as found:
                got = step(scripted, x)
            for one, other, right in zip(got, step(eager, x), true):
                assert_matches(one, other, right, ops=200, precision=NARROW, strides=False)
    kinds = {"aten::to", "aten::_to_copy"}
    outside = [n for g in all_graphs(scripted) for kind in kinds for n in g.findAllNodes(kind, True)]
    assert groups(scripted)
    return found["launches"], len(outside)


def test_casts_of_biases_are_no_launches_of_their_own(device):
    assert launches(torch.float32, device) == (launches(NARROW, device)[0], 0)
