"""Costly values of few elements are stored before they are read often (`segment/tables.py`), here of any
size; choices of rows are branches. Values are eager's on every target."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.compiled_models import Rotary
from kit.support import assert_matches, counted, fuse, no_fallback
from tsfuser.segment import tables

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error")]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    torch.manual_seed(11)
    monkeypatch.setattr(tables, "WORTH_A_TABLE", 1)
    monkeypatch.setattr(tables, "FEWER", 1)


class Attention(nn.Module):
    """Queries and keys of one linear layer, both rotated; the gradient of the layer's result has their
    gradients side by side."""

    def __init__(self, heads=3, width=8):
        super().__init__()
        self.heads, self.width = heads, width
        self.register_buffer("rates", 1.0 / 100 ** (torch.arange(0, width, 2) / width))

    def rotated(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, qkv):
        n, t, width = qkv.size(0), qkv.size(1), self.heads * self.width
        angles = torch.arange(t, device=qkv.device)[:, None] * self.rates
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().type_as(qkv), angles.sin().type_as(qkv)
        q, k, v = (y.view(n, t, self.heads, self.width).transpose(1, 2) for y in qkv.split(width, -1))
        return self.rotated(q, cos, sin), self.rotated(k, cos, sin), v * 2.0


def step(function, x):
    """Outputs of a step of training, and the gradient of `x`."""
    x = x.clone().requires_grad_()
    out = function(x)
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in out]
    torch.autograd.backward(out, [w.to(o.device, o.dtype) for w, o in zip(weights, out)])
    return [*(o.detach() for o in out), x.grad]


def assert_steps_match(model, x, ops):
    compiled = torch.compile(model, backend="tsfuser", dynamic=False)
    exact = copy.deepcopy(model).double()
    with no_fallback():
        actual = step(compiled, x)
    for ours, plain, reference in zip(actual, step(model, x), step(exact, x.double())):
        assert_matches(ours, plain, reference, ops)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, width", [(8, 8), (5, 6), (7, 64)])
def test_attention_with_rotary_embedding(tokens, width, dtype, device):
    model = Attention(3, width).to(device)
    assert_steps_match(model, torch.randn(2, tokens, 9 * width, device=device, dtype=dtype), 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, width", [(9, 8), (3, 10)])
def test_rotary_embedding_with_a_trained_scale(tokens, width, dtype, device):
    model = Rotary(width).to(device)
    assert_steps_match(model, torch.randn(2, 3, tokens, width, device=device, dtype=dtype), 40)


class Interleaved(nn.Module):
    """Rotary embedding with neighbours as coordinates."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("rates", 1.0 / 100 ** (torch.arange(0, width, 2) / width))

    def forward(self, x):
        angles = torch.arange(x.size(2), device=x.device)[:, None] * self.rates
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, width", [(9, 8), (3, 10), (2, 64)])
def test_interleaved_rotary_embedding(tokens, width, dtype, device):
    model = Interleaved(width).to(device)
    assert_steps_match(model, torch.randn(2, 3, tokens, width, device=device, dtype=dtype), 40)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_values_side_by_side(count, dtype, device):
    x = torch.randn(5, 7, device=device, dtype=dtype)

    class Stacked(nn.Module):
        def forward(self, x):
            return torch.stack([x * (k + 1.0) + k for k in range(count)], -1) * 0.5

    assert_steps_match(Stacked(), x, 40)


def tabled(x, angles):
    return x * angles.sin() + angles.cos()


def in_a_softmax(x, angles):
    return torch.softmax(x * angles.sin(), -1)


def summed(x, angles):
    return (x * angles.cos()).sum((0, 1))


def powers(x, angles):
    return x * (angles * (angles[:1].abs() + 1.0).pow(0.7)).sin()


@pytest.mark.each_value(("program", "sizes"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (2, 16, 64), (4, 4, 8), (2, 0, 4)])
@pytest.mark.parametrize(
    "program, kernels",
    [(tabled, 2), (in_a_softmax, 2), (summed, 2), (powers, 3)],
    ids=["tabled", "in_a_softmax", "summed", "powers"],
)
def test_values_and_kernels(program, kernels, sizes, dtype, device):
    x = torch.randn(sizes, device=device, dtype=dtype)
    angles = torch.randn(sizes[1:], device=device, dtype=dtype) * 3
    with no_fallback():
        scripted = fuse(program, x, angles)
        # inside, as the unfused path, which tensors without elements take, is NNC's outside: on CUDA its
        # kernel for bfloat16 does not compile in torch 2.11
        with tsfuser.fuser(), counted() as rise:
            fused = scripted(x, angles)
    assert x.numel() == 0 or rise["launches"] == kernels
    assert_matches(fused, program(x, angles), program(x.double(), angles.double()), 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns", [(8, 64), (3, 5), (4, 6)])
def test_a_choice_of_rows(rows, columns, dtype, device):
    def program(x, y, z):
        costly = torch.cat((x.exp().tanh(), y.abs().log1p().atan(), z), 1)
        return costly * 2.0 + torch.cat((y, x, z.sigmoid().exp()), 1)

    x, y, z = (torch.randn(4, rows, columns, device=device, dtype=dtype) for _ in range(3))
    with no_fallback():
        fused = fuse(program, x, y, z)(x, y, z)
    assert_matches(fused, program(x, y, z), program(x.double(), y.double(), z.double()), 60)
