"""The bias of linear and conv2d as an addition in a group, where an option asks for it."""

import pytest
import torch

from kit.support import all_graphs, assert_matches, fuse, groups, kinds
from tsfuser import options

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]


def linear(x, w, b):
    return torch.relu(torch.nn.functional.linear(x, w, b)) * 2.0


def convolution(x, w, b):
    return torch.relu(torch.nn.functional.conv2d(x, w, b, padding=1)) * 2.0


CASES = {
    "linear_decomposition": (linear, (2, 3, 4, 8), (5, 8), (5,)),
    "conv_decomposition": (convolution, (2, 3, 4, 4), (5, 3, 3, 3), (5,)),
}


@pytest.mark.parametrize("word", CASES)
def test_the_bias_joins_the_group_when_asked(device, word):
    function, *shapes = CASES[word]
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    expected = function(*inputs)
    with options.override(enable={word: ""}):
        scripted = fuse(function, *inputs)
    (group,) = groups(scripted)
    assert kinds(group).count("aten::add") == 1 and "aten::relu" in kinds(group)
    assert_matches(scripted(*inputs), expected, function(*(x.double() for x in inputs)), ops=30)
    other = [torch.randn(3, *x.shape[1:], device=device) if x.dim() == 4 else x for x in inputs]
    if word == "linear_decomposition":
        assert_matches(scripted(*other), function(*other), ops=30)
    unasked = fuse(function, *inputs)
    assert "aten::add" not in kinds(groups(unasked)[0])


@pytest.mark.parametrize("word", CASES)
def test_channels_last_and_half_stay_what_they_are(device, word):
    function, *shapes = CASES[word]
    inputs = [torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes]
    inputs[0] = inputs[0].to(memory_format=torch.channels_last)
    with options.override(enable={word: ""}):
        scripted = fuse(function, *inputs)
    expected = function(*inputs)
    exact = function(*(x.double() for x in inputs))
    assert_matches(scripted(*inputs), expected, exact, ops=30)


def test_a_linear_of_three_dims_and_one_without_a_bias_stay(device):
    def plain(x, w):
        return torch.relu(torch.nn.functional.linear(x, w)) * 2.0

    with options.override(enable={"linear_decomposition": ""}):
        three = fuse(linear, *(torch.randn(s, device=device) for s in ((2, 4, 8), (5, 8), (5,))))
        without = fuse(plain, *(torch.randn(s, device=device) for s in ((2, 3, 4, 8), (5, 8))))
    for scripted in (three, without):
        assert any(g.findAllNodes("aten::linear", True) for g in all_graphs(scripted))
