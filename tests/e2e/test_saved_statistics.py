"""Scripted training in 16 bits: norms take statistics of the values that the forward saves. A row of two
elements has no gradient behind a norm; with statistics of other numbers than the saved ones it gets one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.support import CALLS, fresh

pytestmark = [pytest.mark.usefixtures("fused_or_error")]


def layer(x: Tensor, b: Tensor, w: Tensor):
    h = (x + b) * 1.0
    return h, F.layer_norm(h, [2], w, w).sin()


def inside(x: Tensor, b: Tensor, w: Tensor):
    """The saved value is no result of the program."""
    h = torch.relu((x + b) * 1.0)
    return h * 2.0, F.layer_norm(h, [2], w, w).sin()


def behind_views(x: Tensor, b: Tensor, w: Tensor):
    h = (x + b) * 1.0
    return h, F.layer_norm(h.reshape(4, 2, 2).transpose(0, 1), [2], w, w).sin()


def joined(x: Tensor, b: Tensor, w: Tensor):
    h = (x + b) * 1.0
    return h, F.layer_norm(torch.cat([h, h]), [2], w, w).sin()


@pytest.mark.parametrize("program", [layer, inside, behind_views, joined], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_two_elements_has_no_gradient(device, dtype, program):
    large = 1024.0 if dtype is torch.float16 else 256.0
    w = torch.ones(2, device=device, dtype=dtype if device == "cuda" else torch.float32)
    x = torch.tensor([[0.6, 2.4]] * 8, device=device, dtype=dtype, requires_grad=True)
    b = torch.full((2,), large, device=device, dtype=dtype)
    scripted = fresh(program)
    for function in (program, scripted):
        with tsfuser.fuser():
            for _ in range(CALLS):
                y = function(x, b, w)[1]
                (found,) = torch.autograd.grad(y[..., 0].sum(), x)
        assert found.abs().max() < 1e-3
