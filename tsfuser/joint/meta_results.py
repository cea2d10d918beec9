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
    shape = _broadcast_sizes([t.shape for t in operands])
    whole = next((t for t in operands if t.shape == shape), None)
    if whole is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return like(whole, dtype)


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.empty_like`, which imports sympy."""
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.is_contiguous() or is_last:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    if not any(tensor.stride()):  # one number for all elements
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
    return torch.empty_like(tensor, dtype=dtype)


def _broadcast_sizes(sizes: Sequence[Sequence[int]]) -> torch.Size:
    """As `torch.broadcast_shapes`, which imports sympy."""
    rank = max(map(len, sizes))
    columns = zip(*((1,) * (rank - len(each)) + tuple(each) for each in sizes))
    return torch.Size(next((size for size in dim if size != 1), 1) for dim in columns)


def reduced(input: Tensor, dims: Sequence[int], keep: bool, dtype: torch.dtype) -> Tensor:
    """The result of a reduction; no dims are all of them."""
    gone = {d % input.dim() for d in dims} if dims and input.dim() else set(range(input.dim()))
    sizes = [1 if d in gone else n for d, n in enumerate(input.shape) if keep or d not in gone]
    return torch.empty(sizes, dtype=dtype, device="meta")


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(input.shape, dtype=dtype or input.dtype, device="meta")


def _inner_softmax(input: Tensor, dim: int, widens: bool) -> Tensor:
    return _softmax(input, dim, torch.float32 if widens else None)


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
    return tuple(None if t is None else like(t) for t in operands)


def _formatted(input: Tensor, *_: Any) -> Tensor:
    """In order, or channels last."""
    if input.is_contiguous():
        return _in_order(input)
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _of_channels(input: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Result and statistics of a batch norm."""
    count = input.shape[1] if given[4] is True else 0
    statistics = input.new_empty([count], dtype=torch.promote_types(input.dtype, torch.float32))
    return like(input), statistics, statistics


def _batch_norm(input: Tensor, weight: Any, bias: Any, *given: Any) -> tuple[Any, ...]:
    """The same, a reserve, and which implementation it is."""
    reserve = input.new_empty([0], dtype=torch.uint8)
    return *_of_channels(input, weight, bias, *given), reserve, 0


def _channel_gradients(grad: Tensor, input: Tensor, *_: Any) -> tuple[Tensor, ...]:
    of_weight = input.new_empty([input.shape[1]])
    return like(input), of_weight, of_weight


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


def _matrix_product(self: Tensor, other: Tensor) -> Tensor:
    """Of matrices, or of as many in each operand."""
    return self.new_empty([*self.shape[:-1], other.shape[-1]])


def _matmul(self: Tensor, other: Tensor) -> Tensor:
    batch = _broadcast_sizes([self.shape[:-2], other.shape[:-2]])
    rows, columns = self.shape[-2:-1], other.shape[-1:] if other.dim() > 1 else ()
    return self.new_empty([*batch, *rows, *columns])


def _product_gradient(left: Tensor, right: Tensor, sizes: list[int] | None, also_batches: bool) -> Any:
    """Of a product of batches; None where torch has to say: of matrices and vectors, or of another layout."""
    rank = left.dim() if sizes is None else len(sizes)
    return _matmul(left, right) if left.dim() == right.dim() == rank > 2 and not also_batches else None


def _gradient_of_left(grad: Tensor, other: Tensor, sizes: Any, like: Any, also_batches: bool) -> Any:
    return _product_gradient(grad, other.mT, sizes, also_batches) if other.dim() > 2 else None


def _gradient_of_right(self: Tensor, grad: Tensor, sizes: Any, like: Any, also_batches: bool) -> Any:
    return _product_gradient(self.mT, grad, sizes, also_batches) if self.dim() > 2 else None


def _convolved(input: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """None where torch has to say: of another layout, or padding that has a name."""
    rank = weight.dim() - 2
    if input.dim() != rank + 2 or isinstance(padding, str):
        return None
    if not (input.is_contiguous() and weight.is_contiguous()):
        return None
    step, pad, hole = ([*each] * rank if len(each) == 1 else each for each in (stride, padding, dilation))
    sizes = [
        (size + 2 * p - h * (k - 1) - 1) // s + 1
        for size, k, s, p, h in zip(input.shape[2:], weight.shape[2:], step, pad, hole)
    ]
    return input.new_empty([input.shape[0], weight.shape[0], *sizes])


def _convolution(input: Tensor, *given: Any) -> Any:
    transposed = given[5]
    return None if transposed else _convolved(input, *given[:5])


def _convolution_gradients(grad: Tensor, input: Tensor, weight: Tensor, bias: Any, *given: Any) -> Any:
    wanted = given[6]
    if not all(t.is_contiguous() for t in (grad, input, weight)):
        return None
    made = (like(input), like(weight), weight.new_empty(weight.shape[:1]))
    return tuple(t if wants else None for t, wants in zip(made, wanted))


def _pooled(input: Tensor, sizes: list[int]) -> Tensor:
    made = input.new_empty([*input.shape[:-2], *sizes])
    return made if input.is_contiguous() else made.to(memory_format=suggest_memory_format(input))


def _max_pooled(input: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    """None where torch has to say: of another layout, or with a part of a window."""
    if ceil or input.dim() != 4 or not input.is_contiguous():
        return None
    size, step, pad, hole = (
        2 * [*each] if len(each) == 1 else each for each in (kernel, stride or kernel, padding, dilation)
    )
    sizes = [
        (n + 2 * p - h * (k - 1) - 1) // s + 1
        for n, k, s, p, h in zip(input.shape[2:], size, step, pad, hole)
    ]
    return input.new_empty([*input.shape[:2], *sizes])


def _max_pooled_with_places(input: Tensor, *given: Any) -> Any:
    made = _max_pooled(input, *given)
    return None if made is None else (made, made.new_empty(made.shape, dtype=torch.int64))


def _summed_to(input: Tensor, sizes: list[int] | None) -> Tensor:
    return like(input) if sizes is None or list(input.shape) == sizes else input.new_empty(sizes)


def _function(input: Tensor) -> Tensor:
    """Of one number."""
    dtype = input.dtype if input.dtype.is_floating_point else torch.get_default_dtype()
    return like(input, dtype)


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
    return torch.empty(input.shape, dtype=input.dtype, device="meta")


def _like_second(grad: Tensor, self: Tensor, *_: Any) -> Tensor:
    return like(self)


def _part_of_list(items: Any, *place: int | None) -> list | None:
    return items[slice(*place)] if isinstance(items, list) else None  # of a tensor, torch is asked


#: By the op.
RESULTS: dict[str, Callable[..., Any]] = {
    "prim::BroadcastSizes": lambda *sizes: list(_broadcast_sizes(sizes)),
    "tsfuser::joined_dim": lambda *dims: max(dims),
    "aten::copy": lambda items: list(items),  # of a list; the op of two tensors fails here
    "aten::list": lambda items: list(items) if isinstance(items, list) else None,
    "aten::slice": _part_of_list,
    "aten::cat": _joined,
    "aten::stack": _stacked,
    "aten::linear": _product,
    "aten::mm": _matrix_product,
    "aten::bmm": _matrix_product,
    "aten::addmm": lambda self, *given: _matrix_product(*given[:2]),
    "aten::baddbmm": lambda self, *given: _matrix_product(*given[:2]),
    "aten::matmul": _matmul,
    "tsfuser::matmul_backward_self": _gradient_of_left,
    "tsfuser::matmul_backward_other": _gradient_of_right,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    **{f"aten::conv{rank}d": lambda *given: _convolved(*given[:6]) for rank in (1, 2, 3)},
    "tsfuser::filled": lambda self, *_: like(self),
    "aten::mv": lambda self, vec: self.new_empty(self.shape[:1]),
    "tsfuser::bias_or_zero": lambda bias, result, _: result.new_empty([1]) if bias is None else bias,
    "aten::_grad_sum_to_size": _summed_to,
    "aten::max_pool2d": _max_pooled,
    "aten::max_pool2d_with_indices": _max_pooled_with_places,
    "aten::max_pool2d_with_indices_backward": _like_second,
    "aten::convolution_backward": _convolution_gradients,
    "aten::adaptive_avg_pool2d": _pooled,
    "aten::digamma": _function,
    "aten::cumsum": _scan,
    "aten::cumprod": _scan,
    "aten::roll": _in_order,
    "aten::tril": _in_order,
    "aten::triu": _in_order,
    "aten::layer_norm": lambda *given: _normalized(*given)[0],
    "aten::native_layer_norm": _normalized,
    "aten::softmax": _softmax,
    "aten::log_softmax": _softmax,
    "aten::_softmax": _inner_softmax,
    "aten::_log_softmax": _inner_softmax,
    "aten::_softmax_backward_data": _like_second,
    "aten::_log_softmax_backward_data": _like_second,
    "aten::dropout": lambda input, *_: like(input),
    "aten::native_dropout": lambda input, *_: (
        like(input),
        like(input, torch.bool),
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
