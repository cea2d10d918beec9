"""Inputs that a joint graph's forward saves copies of, instead of larger values (tsfuser/joint/copies.py)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.derivatives import built
from kit.opsweep import plain
from kit.support import fresh, script
from tsfuser.joint.passes import divide

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor):
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.35
    return torch.matmul(F.softmax(scores.float() + mask, -1).to(torch.bfloat16), v)


def operands(device="cpu"):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 40, 8, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    mask = torch.zeros(40, 40, device=device).masked_fill(torch.ones(40, 40, device=device).triu(1) > 0, -9.0)
    return [t.requires_grad_() for t in (q, k, v)], mask


def kinds(graph):
    return [node.kind().partition("::")[2] for node in graph.nodes() if node.kind().startswith("aten::")]


def test_a_mask_is_copied_and_the_scores_are_saved_in_16_bits():
    given, mask = operands()
    _, joint = built(attended, [t.detach() for t in (*given, mask)], (True, True, True, False))
    parts = divide(joint)
    made = list(parts.forward.outputs())
    saved = [str(made[i].type().dtype()) for i in parts.saved_outputs if made[i].type().dim() == 3]
    assert saved.count("torch.float32") == 0 and saved.count("torch.bfloat16") >= 1
    assert kinds(parts.forward).count("clone") == 1 and "softmax" in kinds(parts.backward)
    assert 3 not in parts.saved_inputs


def test_nothing_is_copied_where_that_saves_nothing():
    x, b = torch.randn(6, 8), torch.randn(8)
    for call in (lambda x, b: torch.relu(x + b), lambda x, b: torch.sin(x * b), lambda x, b: x * 2 + b):
        parts = divide(built(call, [x, b], (True, True))[1])
        assert "clone" not in kinds(parts.forward)


def test_the_program_may_write_to_what_is_copied(device):
    (q, k, v), mask = operands(device)
    scripted = fresh(attended)
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (scripted, attended):
                own = mask.clone()
                y = function(q, k, v, own)
                own.fill_(5.0)
                found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), (q, k, v))])
            torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("op", ["x.reshape(-1)", "x.flatten()", "x.contiguous()"])
def test_an_input_that_a_reshape_copies_may_be_written_to(op):
    """Eager saves the copy."""
    text = f"def f(x: Tensor):\n    return {op}.square().sin()\n"
    scripted, eager = script(text), plain(text)
    found = []
    with tsfuser.fuser():
        for function in (*[scripted] * 4, eager):
            x = torch.linspace(0, 1, 12).view(3, 4).t().requires_grad_()
            y = function(x)
            with torch.no_grad():
                x.add_(1)
            found.append(torch.autograd.grad(y.sum(), x)[0])
    for got in found[:-1]:
        torch.testing.assert_close(got, found[-1])
