"""Joint graphs of programs with ops in place: results and gradients are eager's."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed
from kit.opsweep import plain
from kit.support import fresh, script, train

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


def test_a_sum_that_is_cast_to_the_dtype_of_what_it_is_written_to():
    def written(x: Tensor, w: Tensor):
        y = x * 2
        y.add_(w)
        y.mul_(w)
        return torch.sin(y)

    x, w = torch.rand(4, 6).bfloat16().requires_grad_(), torch.rand(4, 6, requires_grad=True)
    scripted = fresh(written)
    with tsfuser.fuser():
        result, found = train(scripted, [x, w])
    expected, wanted = train(written, [x, w])
    torch.testing.assert_close((result, *found), (expected, *wanted), rtol=0.03, atol=0.03)
    assert is_packed(scripted, x, w)


def test_a_sum_of_bools_and_nothing_is_written_to_behind_the_region():
    """It is a tensor of integers."""
    text = "def f(x, w):\n    y = x * w\n    n = (w > 0.5) + 0\n    n.square_()\n    return y.sin(), n\n"
    scripted, eager = script(text), plain(text)
    x, w = torch.rand(6).requires_grad_(), torch.rand(6)
    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(scripted(x, w), eager(x, w))
    assert is_packed(scripted, x, w)
