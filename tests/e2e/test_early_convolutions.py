"""A convolution between a batch norm and the reader of its result moves before the norm
(csrc_stubs/torchscript/early_convolutions.cpp): then the norm is in a differentiable graph. Only where nobody
can tell."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.models import bottleneck
from kit.support import all_graphs, assert_matches

pytestmark = pytest.mark.graphs


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1)
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)


class Shortcut(Base):
    def forward(self, x):
        x = torch.relu(x)
        y = self.norm(self.first(x))
        return torch.relu(y + self.other(self.second(x)))


class OneNorm(Base):
    """One norm for both, so that its statistics are written twice."""

    def forward(self, x):
        x = torch.relu(x)
        y = self.norm(self.first(x))
        return torch.relu(y + self.norm(self.second(x)))


class StatisticsAsWeight(Base):
    def forward(self, x):
        x = torch.relu(x)
        y = self.norm(self.first(x))
        mean = self.norm.running_mean
        assert mean is not None
        return torch.relu(y + torch.conv2d(x, mean.view(4, 1, 1, 1), groups=4))


class StatisticsAsInput(Base):
    def forward(self, x):
        x = torch.relu(x)
        mean = self.norm.running_mean
        assert mean is not None
        image = mean.view(1, 4, 1, 1)
        y = self.norm(self.first(x))
        return torch.relu(y + self.second(image))


class Written(Base):
    """The image is written to before the convolution reads it."""

    def forward(self, x):
        x = x * 3.0
        y = self.norm(self.first(x.clone()))
        x.mul_(2.0)
        return torch.relu(y + self.second(x))


class Replaced(Base):
    """A buffer takes the place of the convolution's weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(4, 4, 1, 1))

    def forward(self, x):
        x = torch.relu(x)
        y = self.norm(self.first(x))
        self.weight = self.weight * 0.5
        return torch.relu(y + torch.conv2d(x, self.weight))


def steps(module, images):
    """What some steps of training give, and one in evaluation."""
    seen = []
    for x in images:
        x = x.clone().requires_grad_()
        out = module(x)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out))
        seen += [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
        seen += [b.clone() for b in module.buffers()]
        module.zero_grad()
    module.eval()
    return [*seen, module(images[0]).detach()]


def compare(module, device, sizes=(3, 4, 5, 6)):
    """Trains the module and its scripted copy; returns the latter."""
    module = module.double().to(device)
    scripted = torch.jit.script(copy.deepcopy(module))
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn(sizes, generator=generator, dtype=torch.float64).to(device) for _ in range(5)]
    with tsfuser.fuser():
        seen = steps(scripted, images)
    for mine, eagers in zip(seen, steps(module, images)):
        assert_matches(mine, eagers, ops=400)
    return scripted


def norms_outside(scripted):
    """Batch norms that no differentiable graph holds."""
    training = next(g for g in all_graphs(scripted) if g.findNode("prim::DifferentiableGraph", True))
    return sum(node.kind() == "aten::batch_norm" for node in training.nodes())


def test_norms_of_a_shortcut_are_differentiated_together(device):
    assert norms_outside(compare(Shortcut(), device)) == 0
    assert norms_outside(compare(nn.Sequential(nn.ReLU(), bottleneck(4, 4, 8, 2)), device)) == 0


def test_norms_of_a_shortcut_under_autocast():
    scripted = torch.jit.script(nn.Sequential(nn.ReLU(), bottleneck(4, 4, 8, 2)))
    with tsfuser.fuser(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            scripted(torch.randn(3, 4, 5, 6)).float().sum().backward()
        assert norms_outside(scripted) == 0  # here: torch has other graphs of it without autocast


@pytest.mark.parametrize("kind", [OneNorm, Written, Replaced])
def test_what_a_program_sees_is_eagers(device, kind):
    compare(kind(), device)


@pytest.mark.parametrize(
    "kind, moves",
    [(Shortcut, True), (StatisticsAsWeight, False), (StatisticsAsInput, False), (Written, False)],
)
def test_what_may_read_statistics_stays_behind_the_norm(kind, moves):
    """In the graph that torch profiles: autodiff moves nodes itself."""
    scripted = torch.jit.script(type("New", (kind,), {})())  # whose graph was not profiled before
    with tsfuser.fuser():
        scripted(torch.randn(3, 4, 5, 6))
        graph = torch.jit.last_executed_optimized_graph()
    order = [n.kind() for n in graph.nodes() if n.kind() in ("aten::conv2d", "aten::batch_norm")]
    assert order[:3] == ["aten::conv2d", *(["aten::conv2d", "aten::batch_norm"][:: 1 if moves else -1])]
