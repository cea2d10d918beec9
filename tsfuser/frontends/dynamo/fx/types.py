"""Types of FX values, as TorchScript writes them.

In: the `meta["val"]` of an FX node: a FakeTensor, a SymInt, a number. Out: a torch._C type. A tensor type has
the dtype, device, sizes and strides of the traced call, like a profiled type; a symbolic size becomes its
hint. The groups that are chosen with these types serve other sizes as well. Example: `type_of(fake)` ->
`Float(4, 8, device=cpu)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_TENSOR = torch._C.TensorType.get()
_NUMBERS = (
    ((bool, torch.SymBool), torch._C.BoolType.get()),
    ((int, torch.SymInt), torch._C.IntType.get()),
    ((float, torch.SymFloat), torch._C.FloatType.get()),
)


def hint(size: Any) -> int | None:
    """The int that a size is, or was in the traced call; None if data decides it, or if it stands for the
    lengths of a nested tensor."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() and not is_nested_int(size) else None


def is_nested_int(size: torch.SymInt) -> bool:
    """Whether the size stands for the lengths of a nested tensor, which differ: no int."""
    return size.node.has_hint() and isinstance(size.node.hint, torch.SymInt)


def type_of(value: Any):
    """The type of a tensor or number; None for anything else."""
    if isinstance(value, torch.Tensor):
        return tensor_type(value)
    for kinds, type_ in _NUMBERS:
        if isinstance(value, kinds):
            return type_
    return None


def tensor_type(tensor: torch.Tensor):
    """The type of a tensor. If the tensor is not strided, the type lacks the facts that a group needs."""
    if tensor.layout != torch.strided:
        return _TENSOR
    sizes, strides = [hint(size) for size in tensor.shape], [hint(step) for step in tensor.stride()]
    if None in sizes or None in strides:
        return _TENSOR.with_dtype(tensor.dtype).with_device(tensor.device).with_sizes(sizes)
    with unset_fake_temporarily():
        like = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")
    return torch._C.TensorType.create_from_tensor(like).with_device(tensor.device)


def order_of(tensor: torch.Tensor) -> list[int] | None:
    """The dims from the outermost in memory to the innermost. None if the tensor has gaps or overlaps."""
    if tensor.layout != torch.strided:
        return None
    sizes, strides = [hint(x) for x in tensor.shape], [hint(x) for x in tensor.stride()]
    if None in sizes or None in strides or 0 in sizes:
        return None
    # dims of size 1 may have any stride: they stay where they are
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], sizes[d] == 1, d))
    wide = [d for d in order if sizes[d] != 1]
    expected = 1
    for d in reversed(wide):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    return order


def lies_in(tensor: torch.Tensor, order: list[int]) -> bool:
    """Whether the tensor is dense, with its dims in this `order` in memory, outermost first."""
    expected = 1
    for d in reversed(order):
        size, stride = hint(tensor.shape[d]), hint(tensor.stride(d))
        if size is None or (size != 1 and stride != expected):
            return False
        expected *= size
    return True
