"""A group's arguments as plans are made for them.

In: a tensor, number, list or other value. Out: its description. Example: `described(torch.rand(4, 8))` ->
`TensorArg("float32", "cpu", (4, 8), (8, 1), 64)`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.call import MOST_ALIGNMENT, Arg, ListArg, OtherArg, ScalarArg, TensorArg


def described(value: Any) -> Arg:
    """A group's argument as plans are made for it."""
    if isinstance(value, torch.Tensor):
        address = value.data_ptr()
        alignment = min(address & -address, MOST_ALIGNMENT) if address else MOST_ALIGNMENT
        return TensorArg(
            str(value.dtype)[6:], str(value.device), tuple(value.shape), value.stride(), alignment
        )
    if isinstance(value, (bool, int)):
        return ScalarArg("bool" if isinstance(value, bool) else "int", value)
    if isinstance(value, (float, complex)):
        return ScalarArg(type(value).__name__, None)
    if isinstance(value, (list, tuple)):
        return ListArg("bool" if value and isinstance(value[0], bool) else "int", tuple(value))
    return OtherArg(value if isinstance(value, str) else None)
