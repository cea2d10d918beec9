"""Loops whose result is read together with what they read themselves: torch's interpreter would run them
after it has taken the other operand (csrc_stubs/torchscript/loop_ends.cpp)."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import script

pytestmark = pytest.mark.graphs

LATER = "e = x\n    for i in range(n):\n        e = e - x"
LOOP = "b = a\n    for i in range(n):\n        b = b - a"
#: What makes b of a.
PROGRAMS = {
    "a loop": LOOP,
    "two loops": f"{LOOP}\n    for i in range(n):\n        b = b * a",
    "a loop in a loop": "b = a\n    for i in range(n):\n        for j in range(n):\n            b = b - a",
    "a loop in a branch": "b = a\n    if n > 1:\n        for i in range(n):\n            b = b - a",
    "two results": "b, c = a, a\n    for i in range(n):\n        b, c = b - a, c + b * a\n    b = b * c",
    "a loop with an end": f"{LOOP}\n        if i > 3:\n            break",
}


@pytest.mark.parametrize("read", ["a + b", "b + a", "torch.max(a, b)", "torch.mm(a, b) - b", "a + b.sin()"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("leaf", [False, True])
def test_values(program, read, leaf):
    text = f"def f(x, n: int):\n    a = x * 0.5\n    {PROGRAMS[program]}\n    d = {read}\n    {LATER}\n"
    text += "    return d, e\n"
    scripted, eager = script(text), plain(text)
    with tsfuser.fuser():
        for n in (2, 2, 2, 3, 9, 0):
            x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_(leaf)
            found, expected = scripted(x, n), eager(x, n)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
            if leaf:
                gradients = [torch.autograd.grad(sum(t.sum() for t in ts), x) for ts in (found, expected)]
                torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)
