"""Parts of well-known networks, written in plain torch: what people script.

`MODELS` names them; `build(name, size, device)` gives a module and the inputs of a call. Example:

    module, inputs = build("resnet_basic", "small", "cpu")
    torch.jit.script(module)(*inputs)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class Residual(nn.Module):
    """Layers and a shortcut around them, with ops in place as image models have them."""

    def __init__(self, inputs: int, outputs: int, stride: int, *layers: nn.Module):
        super().__init__()
        self.layers, self.relu = nn.Sequential(*layers), nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.layers(x)
        if self.shortcut is not None:
            identity = self.shortcut(x)
        out += identity
        return self.relu(out)


def basic_block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """Two 3x3 convolutions and a shortcut."""
    return Residual(
        inputs, outputs, stride,
        conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        conv3x3(outputs, outputs), nn.BatchNorm2d(outputs),
    )  # fmt: skip


def bottleneck(inputs: int, width: int, outputs: int, stride: int = 1) -> nn.Module:
    """1x1, 3x3 and 1x1 convolutions and a shortcut."""
    return Residual(
        inputs, outputs, stride,
        conv1x1(inputs, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        conv3x3(width, width, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        conv1x1(width, outputs), nn.BatchNorm2d(outputs),
    )  # fmt: skip


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward part, each with dropout, a residual and a layer norm after it."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.project(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(width // self.heads) + mask
        weights = self.dropout(torch.softmax(scores, -1))
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(n, length, width)
        x = self.norm1(x + self.dropout(self.merge(mixed)))
        hidden = self.dropout(F.gelu(self.grow(x)))
        return self.norm2(x + self.dropout(self.shrink(hidden)))


class Lstm(nn.Module):
    """A long short-term memory, cell by cell, over a sequence."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.from_input, self.from_hidden = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)
        self.width = width

    def forward(self, xs: Tensor) -> Tensor:
        hidden = torch.zeros(xs.size(1), self.width, dtype=xs.dtype, device=xs.device)
        cell = hidden
        for t in range(xs.size(0)):
            gates = self.from_input(xs[t]) + self.from_hidden(hidden)
            enter, forget, candidate, leave = gates.chunk(4, 1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
        return hidden


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.layers = nn.Sequential(
            conv3x3(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            conv3x3(outputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """One level of a U-Net: down, up by a transposed convolution, and the skip beside it."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.before, self.bottom = DoubleConv(inputs, width), DoubleConv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.after, self.head = DoubleConv(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.before(x)
        low = self.bottom(F.max_pool2d(skip, 2))
        out = self.after(torch.cat([skip, self.up(low)], 1))
        return torch.sigmoid(self.head(out))


class RmsNorm(nn.Module):
    """x over the root of its mean square, from primitives."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).type_as(x)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding: the halves of the last dim are the two coordinates."""
    left, right = x.chunk(2, -1)
    return x * cosines + torch.cat((-right, left), -1) * sines


class GptBlock(nn.Module):
    """Causal attention with rotary embedding, then SwiGLU, each behind an RMS norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = 8 * width // 3
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor) -> Tensor:
        n, length, width = x.shape
        q = self.query(x).view(n, length, self.heads, -1).transpose(1, 2)
        k = self.key(x).view(n, length, self.heads, -1).transpose(1, 2)
        v = self.value(x).view(n, length, self.heads, -1).transpose(1, 2)
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        scores = torch.matmul(q, k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        weights = torch.softmax(torch.where(mask, scores, -10000.0), -1)
        return self.merge(torch.matmul(weights, v).transpose(1, 2).reshape(n, length, width))

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cosines, sines, mask)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@dataclass(frozen=True)
class Model:
    """`make(*sizes)` gives the module, `call(*sizes)` the inputs of a call; `small` sizes for tests, `large`
    ones for a GPU. `second`: sizes of another call of the same module, for shapes never seen."""

    make: Callable
    call: Callable
    small: tuple[int, ...]
    large: tuple[int, ...]
    second: tuple[int, ...]


def _images(n: int, channels: int, side: int, *_: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, channels, side, side),)


def _sequence(n: int, length: int, width: int, heads: int) -> tuple[Tensor, ...]:
    mask = torch.zeros(n, 1, 1, length)
    mask[0, ..., -1] = -10000.0
    return torch.randn(n, length, width), mask


def _steps(n: int, length: int, width: int, _: int) -> tuple[Tensor, ...]:
    return (torch.randn(length, n, width),)


def _tokens(n: int, length: int, width: int, heads: int) -> tuple[Tensor, ...]:
    half = width // heads // 2
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    both = torch.cat((angles, angles), -1)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.randn(n, length, width), both.cos(), both.sin(), mask


MODELS: dict[str, Model] = {
    "resnet_basic": Model(
        lambda n, c, s: basic_block(c, c), _images, (2, 8, 6), (128, 64, 56), (3, 8, 5)
    ),
    "resnet_bottleneck": Model(
        lambda n, c, s: bottleneck(c, c // 4, 2 * c, 2), _images, (2, 8, 6), (64, 256, 56), (3, 8, 10)
    ),
    "encoder": Model(
        lambda n, t, w, h: EncoderLayer(w, h), _sequence, (2, 6, 16, 2), (32, 256, 1024, 16), (3, 10, 16, 2)
    ),
    "lstm": Model(lambda n, t, w, u: Lstm(w, u), _steps, (3, 9, 6, 8), (256, 16, 512, 1024), (5, 9, 6, 8)),
    "unet": Model(lambda n, c, s, w: UNet(c, w), _images, (2, 3, 8, 4), (16, 3, 256, 64), (3, 3, 12, 4)),
    "gpt": Model(
        lambda n, t, w, h: GptBlock(w, h), _tokens, (2, 6, 24, 2), (16, 512, 1536, 12), (3, 10, 24, 2)
    ),
}  # fmt: skip


def build(name: str, size: str = "small", device: str = "cpu", seed: int = 0):
    """A module and the inputs of a call, both random but the same for the same seed; inputs need no
    gradients."""
    torch.manual_seed(seed)
    model = MODELS[name]
    sizes = getattr(model, size)
    module = model.make(*(model.small if size == "second" else sizes)).to(device)
    return module, tuple(x.to(device) for x in model.call(*sizes))
