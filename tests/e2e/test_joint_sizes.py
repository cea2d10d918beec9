"""Sums of gradients to the sizes of operands that were not broadcast, and work that is done once."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed, leaves
from kit.support import ROOT, fresh
from tsfuser import _C
from tsfuser.graph.copied_reshapes import SUMMED
from tsfuser.joint.reverse import reverse
from tsfuser.joint.sizes import drop_idle_sums

pytestmark = pytest.mark.usefixtures("joint_graphs")


def sums(text, mask):
    joint = reverse(torch._C.parse_ir(text), mask)
    drop_idle_sums(joint)
    return len(joint.graph.findAllNodes(SUMMED, True))


CHAIN = """graph(%x : Float(*, *, device=cpu), %w : Float(*, device=cpu)):
  %0 : Tensor = aten::sin(%x)
  %1 : Tensor = aten::mul(%0, %w)
  %2 : Tensor = aten::tanh(%1)
  %3 : Tensor = aten::mul(%2, %w)
  %4 : Tensor = aten::mul(%3, {})
  return (%4)"""


@pytest.mark.graphs
@pytest.mark.parametrize("last, kept", [("%2", 1), ("%1", 1), ("%0", 2), ("%x", 2)])
def test_only_an_op_that_may_have_broadcast_has_its_gradient_summed(last, kept):
    """An operand is as large as the result once it has met all that the result is made of."""
    assert sums(CHAIN.format(last), [True, False]) == kept


@pytest.mark.graphs
def test_a_result_of_a_product_has_sizes_of_its_own():
    text = """graph(%x : Float(*, *, device=cpu), %w : Float(*, *, device=cpu)):
      %0 : Tensor = aten::mm(%x, %w)
      %1 : Tensor = aten::mul(%0, %x)
      return (%1)"""
    assert sums(text, [False, True]) == 1


def chain(x: Tensor, w: Tensor):
    y = torch.sin(x) * w
    return torch.tanh(y) * w * y


@pytest.mark.parametrize("sizes", [(4, 3), (1, 3), (4, 1), (1, 1)])
def test_gradients_of_smaller_operands_are_summed(device, sizes):
    x, w = leaves(sizes, (3,), device=device)
    scripted = fresh(chain)
    with tsfuser.fuser():
        for _ in range(4):
            made = torch.autograd.grad(scripted(x, w).sum(), (x, w))
        assert is_packed(scripted, x, w)
    torch.testing.assert_close(made, torch.autograd.grad(chain(x, w).sum(), (x, w)))


def calls_of(setter, scripted, given):
    """How often the callback is called while a program trains."""
    count = []
    before = setter(None)
    setter(lambda *arguments: count.append(1) or before(*arguments))
    try:
        with tsfuser.fuser():
            for _ in range(4):
                torch.autograd.grad(scripted(*given).sum(), given[:1])
    finally:
        setter(before)
    return len(count)


@pytest.mark.parametrize(
    "callback, expected", [("set_differentiable", 0), ("set_regions", 1), ("set_joint", 1)]
)
def test_a_program_that_autodiff_knows_is_differentiated_once(device, callback, expected):
    assert calls_of(getattr(_C, callback), fresh(chain), leaves((4, 3), (3,), device=device)) == expected


def test_the_first_step_imports_no_sympy():
    """Python formulas of torch for tensors without memory would."""
    program = """
import sys, torch, tsfuser
from tsfuser import _C
_C.use_joint_functions(True)
from torch import nn
layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
model, x = torch.jit.script(nn.Sequential(*layers, nn.LayerNorm(3), nn.Softmax(-1))), torch.rand(2, 3, 4, 4)
casts = torch.jit.CompilationUnit("def f(x):\\n    return (x.to(torch.float16) * 2).float().sum()\\n").f
text = "def f(q, k, v):\\n    return torch.softmax((q * 2) @ k.transpose(-1, -2), -1) @ v\\n"
attention = torch.jit.CompilationUnit(text).f
w = torch.rand(3, requires_grad=True)
heads = [torch.rand(2, 4, 5, requires_grad=True) for _ in range(3)]
with tsfuser.fuser():
    for _ in range(4):
        model(x).sum().backward()
        casts(w).backward()
        attention(*heads).sum().backward()
        attention(*(t.detach()[None].requires_grad_() for t in heads)).sum().backward()
print(*(name for name in ("sympy", "torch._dynamo") if name in sys.modules))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
    )
    assert made.stdout.strip() == ""
