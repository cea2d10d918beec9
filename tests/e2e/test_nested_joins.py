"""A join of an earlier join's operands, and more, reads that join's result (csrc_stubs/torchscript/
nested_joins.cpp)."""

import pytest
import torch

import tsfuser
from kit.nearness import difference
from kit.support import CALLS, all_graphs, script

pytestmark = [pytest.mark.graphs, pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

STEPS = 20  # ops one behind the other, in a program of five joins


def growing(count, between=""):
    """A program that joins `count` times what it has by then, with a branch that follows from a number."""
    lines = ["def f(x, w, k: int):", "    features = [x * 2 + 0.5]"]
    for n in range(count):
        lines += [f"    y{n} = torch.cat(features, 1)", *between.format(n=n).split("; ")]
        lines += [f"    new{n} = torch.sin(y{n} * w).sum(1, keepdim=True)"]
        lines += [f"    if k > {n}:", f"        new{n} = new{n} * 2", f"    features.append(new{n})"]
    lines += ["    return torch.cat(features, 1) * 0.5"]
    indented = [line if line.startswith(("def", "    ")) else f"    {line}" for line in lines if line]
    return "\n".join([*indented, ""])


def run(function, x, w, k, trained):
    x, w = (t.clone().requires_grad_(trained) for t in (x, w))
    with torch.set_grad_enabled(trained):
        y = function(x, w, k)
    if not trained:
        return [y]
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return [y.detach(), *torch.autograd.grad(y, (x, w), gradient)]


def compared(source, device, trained):
    """The scripted program, once it has run fused and been compared with eager."""
    eager, scripted = {"torch": torch}, script(source)
    exec(source, eager)
    torch.manual_seed(4)
    x, w = torch.randn(3, 2, device=device), torch.randn(3, 1, device=device) * 0.1
    with tsfuser.fuser():
        for k in (2, 0):
            for _ in range(CALLS):
                found, plain = run(scripted, x, w, k, trained), run(eager["f"], x, w, k, trained)
                exact = run(eager["f"], x.double(), w.double(), k, trained)
                for mine, theirs, right in zip(found, plain, exact):
                    assert difference(mine, theirs, right, STEPS, scale=right.abs().max().item()) is None
    return scripted


def joined(scripted):
    """How many tensors each join in a group has."""
    groups = [g for graph in all_graphs(scripted) for g in graph.findAllNodes("prim::CudaFusionGroup", True)]
    joins = [node for g in groups for node in g.g("Subgraph").findAllNodes("aten::cat")]
    return [node.inputsAt(0).node().inputsSize() for node in joins]


def test_in_training_each_join_reads_the_one_before(device):
    counts = joined(compared(growing(5), device, trained=True))
    assert counts.count(2) >= 5 and max(counts) == 2


def test_in_inference_only_joins_of_more_tensors_than_a_group_takes(device):
    most = tsfuser.ops.joins.MAX_IN_MEMORY
    assert max(joined(compared(growing(3), device, trained=False))) == 4
    counts = joined(compared(growing(most + 3), device, trained=False))
    assert max(counts) == most and counts.count(2) > 2


LEFT = {
    "a tensor is written to": "features[0].add_(1)",
    "the result is written to": "y{n}.mul_(2)",
    "another tensor of the memory is written to": "features[0].t().mul_(2)",
    "they are joined along another dim": "z{n} = torch.cat(features[:1], 0).sum(); w = w + z{n}",
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("between", LEFT.values(), ids=LEFT)
def test_what_changes_in_between(device, between, trained):
    if trained and between.startswith("y"):
        between += "; y{n} = y{n} * 1"  # eager's sin has saved what is written to
    compared(growing(3, between), device, trained)


@pytest.mark.parametrize("trained", [False, True])
def test_whole_numbers_are_not_rounded_on_the_way(device, trained):
    def program(x, numbers, w, k: int):
        a, b, c = torch.sin(x), numbers + 1, w * 2
        y = torch.cat([a, b], 1)
        z = torch.tanh(y)
        if k > 1:
            z = z * 2
        return torch.cat([a, b, c], 1) * 2, z

    scripted = torch.jit.script(program)
    numbers = torch.tensor([[2**24 + 2], [5], [-(2**30) + 3]], device=device)
    with tsfuser.fuser():
        for _ in range(2 * CALLS):
            x = torch.randn(3, 2, device=device, requires_grad=trained)
            w = torch.randn(3, 1, device=device, dtype=torch.float64, requires_grad=trained)
            found, wanted = scripted(x, numbers, w, 2), program(x, numbers, w, 2)
            torch.testing.assert_close(found, wanted)
            assert torch.equal(found[0][:, 2], wanted[0][:, 2])
            if trained:
                gradients = [torch.autograd.grad(sum(t.sum() for t in ys), (x, w)) for ys in (found, wanted)]
                torch.testing.assert_close(*gradients)


def test_a_join_in_a_branch_that_may_not_run(device):
    def program(x, w, k: int):
        a, b, c = torch.tanh(x), torch.sin(x), torch.cos(x)
        y = a * w
        if k > 0:  # which follows: a copy for training is made
            y = torch.exp(y)
        if bool(x.sum() > 0):
            y = y + torch.cat([a, b], 1)[:, 1:3]
        return torch.cat([a, b, c], 1) * 2, y

    scripted = torch.jit.script(program)
    with tsfuser.fuser():
        for k in range(3 * CALLS):
            x = (torch.rand(3, 2, device=device) - k % 2).requires_grad_()
            w = torch.randn(3, 1, device=device)
            found, wanted = scripted(x, w, 1), program(x, w, 1)
            torch.testing.assert_close(found, wanted)
            gradients = [torch.autograd.grad(sum(t.sum() for t in ys), x)[0] for ys in (found, wanted)]
            torch.testing.assert_close(*gradients)
