"""Loops over sizes that become one op (csrc_stubs/torchscript/products.cpp), and those that stay."""

import pytest
import torch

import tsfuser
from kit.support import all_graphs, script

LOOP = """
def rest(x):
    sizes = x.size()
    n = sizes[0]
    for i in range(len(sizes) - 2):
        n *= sizes[i + 2]
    return torch.tanh(x * 2.0) * n
"""


def kinds(scripted):
    return {n.kind() for graph in all_graphs(scripted) for n in graph.findAllNodes("prim::Loop", True)} | {
        n.kind() for graph in all_graphs(scripted) for n in graph.findAllNodes("tsfuser::product_from", True)
    }


def run(function, inputs):
    with tsfuser.fuser():
        return [function(x) for x in inputs]


def agrees(source, device):
    inputs = [torch.randn(sizes, device=device) for sizes in ((2, 3, 4, 5), (2, 3, 4, 5), (3, 4, 2, 7))]
    function = script(source)
    plain = script(source)
    expected = [plain(x) for x in inputs]
    for actual, wanted in zip(run(function, inputs), expected):
        torch.testing.assert_close(actual, wanted)
    return function


def test_a_loop_that_multiplies_sizes_is_one_op(device):
    assert kinds(agrees(LOOP, device)) == {"tsfuser::product_from"}


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (2, 3, 1), (0, 3, 4), (2, 3, 4, 5, 6)], ids=str)
def test_any_rank(sizes):
    x = torch.randn(sizes)
    torch.testing.assert_close(run(script(LOOP), [x] * 3)[-1], script(LOOP)(x))


@pytest.mark.parametrize(
    "old, new",
    [
        ("n *= sizes[i + 2]", "n += sizes[i + 2]"),
        ("len(sizes) - 2", "len(sizes) - 3"),
        ("n *= sizes[i + 2]", "n *= sizes[i + 2] + 1"),
        ("n *= sizes[i + 2]", "n *= sizes[2 * i]"),
        ("    n = sizes[0]", "    n = sizes[0]\n    sizes.append(n)"),
    ],
)
def test_other_loops_stay(old, new):
    assert old in LOOP
    assert kinds(agrees(LOOP.replace(old, new), "cpu")) == {"prim::Loop"}


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3)

    def forward(self, x):
        return torch.relu(self.norm(x) + 1.0)


def test_batch_norm_refuses_one_value_a_channel_as_eager_does():
    torch.manual_seed(0)
    module = Normed()
    scripted = torch.jit.script(module)
    for _ in range(4):
        run(scripted, [torch.randn(2, 3, 4, 5, requires_grad=True)])
    assert not kinds(scripted)
    one = torch.randn(1, 3, 1, 1)
    message = "Expected more than 1 value per channel when training, got input size"
    with pytest.raises(ValueError, match=message):
        module(one)
    with pytest.raises(torch.jit.Error, match=message):
        run(scripted, [one])
    assert run(scripted, [torch.randn(2, 3, 1, 1)])[0].shape == (2, 3, 1, 1)
    scripted.eval()
    assert run(scripted, [one])[0].shape == (1, 3, 1, 1)
