"""Small models, as their users write them, for tests of torch.compile.

Example: `model, make = MODELS["mlp"]; y = model()(make(4))`, where 4 is a batch size or a length.
"""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width // 2),
            nn.Tanh(),
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
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
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


class Llama(nn.Module):
    """A block with grouped queries and a cache of keys and values, which it fills at `at`, from 0 on if that
    is None. The tokens that came before are read from the cache."""

    def __init__(self, width=16, heads=4, batch=2, length=16):
        super().__init__()
        self.heads, self.pairs, self.width = heads, heads // 2, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.register_buffer("rates", 1.0 / 100 ** (torch.arange(0, self.width, 2) / self.width))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, self.pairs, length, self.width))

    def rotated(self, x, angles):
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)

    def forward(self, x, at=None):
        n, t, width = x.shape
        at = torch.arange(t, device=x.device) if at is None else at
        y, angles = self.norm1(x), at[:, None] * self.rates.float()
        q, k, v = (
            f(y).view(n, t, -1, self.width).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        keys = self.keys.index_copy(2, at, self.rotated(k, angles).type_as(self.keys))
        values = self.values.index_copy(2, at, v.type_as(self.values))
        self.keys.copy_(keys.detach())
        self.values.copy_(values.detach())
        mask = torch.arange(keys.shape[2], device=x.device) <= at[:, None]
        keys, values = (c.repeat_interleave(self.heads // self.pairs, 1).type_as(q) for c in (keys, values))
        y = F.scaled_dot_product_attention(self.rotated(q, angles), keys, values, attn_mask=mask)
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


class VAE(nn.Module):
    """The noise comes with the input, behind it. Returns what it decodes, and the loss of the code."""

    def __init__(self, width=12, code=4):
        super().__init__()
        self.sizes = (width, code)
        self.encoder = nn.Sequential(nn.Linear(width, 2 * width), nn.LeakyReLU(0.1))
        self.mean, self.spread = nn.Linear(2 * width, code), nn.Linear(2 * width, code)
        self.decoder = nn.Sequential(nn.Linear(code, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x, noise = x.split(self.sizes, -1)
        y = self.encoder(x)
        mean, spread = self.mean(y), self.spread(y)
        decoded = torch.sigmoid(self.decoder(mean + noise * torch.exp(0.5 * spread)))
        return decoded, -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()


class DLRM(nn.Module):
    """Dense features, rows of embeddings that the signs of some features choose, all their products, and an
    MLP behind them."""

    def __init__(self, dense=8, width=6, tables=3, rows=4):
        super().__init__()
        self.bits = (rows - 1).bit_length()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        self.register_buffer("powers", 2 ** torch.arange(self.bits))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, x):
        dense = F.relu(self.bottom(x))
        signs = x.detach() > 0
        rows = [(signs[:, k : k + self.bits] * self.powers).sum(1) for k in range(len(self.tables))]
        found = [table(row[:, None]) for table, row in zip(self.tables, rows)]
        every = torch.stack([dense, *found], 1)
        products = (every @ every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((dense, products), 1))


def _images(n):
    return torch.randn(n, 8, 8, 8)


class Rotary(nn.Module):
    """What attention with rotary embedding does with its queries and keys, halves as coordinates."""

    def __init__(self, width=8):
        super().__init__()
        self.register_buffer("rates", 1.0 / 100 ** (torch.arange(0, width, 2) / width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        angles = torch.arange(x.size(2), device=x.device)[:, None] * self.rates
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
        half = x.size(-1) // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin * self.scale.type_as(x)


class Shuffled(nn.Module):
    """The branches of a ShuffleNet unit: one half of the channels changes, then both are mixed."""

    def __init__(self, channels=8):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels // 2, 1, 1), 0.5))
        self.bias = nn.Parameter(torch.zeros(channels // 2, 1, 1))

    def forward(self, x):
        left, right = x.chunk(2, 1)
        right = F.relu(right * self.weight.type_as(x) + self.bias.type_as(x))
        n, channels, height, width = x.shape
        both = torch.cat((left, right), 1).view(n, 2, channels // 2, height, width)
        return F.silu(both.transpose(1, 2).reshape(n, channels, height, width))


#: name -> (class, inputs for a batch of so many)
MODELS = {
    "mlp": (MLP, lambda n: torch.randn(n, 12)),
    "encoder": (Encoder, lambda n: torch.randn(2, n + 3, 16)),
    "residual": (Residual, _images),
    "convnext": (ConvNext, _images),
    "gpt": (GPT, lambda n: torch.randint(32, (2, n + 2))),
    "lstm": (LSTMCell, lambda n: torch.randn(3, n, 8)),
    "unet": (UNet, _images),
    "llama": (Llama, lambda n: torch.randn(2, n + 2, 16)),
    "vae": (VAE, lambda n: torch.randn(n, 16)),
    "dlrm": (DLRM, lambda n: torch.randn(n, 8)),
    "rotary": (Rotary, lambda n: torch.randn(2, 3, n + 2, 8)),
    "shuffle": (Shuffled, _images),
}
