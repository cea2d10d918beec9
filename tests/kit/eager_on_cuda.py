"""Eager's 16-bit results as CUDA's kernels have them: each op computes in float32, and rounds its results.

In: a program, run under the mode. Out: what it gives, with a rounding after each op, on any device. Kernels
of a CPU may round inside of an op, too. Example:

    with EagerOnCuda():
        result = function(x)
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NARROW = (torch.float16, torch.bfloat16)


class EagerOnCuda(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        own = func(*args, **kwargs)
        is_cast = func is torch.ops.aten._to_copy.default
        if is_cast or any(returned.alias_info for returned in func._schema.returns):
            return own
        return tree_map(_as, func(*tree_map(_wide, args), **tree_map(_wide, kwargs)), own)


def _wide(argument):
    if isinstance(argument, torch.Tensor):
        return argument.float() if argument.dtype in _NARROW else argument
    return torch.float32 if argument in _NARROW else argument


def _as(result, own):
    return result.to(own.dtype) if isinstance(own, torch.Tensor) else own
