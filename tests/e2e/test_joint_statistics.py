"""Running statistics where joint graphs differentiate: each call changes them once, as in eager."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tsfuser
from tsfuser import _C

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


class First(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return F.silu(self.norm(x)) * 0.5


class Behind(First):
    def forward(self, x):
        return F.silu(self.norm(x * 2.0)) * 0.5


class Branch(First):
    def forward(self, x, on: bool = True):
        if on:
            x = self.norm(x)
        return F.silu(x) * 0.5


class BranchOnData(First):
    def forward(self, x):
        if bool(x.sum() > 0):
            x = self.norm(x) * 2.0
        else:
            x = F.silu(self.norm(x) * 3.0)
        return torch.sin(x) * 0.5


class Loop(First):
    def forward(self, x):
        for _ in range(3):
            x = F.silu(self.norm(x)) * 0.5
        return x


class Twice(First):
    def forward(self, x):
        return F.silu(self.norm(self.norm(x) * 0.5)) * 0.5


class InPlace(First):
    def forward(self, x):
        return F.silu(self.norm(x).mul_(2.0))


NORMS = {
    "one dim": (lambda: nn.BatchNorm1d(6), ()),
    "a row": (lambda: nn.BatchNorm1d(6), (5,)),
    "image": (lambda: nn.BatchNorm2d(6), (5, 3)),
    "volume": (lambda: nn.BatchNorm3d(6), (5, 3, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(6, momentum=None), (5, 3)),
    "no statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (5, 3)),
    "no weight": (lambda: nn.BatchNorm2d(6, affine=False), (5, 3)),
    "instances of a row": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (5,)),
    "instances": (lambda: nn.InstanceNorm2d(6, track_running_stats=True), (5, 3)),
}
PLACES = [First, Behind, Branch, BranchOnData, Loop, Twice, InPlace]


def packed(scripted):
    plans = scripted.get_debug_state().execution_plans.values()
    return [graph for plan in plans for graph in _C.joint_graphs(plan.code)]


@pytest.mark.parametrize(
    "place, norm",
    [(First, norm) for norm in NORMS]
    + [(place, norm) for place in PLACES[1:] for norm in ("image", "instances of a row")],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_each_call_changes_them_once(place, norm):
    make, sizes = NORMS[norm]
    torch.manual_seed(3)
    eager = place(make())
    for parameter in eager.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    scripted = torch.jit.script(copy.deepcopy(eager))
    for call in range(8):
        for module in (eager, scripted):
            module.train(call != 5)
        x = torch.randn(4, 6, *sizes) * 2 + 1
        want = trained(eager, x)
        with tsfuser.fuser():
            got = trained(scripted, x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(scripted.named_buffers()), dict(eager.named_buffers()))
    assert packed(scripted)


def trained(module, x):
    """The result, and all gradients so far."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def test_second_derivatives_change_none():
    x = torch.randn(4, 6, 5, 3, dtype=torch.float64, requires_grad=True)
    eager = First(nn.BatchNorm2d(6).double())
    scripted = torch.jit.script(copy.deepcopy(eager))

    def second(module):
        first = torch.autograd.grad((module(x) ** 2).sum(), [x, *module.parameters()], create_graph=True)
        return torch.autograd.grad(sum((t**2).sum() for t in first), [x, *module.parameters()])

    for _ in range(5):
        want = second(eager)
        with tsfuser.fuser():
            got = second(scripted)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(dict(scripted.named_buffers()), dict(eager.named_buffers()))
    assert packed(scripted)
