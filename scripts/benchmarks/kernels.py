"""The cases of `scripts/sweep`: reductions, softmax and norms over rows of many lengths, and pointwise ops.

In: a family, a length to reduce, a number of elements, a dtype. Out: a function and its tensors.
Example:

    FAMILIES["layer_norm"].tensors(4096, 1 << 25, torch.float32, "cuda")  # x of [8192, 4096], weight, bias
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS = (32, 128, 768, 4096, 16384, 65536, 1 << 20)
IMAGES = (512, 4096, 16384, 65536, 1 << 20)
COLUMNS = (4096,)  # of pointwise ops


def sum_inner(x: Tensor) -> Tensor:
    return (x * 0.5).sum(-1)


def sum_outer(x: Tensor) -> Tensor:
    return (x * 0.5).sum(0)


def sum_middle(x: Tensor) -> Tensor:
    return (x * 0.5).sum(1)


def sum_full(x: Tensor) -> Tensor:
    return (x * 0.5).sum()


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.size(-1),), weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(x, mean, variance, weight, bias, training=True))


def sigmoid(x: Tensor) -> Tensor:
    return (x * 0.5 + 0.25) * torch.sigmoid(x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def bias_gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def hardswish(x: Tensor) -> Tensor:
    return F.hardswish(x)


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


def quotient(x: Tensor, divisor: Tensor) -> Tensor:
    return x / (divisor * divisor + 1.0)


@dataclass(frozen=True)
class Family:
    """`trained`: measured with its backward too. `layout`: where the reduced dim is. `rows`: operands after x
    that have the size of a row, or of the channels. `statistics`: buffers."""

    function: object
    trained: bool = False
    layout: str = "inner"
    rows: int = 0
    statistics: int = 0
    lengths: tuple = LENGTHS

    def shape(self, length, total):
        """Sizes of x; None where the length does not fit."""
        if self.layout == "inner":
            sizes = (total // length, length)
        elif self.layout == "outer":
            sizes = (length, total // length)
        elif self.layout == "middle":  # [N, H * W, C]
            sizes = (total // (64 * length), length, 64)
        elif self.layout == "full":
            sizes = (total,)
        else:
            sizes = (32, total // length, length // 256, 8)
        return sizes if min(sizes) > 0 else None

    def tensors(self, length, total, dtype, device):
        """Random operands, without gradients."""
        sizes = self.shape(length, total)
        # else the rounding of a sum near 0 would say nothing
        x = (torch.randn(sizes, device=device) + (not self.trained)).to(dtype)
        if self.layout == "channels last":
            x = x.contiguous(memory_format=torch.channels_last)
        row = sizes[1] if self.layout.startswith("channels") else sizes[-1]
        # autocast leaves the parameters of a batch norm as they are
        kept = torch.float32 if self.statistics else dtype
        made = [x] + [torch.randn(row, device=device).to(kept) for _ in range(self.rows)]
        return made + [torch.rand(row, device=device) + 0.5 for _ in range(self.statistics)]


FAMILIES = {
    "sum_inner": Family(sum_inner),
    "sum_outer": Family(sum_outer, layout="outer"),
    "sum_middle": Family(sum_middle, layout="middle"),
    "sum_full": Family(sum_full, layout="full", lengths=(0,)),
    "softmax": Family(softmax, True),
    "log_softmax": Family(log_softmax, True),
    "layer_norm": Family(layer_norm, True, rows=2),
    "rms_norm": Family(rms_norm, True, rows=1),
    "batch_norm": Family(batch_norm, True, "channels", 2, 2, IMAGES),
    "batch_norm_last": Family(batch_norm, True, "channels last", 2, 2, IMAGES),
    "sigmoid": Family(sigmoid, True, lengths=COLUMNS),
    "bias_gelu": Family(bias_gelu, True, rows=1, lengths=COLUMNS),
    "bias_gelu_tanh": Family(bias_gelu_tanh, True, rows=1, lengths=COLUMNS),
    "silu": Family(silu, True, lengths=COLUMNS),
    "tanh": Family(tanh, True, lengths=COLUMNS),
    "hardswish": Family(hardswish, True, lengths=COLUMNS),
    "softplus": Family(softplus, lengths=COLUMNS),
    "quotient": Family(quotient, rows=1, lengths=COLUMNS),
}
