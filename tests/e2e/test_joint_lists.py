"""Joint graphs and lists: those that the program writes to, and those that ops join."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed, leaves
from kit.opsweep import plain
from kit.support import fresh, script

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


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


JOINS = [
    "torch.cat([x, w], 0)[2:4].sin()",
    "torch.stack([x * w, w]).sum(0).exp()",
    "torch.cat([x.sin(), w], -1)[:, 1:].square() * 0.5",
]


@pytest.mark.parametrize("text", JOINS)
def test_second_derivatives_by_what_is_joined(text):
    """Of values that the forward saves."""
    source = f"def f(x: Tensor, w: Tensor):\n    return {text}\n"
    scripted, eager = script(source), plain(source)

    def second(function):
        x, w = (torch.linspace(0.5, 2, 12, dtype=torch.float64).view(3, 4).requires_grad_() for _ in range(2))
        first = torch.autograd.grad(function(x, w).sum(), (x, w), create_graph=True)
        total = sum(each.square().sum() for each in first)
        return torch.autograd.grad(total, (x, w))

    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(second(scripted), second(eager))


def test_a_program_that_begins_with_a_list_it_fills():
    """The first call does that twice."""

    def filled(x: Tensor):
        parts: list[Tensor] = []
        parts.append(x.sin())
        parts.append(x * 3)
        return torch.stack(parts, 1) * 2

    (x,) = leaves((3, 4))
    scripted = fresh(filled)
    with tsfuser.fuser():
        for _ in range(4):
            y = scripted(x)
            torch.testing.assert_close(y, filled(x))
            found = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad(filled(x).sum(), x))
    assert is_packed(scripted, x)
