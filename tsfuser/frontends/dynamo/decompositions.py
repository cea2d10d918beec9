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
from torch.utils._pytree import tree_leaves

from ... import options
from ...ops import table
from .embeddings import embedding_backward
from .foreach import foreach_ops, one_by_one
from .whole_ops import stays_whole

#: How many ops a decomposition may take: what takes more computes something else than elements.
_MOST = 24

#: What makes a tensor without dims of a number; groups take the number.
_FACTORIES = frozenset(
    (
        torch.ops.aten.scalar_tensor.default,
        torch.ops.aten.full.default,
        torch.ops.aten.new_full.default,
        torch.ops.aten.new_zeros.default,
    )
)


@cache
def decompositions() -> dict[Any, Callable]:
    """Op -> its decomposition, where that leads to rows."""
    from torch._decomp import core_aten_decompositions

    found = {}
    for op, function in core_aten_decompositions().items():
        if not isinstance(op, torch._ops.OpOverload) or stays_whole(op):
            continue
        if not _has_row(op) and not op._schema.is_mutable:
            found[op] = partial(_tried, function)
    found.update((op, one_by_one(op, element)) for op, element in foreach_ops() if _has_row(element))
    found[torch.ops.aten.convolution.default] = _bias_added
    found[torch.ops.aten.convolution_backward.default] = _bias_summed
    found[torch.ops.aten.embedding_dense_backward.default] = embedding_backward
    return found


def _bias_added(input, weight, bias, *others):
    """A convolution on a GPU, which adds its bias in a kernel of its own: an addition that a group takes."""
    if bias is None or input.device.type != "cuda":
        return NotImplemented
    result = torch.ops.aten.convolution.default(input, weight, None, *others)
    return result + bias.view([-1] + [1] * (result.dim() - 2))


def _bias_summed(gradient, input, weight, bias_sizes, *others):
    """A convolution's backward on a GPU, where its own sum for the bias is slow: a sum that a group takes."""
    *choices, wanted = others
    empty = any(isinstance(size, int) and size == 0 for size in (*gradient.shape, *input.shape))
    if not wanted[2] or gradient.device.type != "cuda" or empty:
        return NotImplemented
    backward = torch.ops.aten.convolution_backward.default
    found = backward(gradient, input, weight, bias_sizes, *choices, [*wanted[:2], False])
    return found[0], found[1], torch.ops.aten.sum.dim_IntList(gradient, [0, *range(2, gradient.dim())])


def _has_row(op: torch._ops.OpOverload) -> bool:
    row = table.find(op._schema.name, op._schema.overload_name)
    return row is not None and (not row.option or options.enabled(row.option))


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def _is_number(op: torch._ops.OpOverload, result: Any) -> bool:
    """Whether the op makes a tensor of a number, without reading one."""
    return isinstance(result, torch.Tensor) and result.dim() == 0 and op in _FACTORIES


class _Recorder(TorchDispatchMode):
    """Counts the ops that run: those with rows, and those that stand in the way. Views, and tensors of one
    element made of a number, are neither."""

    def __init__(self):
        super().__init__()
        self.with_rows = self.others = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _has_row(op):
            self.with_rows += 1
        elif op in decompositions():
            found = decompositions()[op](*args, **kwargs)
            if found is not NotImplemented:
                self.with_rows += 1
                return found
        result = op(*args, **kwargs)
        makes_tensors = any(isinstance(x, torch.Tensor) for x in tree_leaves(result))
        if makes_tensors and not (_has_row(op) or _is_view(op) or _is_number(op, result)):
            self.others += 1
        return result


def _tried(function: Callable, *args, **kwargs) -> Any:
    """What the decomposition gives for these operands, or NotImplemented."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    recorder = _Recorder()
    with disable_proxy_modes_tracing(), recorder:
        function(*args, **kwargs)
    if not recorder.others and 0 < recorder.with_rows <= _MOST:
        return function(*args, **kwargs)
    return NotImplemented
