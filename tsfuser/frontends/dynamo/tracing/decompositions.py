"""Decompositions of ops without a row, if all their parts have rows.

In: torch's registered decompositions. Out: a table for AOTAutograd, which uses it while it traces. Each entry
first tries its decomposition. If an op without a row turns up, the entry returns `NotImplemented`: the op is
not decomposed, and torch's own kernel runs. Ops with a row are never decomposed. Example: `mse_loss` becomes
`sub`, `pow` and `mean`; `scatter_add`, which has no such parts, stays. An op on lists of tensors becomes
one op per tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ....ops import table, without_row
from .eager_layouts import EAGER_LAYOUTS
from .embeddings import bag_backward, embedding_backward
from .foreach import foreach_ops, one_by_one
from .whole_ops import stays_whole

#: The most ops of a decomposition: one that takes more is not elementwise.
_MOST = 24

#: Ops that make a 0-dim tensor from a number; groups take the number.
_FACTORIES = frozenset(
    (
        torch.ops.aten.scalar_tensor.default,
        torch.ops.aten.full.default,
        torch.ops.aten.new_full.default,
        torch.ops.aten.new_zeros.default,
    )
)

#: Without a row; but the copies that it makes end in inputs, or nobody needs them (rewrites/simplify.py).
_COPY = torch.ops.aten.copy.default


@cache
def decompositions() -> dict[Any, Callable]:
    """Op -> its decomposition, which returns NotImplemented if a part of it has no row. The table has no ops
    that are composite for autograd too: tracing takes them apart anyway."""
    # core_aten_decompositions() looks for such ops among all of torch's, which takes a tenth of a second.
    from torch._decomp import _core_aten_decompositions_post_autograd as registered
    from torch._decomp.decompositions import pw_cast_for_opmath as in_arithmetic_dtype

    found: dict[Any, Callable] = {}
    for op, function in registered().items():
        if not isinstance(op, torch._ops.OpOverload) or stays_whole(op):
            continue
        checked = op._schema.name in without_row.CHECKED
        if not _has_row(op) and not checked and not op._schema.is_mutable:
            found[op] = partial(_tried, function)
    found.update(
        (op, one_by_one(op, element))
        for op, element in foreach_ops()
        if _has_row(element) or element is _COPY
    )
    found[torch.ops.aten.smooth_l1_loss_backward.default] = partial(
        _tried, in_arithmetic_dtype(_smooth_l1_loss_backward)
    )
    found[torch.ops.aten.nll_loss_backward.default] = _nll_loss_backward
    found[torch.ops.aten.nll_loss2d_backward.default] = _nll_loss_backward
    found[torch.ops.aten.convolution.default] = _bias_added
    found[torch.ops.aten.convolution_backward.default] = _bias_summed
    found[torch.ops.aten.new_empty.default] = _empty
    found[torch.ops.aten.embedding_dense_backward.default] = embedding_backward
    found[torch.ops.aten._embedding_bag_backward.default] = bag_backward
    found.update((op, partial(_laid_out, function, found.get(op))) for op, function in EAGER_LAYOUTS.items())
    return found


def _laid_out(function: Callable, otherwise: Callable | None, *args, **kwargs) -> Any:
    """What `function` makes, or the usual decomposition if the op is traced with the right strides."""
    made = function(*args, **kwargs)
    return otherwise(*args, **kwargs) if made is NotImplemented and otherwise else made


def _bias_added(input, weight, bias, *others):
    """A convolution with a bias, on a GPU: torch would add the bias by a kernel of its own. Here a group adds
    it."""
    if bias is None or input.device.type != "cuda":
        return NotImplemented
    result = torch.ops.aten.convolution.default(input, weight, None, *others)
    return result + bias.view([-1] + [1] * (result.dim() - 2))


def _bias_summed(gradient, input, weight, bias_sizes, *others):
    """The backward of a convolution with a bias, on a GPU: torch's sum for the bias is slow. Here a group
    computes it."""
    *choices, wanted = others
    empty = any(isinstance(size, int) and size == 0 for size in (*gradient.shape, *input.shape))
    if not wanted[2] or gradient.device.type != "cuda" or empty:
        return NotImplemented
    backward = torch.ops.aten.convolution_backward.default
    found = backward(gradient, input, weight, bias_sizes, *choices, [*wanted[:2], False])
    return found[0], found[1], torch.ops.aten.sum.dim_IntList(gradient, [0, *range(2, gradient.dim())])


def _empty(self, size, dtype=None, layout=None, device=None, pin_memory=None):
    """It asks `self` for its dtype and device only. Noise in new memory waits for no value then, as in
    `x * x.new_empty(shape).bernoulli_(0.9)`, so that what computes `x` can be in the group of the product."""
    dtype, layout, device = dtype or self.dtype, layout or self.layout, device or self.device
    return torch.empty(size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)


def _nll_loss_backward(gradient, self, target, *others):
    """Of `self` it reads the sizes only: as numbers, so that no log-probabilities are saved for them."""
    if self.dim() not in (2, 4) or target.dtype != torch.int64:
        return NotImplemented
    return torch.ops.tsfuser.nll_loss_backward(gradient, self.shape, target, *others)


def _smooth_l1_loss_backward(gradient, input, target, reduction, beta):
    """As eager has it (PointwiseOpsKernel.cpp): NaN where the input or the target is. torch's decomposition
    takes the sign of the difference, which is 0 of NaN."""
    scale = 1 / input.numel() if reduction == 1 else 1.0  # 1: the mean
    difference = input - target
    inner = scale * difference * gradient / beta
    outer = torch.where(difference <= -beta, -scale * gradient, scale * gradient)
    return torch.where(difference.abs() >= beta, outer, inner)


def _has_row(op: torch._ops.OpOverload) -> bool:
    return table.find(op._schema.name, op._schema.overload_name) is not None


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def _is_number(op: torch._ops.OpOverload, result: Any) -> bool:
    """Whether the op makes a tensor from a number, and reads no tensor."""
    return isinstance(result, torch.Tensor) and result.dim() == 0 and op in _FACTORIES


class _Recorder(TorchDispatchMode):
    """Counts the ops that run: those with rows, and those without. Views, and one-element tensors made from a
    number, count as neither."""

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
        elif op.namespace == "aten":  # the ops of `prim` are no operators of the dispatcher
            with self:
                found = op.decompose(*args, **kwargs)  # NotImplemented, if the op is not composite
            if found is not NotImplemented:
                return found
        result = op(*args, **kwargs)
        makes_tensors = any(isinstance(x, torch.Tensor) for x in tree_leaves(result))
        if makes_tensors and not (_has_row(op) or _is_view(op) or _is_number(op, result)):
            self.others += 1
        return result


def _tried(function: Callable, *args, **kwargs) -> Any:
    """The result of the decomposition for these operands, or NotImplemented."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    recorder = _Recorder()
    own_args, own_kwargs = tree_map(lambda x: x, (args, kwargs))  # some change the lists that they are given
    with disable_proxy_modes_tracing(), recorder:
        function(*own_args, **own_kwargs)
    if not recorder.others and 0 < recorder.with_rows <= _MOST:
        return function(*args, **kwargs)
    return NotImplemented
