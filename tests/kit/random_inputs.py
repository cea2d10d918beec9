"""An input of a random program: which tensor it is, and how it lies in memory.

In: the sizes of a call. Out: a tensor. Example:

    Input("x0", ("m", 1), torch.float32, "transposed", seed=3).make({"m": 5})
"""

from dataclasses import dataclass

import torch

from kit.random_families import with_special


@dataclass(frozen=True)
class Input:
    """`dims`: names of sizes, or 1. `special`: which values beyond ordinary ones it has, a name of a
    family."""

    name: str
    dims: tuple
    dtype: torch.dtype
    layout: str
    seed: int
    leaf: bool = False
    special: str = ""

    def make(self, sizes):
        """The tensor, on the CPU: multiples of 1/8 from -3 to 3, and what is special."""
        shape = [sizes.get(d, d) for d in self.dims]
        generator = torch.Generator().manual_seed(self.seed)
        low = 0 if self.dtype in (torch.uint8, torch.bool) else -24
        x = torch.randint(low, 25, shape, generator=generator)
        x = x > 12 if self.dtype == torch.bool else (x / 8).to(self.dtype)
        if x.is_complex():
            x = x + 1j * torch.randint(low, 25, shape, generator=generator) / 8
        x = with_special(x, self.special, generator)
        return laid_out(x, self.layout).requires_grad_(self.leaf)


def laid_out(x, layout):
    """`x` with other strides or another start in memory."""
    if layout == "transposed":
        order = list(range(x.dim()))[::-1]
        return x.permute(order).contiguous().permute(order)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "shifted":
        return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)
    if layout == "expanded" and x.dim() and x.size(0):
        return x[:1].expand(x.shape)
    if layout == "last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x
