"""The gradient of a bias, a sum over all dims but the last, is in the group that computes what is summed."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs, assert_matches, fresh, groups, kinds, train

pytestmark = pytest.mark.graphs


def block(x, weight, bias, scale, other):
    """The result of a linear turned into channels second, as at the end of a block of ConvNeXt."""
    return F.linear(x, weight, bias).permute(0, 3, 1, 2) * scale + other


def inputs_of(device, dtype, batch=2, trained=("x", "weight", "bias", "scale", "other")):
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (batch, 3, 4, 6), "weight": (5, 6), "bias": (5,), "scale": (5, 1, 1)}
    shapes["other"] = (batch, 5, 3, 4)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["other"] = made["other"].to(memory_format=torch.channels_last)
    return [value.to(device, dtype).requires_grad_(name in trained) for name, value in made.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_sum_behind_a_view_is_in_the_group_that_computes_the_gradient(device, dtype):
    inputs = inputs_of(device, dtype)
    with tsfuser.fuser():
        scripted = fresh(block)
        out, gradients = train(scripted, inputs)
        empty = inputs_of(device, dtype, batch=0)
        _, of_nothing = train(scripted, empty, calls=1)
    sums = [graph for graph in all_graphs(scripted) if "aten::_grad_sum_to_size" in outside_of_groups(graph)]
    assert not sums, sums
    summing = [kinds(group).count("aten::_grad_sum_to_size") for group in groups(scripted)]
    # of the bias and of the scale, in one group of the backward; a joint graph sums all to sizes of calls
    assert sorted(summing) == [0, 5 if by_joint_graphs() else 2]
    expected, wanted = train(block, inputs, calls=1)
    double = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_gradients = train(block, double, calls=1)
    assert_matches(out, expected, exact, ops=20)
    for mine, plain, reference in zip(gradients, wanted, exact_gradients, strict=True):
        assert_matches(mine, plain, reference, ops=60, strides=False)
    for mine, plain in zip(of_nothing, train(block, empty, calls=1)[1], strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("trained", [("x", "weight", "other"), ("x", "bias", "scale"), ("bias",)], ids=str)
def test_only_what_requires_a_gradient_gets_one(device, trained):
    inputs = inputs_of(device, torch.float32, trained=trained)
    with tsfuser.fuser():
        _, gradients = train(fresh(block), inputs)
    for mine, plain in zip(gradients, train(block, inputs, calls=1)[1], strict=True):
        assert_matches(mine, plain, ops=60, strides=False)


def outside_of_groups(graph):
    """The kinds of the nodes of the graph and of its blocks that are in no group and no fallback."""
    found, waiting = set(), [graph]
    while waiting:
        for node in waiting.pop().nodes():
            found.add(node.kind())
            waiting += node.blocks()
    return found
