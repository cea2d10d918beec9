"""Saves what the server serves: `python model.py model.pt`, a scripted block of a transformer."""

import sys

import torch


class Block(torch.nn.Module):
    """A gated block: norm, two matrix products, GELU, residual. [batch, words, width] in and out."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.gate = torch.nn.Linear(width, width)
        self.value = torch.nn.Linear(width, width)
        self.scale = torch.nn.Parameter(torch.rand(width))

    def forward(self, x):
        normed = self.norm(x)
        gated = torch.nn.functional.gelu(self.gate(normed)) * torch.tanh(self.value(normed))
        return x + (gated * self.scale).clamp(-4.0, 4.0)


torch.manual_seed(0)
model = torch.nn.Sequential(*[Block() for _ in range(4)])
torch.jit.script(model.eval()).save(sys.argv[1])
