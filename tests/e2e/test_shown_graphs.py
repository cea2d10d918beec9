"""`graph_for` and `last_executed_optimized_graph` of functions that branch on flags and sizes: the copy that
the call runs, with its groups, guards and differentiable graphs, as regression tests of nvFuser's time look
for them. And the exceptions of such functions are those of TorchScript without us."""

import pytest
import torch
from torch.testing import FileCheck

import tsfuser
from kit.support import fresh, script

pytestmark = pytest.mark.graphs

GUARD, GROUP, DIFFERENTIABLE = "prim::CudaFusionGuard", "prim::CudaFusionGroup", "prim::DifferentiableGraph"


def branches(x, weight, bias, flag: bool):
    if flag:
        o = torch.nn.functional.linear(x, weight, bias)
        o = torch.relu(o + 1.0)
    else:
        o = x.sum()
        o = torch.sigmoid(o + 2.0)
    return o * 0.5


def sizes(x):
    y = torch.tanh(x) * 2.0
    if x.size(0) > 4:
        y = torch.exp(y) + 1.0
    return y - 3.0


@pytest.fixture(autouse=True)
def fused():
    with tsfuser.fuser():
        yield


def given(device, requires_grad=False):
    shapes = ((4, 2), (3, 2), (3,))
    return [torch.randn(shape, device=device, requires_grad=requires_grad) for shape in shapes]


def count(graph, kind):
    """The nodes of that kind in the graph's blocks, but not in its subgraphs."""
    return len(graph.findAllNodes(kind, True))


def ops(graph):
    """The kinds of the ops in the groups of the graph, and outside of groups."""
    subgraphs = [node.g("Subgraph") for node in graph.findAllNodes(GROUP, True)]
    return {node.kind() for each in (graph, *subgraphs) for node in each.nodes()}


@pytest.mark.parametrize("first", [True, False])
def test_graph_for_shows_the_branch_that_a_call_takes(device, first):
    scripted, operands = fresh(branches), given(device)
    for flag in (first, not first):
        for _ in range(2):
            scripted(*operands, flag)
        graph = scripted.graph_for(*operands, flag)
        FileCheck().check(GUARD).check(GROUP).run(graph)
        assert count(graph, GUARD) == count(graph, GROUP) > 0 and count(graph, "prim::If") == count(
            graph, GUARD
        )
    taken, other = (ops(scripted.graph_for(*operands, flag)) for flag in (True, False))
    assert "aten::relu" in taken and "aten::relu" not in other
    assert "aten::sigmoid" in other and "aten::sigmoid" not in taken


def test_graph_for_shows_what_sizes_decide(device):
    scripted = fresh(sizes)
    small, large = torch.randn(3, 5, device=device), torch.randn(8, 5, device=device)
    for x in (small, large):
        for _ in range(2):
            scripted(x)
    assert "aten::exp" not in ops(scripted.graph_for(small))
    assert "aten::exp" in ops(scripted.graph_for(large))
    assert "aten::exp" in ops(
        scripted.graph_for(torch.randn(9, 5, device=device))
    )  # a size that it never saw


def test_graph_for_shows_differentiable_graphs_with_their_groups(device):
    scripted, operands = fresh(branches), given(device, requires_grad=True)
    for _ in range(5):
        scripted(*operands, True).sum().backward()
    graph = scripted.graph_for(*operands, True)
    parts = [node.g("Subgraph") for node in graph.findAllNodes(DIFFERENTIABLE, True)]
    assert parts and sum(count(part, GROUP) for part in parts) > 0
    with torch.no_grad():
        inference = scripted.graph_for(*operands, True)
    assert count(inference, DIFFERENTIABLE) == 0 and count(inference, GROUP) > 0


class Module(torch.nn.Module):
    def __init__(self, shifted: bool):
        super().__init__()
        self.shifted = shifted
        self.scale = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, x, flag: bool = True):
        y = torch.sigmoid(x * self.scale)
        if self.shifted and flag:
            y = torch.exp(y) + 1.0
        return y * 3.0


def test_graph_for_of_modules_takes_arguments_by_name_and_by_default(device):
    x = torch.randn(4, 5, device=device)
    module = torch.jit.script(Module(True)).to(device)
    with torch.no_grad():
        for flag in [True, False] * 4:
            module(x, flag=flag)
        assert "aten::exp" in ops(module.graph_for(x))
        assert "aten::exp" not in ops(module.graph_for(x, flag=False))


def test_the_last_executed_graph_is_the_copy_that_ran(device):
    scripted, operands = fresh(branches), given(device)
    for flag in [True, False] * 4:
        scripted(*operands, flag)
    for flag in (True, False):
        scripted(*operands, flag)
        for last in (torch.jit.last_executed_optimized_graph, torch._C._last_executed_optimized_graph):
            assert ("aten::relu" in ops(last())) == flag and count(last(), GROUP) > 0


def test_graph_for_calls_nothing_once_the_copy_is_optimised(device, capfd):
    scripted = script(
        "def f(x: Tensor, flag: bool):\n    y = torch.relu(x) + 1.0\n"
        "    if flag:\n        y = y.exp() * 2.0\n"
        "    print('called')\n    return y * 3.0\n"
    )
    x = torch.randn(4, device=device)
    for _ in range(6):
        scripted(x, True)
    capfd.readouterr()
    scripted.graph_for(x, True)
    assert capfd.readouterr().out == ""


RAISING = """
def inner(x: Tensor):
    return x.view(7, 100)

def f(x: Tensor, flag: bool, n: int):
    y = x * 2.0
    if flag:
        y = torch.relu(y) + 1.0
    if n > 3:
        y = inner(y)
    if n < 0:
        raise ValueError("negative n")
    return y * 3.0
"""


@pytest.mark.parametrize("n", [5, -1], ids=["an op", "the program"])
def test_exceptions_are_those_without_fusion(device, n):
    x = torch.randn(4, 5, device=device)
    scripted, plain = script(RAISING), script(RAISING)
    for _ in range(5):
        scripted(x, True, 1)
    for _ in range(4):  # new facts, then known ones
        errors = []
        for function, fuser in ((scripted, "fuser2"), (plain, "fuser0")):
            with torch.jit.fuser(fuser), pytest.raises(Exception) as error:
                function(x, True, n)
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]
