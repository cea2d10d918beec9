"""Joint graphs and lists that the program writes to."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.support import fresh
from tsfuser import _C

pytestmark = pytest.mark.graphs


@pytest.fixture(autouse=True)
def joint_graphs():
    before = _C.use_joint_functions(True)
    yield
    _C.use_joint_functions(before)


def grown_in_a_loop(x: Tensor, w: Tensor):
    parts = [x, torch.tanh(x * w)]
    return torch.stack([part.view(part.size(0), -1) for part in parts], 1).tanh() * x.mean()


def grown_in_a_branch(x: Tensor, w: Tensor):
    numbers: list[int] = []
    y = torch.tanh(x * w) * 2.0
    if x.size(0) > 1:
        numbers.append(x.size(0))
    return y * float(len(numbers))


@pytest.mark.parametrize("program", [grown_in_a_loop, grown_in_a_branch], ids=lambda f: f.__name__)
def test_each_call_begins_with_lists_of_its_own(program):
    x, w = torch.rand(3, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    scripted = fresh(program)
    expected = program(x, w)
    wanted = torch.autograd.grad(expected.sum(), (x, w))
    with tsfuser.fuser():
        for _ in range(4):
            result = scripted(x, w)
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(torch.autograd.grad(result.sum(), (x, w)), wanted)
