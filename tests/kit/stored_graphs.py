"""Programs whose compiled graphs are kept on disk, and ways to change one thing of them."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from tsfuser import options
from tsfuser.planning import compile


@contextlib.contextmanager
def empty_store(folder, **choices):
    """`folder` as a disk cache in which nothing is kept yet; `choices`: options besides."""
    tsfuser.reset()
    compile._target.cache_clear()  # they hold the cache
    with options.override(cache_dir=folder, **choices):
        yield folder
    compile._target.cache_clear()


def arguments(device="cpu", rows=24, dtype=torch.float32, seed=3):
    """A matrix, a row for it, and two numbers."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(sizes, generator=generator).to(device, dtype) for sizes in ((rows, 40), (40,)))
    return x, y, 0.5, 7


def again(function, *args, **choices):
    """The function compiled as by another process: nothing of an earlier compilation is left but the disk."""
    torch._dynamo.reset()
    tsfuser.reset()
    return torch.compile(function, backend="tsfuser", **{"dynamic": False, **choices})


class Tied(nn.Module):
    """An embedding whose table is also the weight of the head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index):
        return F.cross_entropy(self.head(torch.tanh(self.table(index))), index)


class Counting(nn.Module):
    """A buffer that each call changes, and a result that is a view of an input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return {"y": F.gelu(self.norm(x)) * 2, "view": x[1:].t(), "none": None, "number": 3}


class Block(nn.Module):
    """A layer of a transformer, with dropout."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.rate = rate

    def forward(self, x):
        y = self.norm(x)
        y = F.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        y = self.down(F.gelu(self.up(y)))
        return x + F.dropout(y, self.rate, self.training)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(0.5) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def in_place(x, y):
    x.mul_(2).add_(y)
    return x.sum(0), y.t()


def several(x, y):
    return (x * y).softmax(1), [torch.where(x > y, x, y).amax(1), x.size(0)], (y + 1).to(torch.float64)


def constants(x):
    return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + torch.full((3,), float("inf")).neg().exp()


def mixed(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    with torch.no_grad():
        scale = y.float().abs().amax()
    return (y.float() / scale).sin() + w[0, 0]


@contextlib.contextmanager
def autocast(dtype):
    with torch.autocast("cpu", dtype):
        yield


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def flag(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
