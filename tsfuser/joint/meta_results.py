"""What ops give for tensors without memory, where torch would not say, or runs Python for that.

In: an op's arguments, in the order of its schema, with tensors on `meta`. Out: its results. Example:

    RESULTS["aten::mv"](matrix, vector)      of [4, 8] and [8]: [4]

Torch runs such an op by a decomposition, and imports torch._dynamo for that, which takes up to 1.6 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format


def broadcast(operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The result of an elementwise op."""
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    like = next((t for t in operands if t.shape == shape), None)
    if like is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_like(like, dtype=dtype)


def _alike(op: Any, count: int) -> Callable[..., Any]:
    """Results like those of an op that gets the first `count` arguments."""
    return lambda *given: op(*given[:count])


def _scan(input: Tensor, dim: int, dtype: Any) -> Tensor:
    summed = torch.ops.aten.sum(input, [], dtype=dtype)
    return torch.empty(input.shape, dtype=summed.dtype, device="meta")


# ---- norms


def _normalized(input: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, ...]:
    """Result, mean and root of a norm."""
    kept = list(input.shape[: input.dim() - len(shape)]) + [1] * len(shape)
    statistics = input.new_empty(kept, dtype=torch.promote_types(input.dtype, torch.float32))
    return _in_order(input), statistics, statistics


def _gradients(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else torch.empty_like(t) for t in operands)


def _formatted(input: Tensor, *_: Any) -> Tensor:
    """In order, or channels last."""
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _of_channels(input: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Result and statistics of a batch norm."""
    count = input.shape[1] if given[4] is True else 0
    statistics = input.new_empty([count], dtype=torch.promote_types(input.dtype, torch.float32))
    return torch.empty_like(input), statistics, statistics


def _batch_norm(input: Tensor, weight: Any, bias: Any, *given: Any) -> tuple[Any, ...]:
    """The same, a reserve, and which implementation it is."""
    reserve = input.new_empty([0], dtype=torch.uint8)
    return *_of_channels(input, weight, bias, *given), reserve, 0


def _channel_gradients(grad: Tensor, input: Tensor, *_: Any) -> tuple[Tensor, ...]:
    of_weight = input.new_empty([input.shape[1]])
    return torch.empty_like(input), of_weight, of_weight


# ---- joins, products, pooling


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return tensors[0].new_empty(shape, dtype=_promoted(tensors))


def _stacked(tensors: list[Tensor], dim: int) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return tensors[0].new_empty(shape, dtype=_promoted(tensors))


def _promoted(tensors: list[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (t.dtype for t in tensors))


def _product(input: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Of a linear layer."""
    return input.new_empty([*input.shape[:-1], *weight.shape[:-1]])


def _pooled(input: Tensor, sizes: list[int]) -> Tensor:
    made = input.new_empty([*input.shape[:-2], *sizes])
    return made.to(memory_format=suggest_memory_format(input))


def _function(input: Tensor) -> Tensor:
    """Of one number."""
    dtype = input.dtype if input.dtype.is_floating_point else torch.get_default_dtype()
    return torch.empty_like(input, dtype=dtype)


# ---- losses


def _pointwise_loss(self: Tensor, target: Tensor, *given: Any) -> Tensor:
    operands = [self, target, *(g for g in given if isinstance(g, Tensor))]
    reduction = next(g for g in given if type(g) is int)
    dtype = torch.result_type(self, target)
    return self.new_empty([], dtype=dtype) if reduction else broadcast(operands, dtype)


def _loss_by_target(self: Tensor, target: Tensor, *given: Any) -> Tensor:
    """Its formula starts from the target, whose layout the result has."""
    return _pointwise_loss(target, self, *given)


def _class_loss(self: Tensor, target: Tensor, weight: Any, reduction: int, *_: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the sum of the weights."""
    return self.new_empty([] if reduction else target.shape), self.new_empty([])


def _cross_entropy(self: Tensor, target: Tensor, weight: Any, reduction: int, *_: Any) -> Tensor:
    if target.shape != self.shape:
        return _class_loss(self, target, weight, reduction)[0]
    dim = min(1, self.dim() - 1)  # that of the classes, of which `target` holds the probabilities
    return self.new_empty([] if reduction else [*self.shape[:dim], *self.shape[dim + 1 :]])


def _in_order(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _like_second(grad: Tensor, self: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(self)


#: By the op.
RESULTS: dict[str, Callable[..., Any]] = {
    "aten::cat": _joined,
    "aten::stack": _stacked,
    "aten::linear": _product,
    "aten::mv": lambda self, vec: self.new_empty(self.shape[:1]),
    "tsfuser::bias_or_zero": lambda bias, like, _: like.new_empty([1]) if bias is None else bias,
    "aten::adaptive_avg_pool2d": _pooled,
    "aten::digamma": _function,
    "aten::cumsum": _scan,
    "aten::cumprod": _scan,
    "aten::roll": _in_order,
    "aten::tril": _in_order,
    "aten::triu": _in_order,
    "aten::layer_norm": lambda *given: _normalized(*given)[0],
    "aten::native_layer_norm": _normalized,
    "aten::log_softmax": _alike(torch.ops.aten.softmax, 3),
    "aten::_log_softmax": _alike(torch.ops.aten._softmax, 3),
    "aten::_softmax_backward_data": _like_second,
    "aten::_log_softmax_backward_data": _like_second,
    "aten::dropout": lambda input, *_: torch.empty_like(input),
    "aten::native_dropout": lambda input, *_: (
        torch.empty_like(input),
        torch.empty_like(input, dtype=torch.bool),
    ),
    "aten::batch_norm": lambda *given: _of_channels(*given)[0],
    "aten::native_batch_norm": _of_channels,
    "tsfuser::batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _channel_gradients,
    "tsfuser::batch_norm_backward": lambda _, input, grad, *given: _channel_gradients(grad, input),
    "aten::native_layer_norm_backward": lambda grad, input, *given: _gradients(input, *given[3:5]),
    "tsfuser::group_norm_backward": lambda grad, input, _, *given: _gradients(input, *given[:2]),
    "tsfuser::instance_norm_backward": lambda grad, input, *given: _gradients(input, *given[:2]),
    "aten::group_norm": _formatted,
    "aten::instance_norm": _in_order,
    "aten::rms_norm": _formatted,
    "aten::nll_loss_forward": _class_loss,
    "aten::nll_loss2d_forward": _class_loss,
    "aten::cross_entropy_loss": _cross_entropy,
    "tsfuser::nll_loss_backward": lambda grad, sizes, *_: grad.new_empty(sizes),
    "aten::l1_loss": _pointwise_loss,
    "aten::mse_loss": _pointwise_loss,
    "aten::smooth_l1_loss": _pointwise_loss,
    "aten::huber_loss": _pointwise_loss,
    "aten::kl_div": _loss_by_target,
    "aten::soft_margin_loss": _pointwise_loss,
    "aten::binary_cross_entropy": _pointwise_loss,
    "aten::binary_cross_entropy_with_logits": _loss_by_target,
    "aten::mse_loss_backward": _like_second,
    "aten::smooth_l1_loss_backward": _like_second,
    "aten::huber_loss_backward": _like_second,
    "aten::binary_cross_entropy_backward": _like_second,
}
