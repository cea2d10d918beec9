"""Decompositions of ops that the op table lacks, where they lead to ops that it has.

In: torch's registered decompositions. Out: a table for AOTAutograd, which asks it while it traces. Each entry
tries its decomposition first: where an op without a row turns up, it says `NotImplemented`, and the op stays
whole, for torch's own kernel. What a row fuses as a whole is never taken apart. Example: `mse_loss` becomes
`sub`, `pow` and `mean`; `nll_loss_forward`, which looks elements up, stays. An op on lists of tensors becomes
one op a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import options
from ...ops import table
from .foreach import foreach_ops, one_by_one

#: How many ops a decomposition may take: what takes more computes something else than elements.
_MOST = 24


@cache
def decompositions() -> dict[Any, Callable]:
    """Op -> its decomposition, where that leads to rows."""
    from torch._decomp import core_aten_decompositions

    found = {}
    for op, function in core_aten_decompositions().items():
        if isinstance(op, torch._ops.OpOverload) and not _has_row(op) and not op._schema.is_mutable:
            found[op] = partial(_tried, function)
    found.update((op, one_by_one(op, element)) for op, element in foreach_ops() if _has_row(element))
    return found


def _has_row(op: torch._ops.OpOverload) -> bool:
    row = table.find(op._schema.name, op._schema.overload_name)
    return row is not None and (not row.option or options.enabled(row.option))


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


class _Recorder(TorchDispatchMode):
    """Notes the ops that run."""

    def __init__(self):
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def _tried(function: Callable, *args, **kwargs) -> Any:
    """What the decomposition gives for these operands, or NotImplemented."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    recorder = _Recorder()
    with disable_proxy_modes_tracing(), recorder:
        function(*args, **kwargs)
    leads_to_rows = all(_has_row(op) or _is_view(op) for op in recorder.ops)
    if leads_to_rows and any(map(_has_row, recorder.ops)) and len(recorder.ops) <= _MOST:
        return function(*args, **kwargs)
    return NotImplemented
