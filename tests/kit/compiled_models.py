"""Small models, as their users write them, for tests of torch.compile.

Example: `model, make = MODELS["mlp"]; y = model()(make(4))`, where 4 is a batch size or a length.
"""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 6), nn.Tanh()
        )

    def forward(self, x):
        return self.layers(x) * 2 + 1


class Encoder(nn.Module):
    """A transformer layer, the attention written out."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        y = (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(n, t, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """A block of a ResNet, with in-place relu."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class ConvNext(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class GPT(nn.Module):
    """A causal block with RMS norm, rotary embedding and a gated MLP."""

    def __init__(self, width=16, heads=2, words=32):
        super().__init__()
        self.heads, self.width = heads, width // heads
        self.words = nn.Embedding(words, width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.down = nn.Linear(32, width, bias=False)
        self.register_buffer("rates", 1.0 / 100 ** (torch.arange(0, self.width, 2) / self.width))

    def rotated(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, tokens):
        x = self.words(tokens)
        n, t, width = x.shape
        angles = torch.arange(t, device=x.device)[:, None] * self.rates
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        q, k, v = (
            y.view(n, t, self.heads, self.width).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(width, -1)
        )
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LSTMCell(nn.Module):
    """Written out, over the steps of a sequence."""

    def __init__(self, width=8):
        super().__init__()
        self.inward, self.hidden = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x):
        h = c = torch.zeros_like(x[0])
        for step in x:
            i, f, g, o = (self.inward(step) + self.hidden(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class UNet(nn.Module):
    """A block of a U-Net with group norm, going down and up again."""

    def __init__(self, channels=8):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.last = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x):
        y = self.down(F.silu(self.norm1(x)))
        y = F.interpolate(F.silu(self.norm2(y)), scale_factor=2.0, mode="nearest")
        return self.last(torch.cat((x, y), 1))


def _images(n):
    return torch.randn(n, 8, 8, 8)


#: name -> (class, inputs for a batch of so many)
MODELS = {
    "mlp": (MLP, lambda n: torch.randn(n, 12)),
    "encoder": (Encoder, lambda n: torch.randn(2, n + 3, 16)),
    "residual": (Residual, _images),
    "convnext": (ConvNext, _images),
    "gpt": (GPT, lambda n: torch.randint(32, (2, n + 2))),
    "lstm": (LSTMCell, lambda n: torch.randn(3, n, 8)),
    "unet": (UNet, _images),
}
