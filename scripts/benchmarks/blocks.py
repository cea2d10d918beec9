"""The blocks of a transformer that are measured, forward and backward.

In: a device and a shape. Out: a `Block` with its function, its tensors and the bytes that must move. Example:

    block = BLOCKS["layer_norm"]
    tensors = block.tensors((64, 128, 1024), "cuda")
    block.function(*tensors, *block.numbers).backward(...)

`moved` names what the forward and the backward must read or write once: inputs, outputs, and what autograd
keeps between them. A fuser that computes a kept tensor again, or a mask from its seed, can stay below that.
Parameters, their gradients and statistics of rows are under 0.1 % and not counted.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPE = (64, 128, 1024)


def composite(
    x: Tensor, residual: Tensor, weight: Tensor, bias1: Tensor, bias2: Tensor, axis: int, p: float
) -> Tensor:
    y = F.dropout(x + bias1, p, training=True) + residual
    return F.layer_norm(y, (x.size(axis),), weight, bias2)


def primitives(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    axis: int,
    keepdim: bool,
    p: float,
) -> Tensor:
    y = F.dropout(x + bias1, p, training=True) + residual
    mean = y.mean(axis, keepdim=keepdim)
    difference = y - mean
    variance = (difference * difference).mean(axis, keepdim=keepdim)
    return weight * ((y - mean) / torch.sqrt(variance + 1e-12)) + bias2


def rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias1: Tensor, axis: int, keepdim: bool, p: float
) -> Tensor:
    y = F.dropout(x + bias1, p, training=True) + residual
    variance = y.mul(y).mean(axis, keepdim)
    return weight * (y / torch.sqrt(variance + 1e-12))


def gelu(x: Tensor, residual: Tensor, bias1: Tensor) -> Tensor:
    return F.gelu(x + bias1) * residual


def softmax(x: Tensor, attention: Tensor, p: float) -> Tensor:
    return F.dropout(torch.softmax(x * 0.125 + attention, -1), p, training=True)


@dataclass(frozen=True)
class Block:
    """`function(*tensors, *numbers)`; `numbers` ends with the probability of dropout, if there is one."""

    title: str
    function: object
    operands: str
    numbers: tuple
    moved: str
    dtype: torch.dtype = torch.float32

    def tensors(self, shape, device, dtype=None):
        """Random operands by name; all but the attention mask want a gradient."""
        sizes = {"x": shape, "residual": shape, "attention": (shape[0], 1, shape[2])}
        made = []
        for name in self.operands.split():
            values = torch.randn(sizes.get(name, shape[-1:]), device=device).to(dtype or self.dtype)
            made.append(values.requires_grad_(name != "attention"))
        return made

    def bytes(self, shape):
        """Bytes that one forward and backward must move: a mask of dropout has a byte an element."""
        words = self.moved.replace("|", " ").split()
        each = sum(1 if word == "mask" else self.dtype.itemsize for word in words)
        return each * torch.Size(shape).numel()

    def without_dropout(self):
        """`numbers` with which results can be compared."""
        return tuple(0.0 if isinstance(number, float) else number for number in self.numbers)


_PARAMETERS = "x residual weight bias1 bias2"
_FEWER = "x residual weight bias1"
_NORM = "x residual mask sum out | gradient mask sum x_gradient residual_gradient"
_GELU = "x residual out | gradient x residual x_gradient residual_gradient"
_SOFTMAX = "x probabilities mask out | gradient mask probabilities x_gradient"
_AXIS, _PRIMITIVE = (2, 0.1), (2, True, 0.1)
BLOCKS = {
    "layer_norm": Block("bias + dropout + add + layer_norm", composite, _PARAMETERS, _AXIS, _NORM),
    "primitives": Block("the same from primitives", primitives, _PARAMETERS, _PRIMITIVE, _NORM),
    "rms_norm": Block("bias + dropout + add + RMS norm", rms_norm, _FEWER, _PRIMITIVE, _NORM),
    "gelu": Block("gelu(x + b) * y", gelu, "x residual bias1", (), _GELU),
    "softmax": Block("softmax(x * 0.125 + m) + dropout", softmax, "x attention", (0.1,), _SOFTMAX),
    "layer_norm_bf16": Block("layer_norm block", composite, _PARAMETERS, _AXIS, _NORM, torch.bfloat16),
    "rms_norm_bf16": Block("RMS norm block", rms_norm, _FEWER, _PRIMITIVE, _NORM, torch.bfloat16),
}
