"""Training: autodiff moves nodes by what schemas say, and those of norms do not say that they update
statistics. Each norm keeps its place among those that read its statistics, too."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.batch_norms import parameters
from kit.reductions import tensor
from kit.support import assert_matches, script

pytestmark = pytest.mark.optimized

NORM = "torch.batch_norm({}, None, None, m, v, True, 0.25, 1e-5, False)"
#: The sine and the last reader of it are differentiated together, behind all that stands between them.
FUNCTION = """
def f(x, m, v):
    a = torch.sin(x)
    first = {}
    other = {}
    if other.dim() > 0:
        other = other.view_as(other)
    return first, other, torch.ones_like(x) + a
"""


@pytest.mark.parametrize("other", [NORM.format("x"), "m * 2.0", "x * v"])
def test_a_norm_and_another_reader_of_its_statistics_keep_their_order(device, other):
    source = FUNCTION.format(NORM.format("a"), other)
    space = {"torch": torch}
    exec(source, space)
    x, (m, v) = tensor(4, 3, device=device), parameters(3, device)[2:]
    scripted = script(source)
    with tsfuser.fuser():
        for _ in range(4):
            mine, eager = (m.clone(), v.clone()), (m.clone(), v.clone())
            found = scripted(x.clone().requires_grad_(), *mine)
            expected = space["f"](x.clone().requires_grad_(), *eager)
            for a, e in zip((*found, *mine), (*expected, *eager), strict=True):
                assert_matches(a.detach(), e.detach(), ops=16)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return torch.batch_norm(x, None, None, self.mean, self.var, True, 0.25, 1e-5, False)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def forward(self, x):
        a = torch.sin(x)
        first = self.norm(a)
        other = self.norm(x)
        if other.dim() > 0:
            other = other.view_as(other)
        return first, other, torch.ones_like(x) + a


def test_a_module_that_is_called_twice_updates_its_statistics_in_the_order_of_the_calls(device):
    x = tensor(4, 3, device=device)
    eager = Twice().to(device)
    scripted = torch.jit.script(copy.deepcopy(eager))
    with tsfuser.fuser():
        for _ in range(4):
            found, expected = (f(x.clone().requires_grad_()) for f in (scripted, eager))
            for a, e in zip((*found, *scripted.buffers()), (*expected, *eager.buffers()), strict=True):
                assert_matches(a.detach(), e.detach(), ops=16)


def test_norms_with_statistics_of_their_own_are_differentiated_together():
    """Their order is free."""
    source = FUNCTION.format(NORM.format("a"), NORM.format("x").replace("m, v", "v, m"))
    source = source.replace("def f(x, m, v)", "def f(x, m, v, n, w)").replace("v, m,", "n, w,")
    x, (m, v) = tensor(4, 3), parameters(3)[2:]
    scripted = script(source.replace("    if other.dim() > 0:\n        other = other.view_as(other)\n", ""))
    with tsfuser.fuser():
        for _ in range(4):
            given = x.clone().requires_grad_(), m.clone(), v.clone(), m.clone(), v.clone()
            scripted(*given)
        graph = scripted.graph_for(*given)
    assert len(graph.findAllNodes("prim::DifferentiableGraph", True)) == 1
