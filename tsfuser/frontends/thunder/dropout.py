"""Dropout as two symbols that regions take: `tsfuser_dropout`, and its gradient.

In: a call of torch's dropout with a mask to draw. Out: one symbol that gives the result and the mask, and one
that multiplies the gradient by it. thunder's own rule draws numbers in a kernel of its own, and stores them.
Both are tagged and listed as random: a mask that is computed again would be another one, and two calls with
one operand are two calls. Example: `dropout(x, 0.1)` -> `(t0, mask) = tsfuser_dropout(x, 0.1)`.
"""

from __future__ import annotations

from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.prims import OpTags, get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.transform_common import NON_FUNCTIONAL_OPS
from thunder.extend import FusionExecutor
from thunder.torch import dropout as torchs_dropout

#: The symbols, which draw numbers, or stand beside one that does, and may be in regions all the same.
NAMES = ("tsfuser_dropout", "tsfuser_dropout_backward")


def register(executor: FusionExecutor) -> None:
    """The executor takes dropout, with and without gradients."""
    forward = executor.register_operator(NAMES[0], meta=_forward_meta, fn=_forward, tags=[OpTags.RANDOM_OP])
    backward = executor.register_operator(NAMES[1], meta=_backward_meta, fn=_backward)
    NON_FUNCTIONAL_OPS.add(forward.id)

    def run(a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return forward(a, p)[0]

    def run_with_gradient(
        a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        result, mask = forward(a, p)
        put_grad(a, backward(get_grad(result), mask, 1 / (1 - p)))
        return result

    executor.register_supported(
        torchs_dropout, _draws, execution_transform=run, grad_transform=run_with_gradient
    )


def _draws(a: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> bool:
    """Whether a mask is drawn for a plain tensor of floats, with a probability that does not vary."""
    return (
        type(a) is TensorProxy
        and dtypes.is_float_dtype(a.dtype)
        and training is True
        and inplace is False
        and type(p) in (int, float)
        and 0 < p < 1
    )


def _forward_meta(a: TensorProxy, p: float) -> tuple[TensorProxy, TensorProxy]:
    return TensorProxy(like=a), TensorProxy(like=a, dtype=dtypes.bool8, requires_grad=False)


def _forward(a: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.native_dropout(a, p, True)


def _backward_meta(gradient: TensorProxy, mask: TensorProxy, scale: float) -> TensorProxy:
    return TensorProxy(like=gradient)


def _backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.ops.aten.native_dropout_backward(gradient, mask, scale)
