"""Ops that become others before they are differentiated.

A norm, a dropout or a pooling also returns what its derivative reads; a loss or a pad is some other op in a
certain case. In: a typed graph. Out: the same, in place. Example:

    %y = aten::layer_norm(%x, ...)   ->   %y, %mean, %rstd = aten::native_layer_norm(%x, ...)

Each function gets the op's arguments by name, and returns what stands for the result, or None to leave it; of
several results a tuple, None for those that nobody reads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping

from ..errors import Refusal
from ..graph.wrapper import Graph, Node, inputs, nodes_of, outputs, refine, schema
from .autocast import FULL, REDUCED, cast_to
from .rules.table import argument, known_rank, structural
from .terms import DTYPE_NUMBERS, Term, Writer

EXPANSIONS: dict[str, Callable] = {}  # registry: by operator kind


def expansion(*kinds: str) -> Callable[[Callable], Callable]:
    """Registers the function below for these kinds."""

    def add(write: Callable) -> Callable:
        EXPANSIONS.update((kind, write) for kind in kinds)
        return write

    return add


def expand(graph: Graph, forms: Mapping[str, Callable] = EXPANSIONS) -> None:
    """Replaces all nodes of these kinds."""
    writer = Writer(graph)
    for node in nodes_of(graph, tuple(forms)):
        _expand(node, writer, forms[node.kind()])


def _expand(node: Node, writer: Writer, write: Callable) -> None:
    found = schema(node)
    if found is None:
        return
    writer.place = writer.lines = node
    given = dict(zip(found.arguments, inputs(node)))
    made = write(**{name: argument(writer, given.get(name)) for name in inspect.signature(write).parameters})
    if made is None:
        return
    for value, term in zip(outputs(node), made if isinstance(made, tuple) else (made,)):
        if term is not None:
            term.value.setType(refine(value.type(), term.facts))
            writer.knowledge.forget(term.value)
            value.replaceAllUsesWith(term.value)
    node.destroy()


# ---- dropout and softmax


@expansion("aten::dropout")
def dropout(input, p, train):
    if structural(train, "train") is False:
        return input
    return input.native_dropout(p, train)[0]


def _softmax(kind):
    @expansion(f"aten::{kind}")
    def write(self, dim, dtype):
        """Eager casts first: torch has no derivative from one dtype to another, but on CUDA."""
        if dtype is None:
            return None
        cast = self.writer("aten::to", self, structural(dtype, "a dtype"), False, False)
        return self.writer(f"aten::{kind}", cast, dim, None)


for _kind in ("softmax", "log_softmax"):
    _softmax(_kind)


@expansion("aten::special_ndtr")
def special_ndtr(self):
    """Eager's formula."""
    if self.facts.dtype not in DTYPE_NUMBERS:
        return None
    return (self * -math.sqrt(0.5)).erfc() * 0.5


@expansion("aten::type_as")
def type_as(self, other):
    """The backward need not have the other tensor."""
    dtype, device, _ = other.facts
    if dtype not in DTYPE_NUMBERS or device is None or device != self.facts.device:
        return None
    return self.writer("aten::to", self, DTYPE_NUMBERS[dtype], False, False)


@expansion("tsfuser::as_written")
def as_written(self, target):
    """Of two tensors of one dtype it is the first one, else a cast: all fractions can be cast."""
    own, its = self.facts.dtype, target.facts.dtype
    if own is not None and own == its:
        return self
    are_cast = {own, its} <= DTYPE_NUMBERS.keys()
    return self.writer("aten::to", self, DTYPE_NUMBERS[its], False, False) if are_cast else None


# ---- autocast


@expansion(REDUCED)
def autocast_to_reduced_precision(self, cuda_enabled, cpu_enabled, cuda_dtype, cpu_dtype):
    return _cast_by_autocast(self, REDUCED, [cuda_enabled, cpu_enabled, cuda_dtype, cpu_dtype])


@expansion(FULL)
def autocast_to_full_precision(self, cuda_enabled, cpu_enabled):
    return _cast_by_autocast(self, FULL, [cuda_enabled, cpu_enabled])


def _cast_by_autocast(self, kind, flags):
    dtype, device, _ = self.facts
    if dtype is None or device is None:
        return None
    target = cast_to(kind, dtype, device, [structural(flag, "whether autocast is on") for flag in flags])
    return self if target is None else self.writer("aten::to", self, target, False, False)


# ---- convolutions, poolings


@expansion("tsfuser::bias_or_zero")
def bias_or_zero(bias, like, dims):
    """Has the weight of the convolution, not its result, say how many channels there are."""
    convolution = like.value.node()
    if bias is None or not convolution.kind().startswith("aten::conv"):
        return None
    weight = Term(like.writer, convolution.inputsAt(1))
    return bias.writer("tsfuser::bias_or_zero", bias, weight, dims + 1)


@expansion("aten::max_pool2d")
def max_pool2d(self, kernel_size, stride, padding, dilation, ceil_mode):
    return self.max_pool2d_with_indices(kernel_size, stride, padding, dilation, ceil_mode)[0]


@expansion("aten::max_pool3d")
def max_pool3d(self, kernel_size, stride, padding, dilation, ceil_mode):
    return self.max_pool3d_with_indices(kernel_size, stride, padding, dilation, ceil_mode)[0]


@expansion("aten::max_pool1d")
def max_pool1d(self, kernel_size, stride, padding, dilation, ceil_mode):
    """As a pooling of images of one row."""
    windows = _of_images(kernel_size, stride, padding) + [[1, *structural(dilation, _WINDOW)]]
    return self.unsqueeze(-2).max_pool2d_with_indices(*windows, ceil_mode)[0].squeeze(-2)


_WINDOW = "a window of a pooling"


def _of_images(kernel_size, stride, padding):
    kernel_size, stride, padding = (structural(v, _WINDOW) for v in (kernel_size, stride, padding))
    return [[1, *kernel_size], [1, *(stride or kernel_size)], [0, *padding]]


@expansion("aten::avg_pool1d")
def avg_pool1d(self, kernel_size, stride, padding, ceil_mode, count_include_pad):
    windows = _of_images(kernel_size, stride, padding)
    return self.unsqueeze(-2).avg_pool2d(*windows, ceil_mode, count_include_pad, None).squeeze(-2)


@expansion("aten::adaptive_avg_pool1d")
def adaptive_avg_pool1d(self, output_size):
    size = [1, *structural(output_size, "the size of a pooling's result")]
    if size == [1, 1]:  # as in eager, which saves nothing of it
        return self.mean([-1], True)
    return self.unsqueeze(-2).adaptive_avg_pool2d(size).squeeze(-2)


@expansion("aten::adaptive_max_pool1d")
def adaptive_max_pool1d(self, output_size):
    size = [1, *structural(output_size, "the size of a pooling's result")]
    values, indices = self.unsqueeze(-2).adaptive_max_pool2d(size)
    return values.squeeze(-2), indices.squeeze(-2)


@expansion("aten::prelu")
def prelu(self, weight):
    """A weight of several elements is one for each channel, dim 1."""
    rank = known_rank(self)
    if known_rank(weight) > 1:
        raise Refusal("a prelu with a weight of several dims is an error in eager")
    if known_rank(weight) == 0 or rank < 2:
        return self._prelu_kernel(weight.reshape([1] * rank))
    return self._prelu_kernel(weight.reshape([1, -1] + [1] * (rank - 2)))


def _extreme(kind, of_two):
    @expansion(kind)
    def write(self, other):
        return None if other is None else self.writer(of_two, self, other)


_extreme("aten::max", "aten::maximum")
_extreme("aten::min", "aten::minimum")


@expansion("aten::float_power")
def float_power(self, exponent):
    def double(value):
        if not isinstance(value, Term):
            return float(value)
        if not value.is_tensor:
            return value.writer("aten::Float", value)
        return value.writer("aten::to", value, DTYPE_NUMBERS["float64"], False, False)

    writer = self.writer if isinstance(self, Term) else exponent.writer
    return writer("aten::pow", double(self), double(exponent))


# ---- pads, parts


@expansion("aten::pad")
def pad(self, pad, mode, value):
    if mode == "constant":
        return self.constant_pad_nd(pad, 0 if value is None else value)
    kind = {"reflect": "reflection", "replicate": "replication"}.get(mode)
    if kind is None:
        return None
    return self.writer(f"aten::{kind}_pad{len(structural(pad, 'the widths of a pad')) // 2}d", self, pad)


@expansion("aten::expand_as")
def expand_as(self, other):
    return self.expand(other.sizes)


@expansion("aten::tile")
def tile(self, dims):
    dims = structural(dims, "the repeats")
    return self.repeat([1] * (known_rank(self) - len(dims)) + dims)


@expansion("aten::take_along_dim")
def take_along_dim(self, indices, dim):
    """In a dim negative indices count from the end. Eager saves what they become, and not the operand."""
    if indices.facts.dtype != "int64":
        raise Refusal("take_along_dim by other indices than int64 is an error in eager")
    if dim is None:
        return self.reshape([-1]).gather(0, indices.reshape([-1]))
    if indices.value.node().kind() == "aten::where":
        return None
    return self.take_along_dim((indices < 0).where(indices + self.size(dim), indices), dim)


# ---- losses


@expansion("aten::cross_entropy_loss")
def cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing):
    """Of class numbers, or of a probability for each class."""
    rank, smoothing = known_rank(self), structural(label_smoothing, "the smoothing of labels")
    reduction = structural(reduction, "the reduction of a loss")
    if target.facts.dtype in DTYPE_NUMBERS and known_rank(target) == rank:
        return _of_probabilities(self, target, weight, reduction, smoothing)
    if target.facts.dtype != "int64" or known_rank(target) != max(rank - 1, 0):
        return None
    if rank == 3 or rank > 4:  # as images of one row
        images = _reshaped(self, [self.size(0), self.size(1), 1, -1])
        places = _reshaped(target, [target.size(0), 1, -1])
        loss = cross_entropy_loss(images, places, weight, reduction, ignore_index, smoothing)
        return loss if reduction else loss.reshape(target.sizes)
    logarithms = self.log_softmax(_classes(self))
    loss = nll_loss_nd(logarithms, target, weight, reduction, ignore_index)
    if not smoothing:
        return loss
    even = _of_all_classes(logarithms, target, weight, reduction, ignore_index)
    return loss * (1 - smoothing) + even * (smoothing / self.size(_classes(self)))


def _of_all_classes(logarithms, target, weight, reduction, ignore_index):
    """The sum of the losses of all classes, for each target that is not ignored."""
    ignored = target == ignore_index
    loss = -_weighted(logarithms, weight).sum([_classes(logarithms)])
    loss = loss.masked_fill(ignored, 0)
    if reduction != 1:
        return loss.sum() if reduction else loss
    if weight is None:
        return loss.sum() / ignored.logical_not().sum()
    its = weight.gather(0, target.masked_fill(ignored, 0).reshape([-1]))
    return loss.sum() / its.masked_fill(ignored.reshape([-1]), 0).sum()


def _of_probabilities(self, target, weight, reduction, smoothing):
    dim = _classes(self)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / self.size(dim)
    loss = -_weighted(self.log_softmax(dim) * target, weight)
    if reduction == 1:
        return loss.sum() / (self.numel() / self.size(dim))
    return loss.sum() if reduction else loss.sum([dim])


def _classes(logits):
    return min(1, known_rank(logits) - 1)


def _weighted(losses, weight):
    """`weight` has an element for each class."""
    if weight is None:
        return losses
    dim = _classes(losses)
    return losses * _reshaped(weight, [1] * dim + [-1] + [1] * (known_rank(losses) - 1 - dim))


def _reshaped(value, sizes):
    return value.writer.known(value.reshape(sizes), value.facts._replace(rank=len(sizes)))


@expansion("aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d")
def nll_loss_nd(self, target, weight, reduction, ignore_index):
    if self.facts.rank not in (1, 2, 4):
        return None
    kind = "aten::nll_loss2d_forward" if self.facts.rank == 4 else "aten::nll_loss_forward"
    loss, total = self.writer(kind, self, target, weight, reduction, ignore_index)
    self.writer.known(total, self.facts._replace(rank=0))
    return loss


@expansion("aten::l1_loss")
def l1_loss(self, target, reduction):
    return _reduced((self - target).abs(), reduction)


@expansion("aten::kl_div")
def kl_div(self, target, reduction, log_target):
    if log_target:
        return _reduced(target.exp() * (target - self), reduction)
    return _reduced(target.xlogy(target) - target * self, reduction)


def cast(value, dtype):
    if value.facts.dtype == dtype:
        return value
    return value.writer("aten::to", value, DTYPE_NUMBERS[dtype], False, False)


def _is_tensor(value) -> bool:
    return isinstance(value, Term) and value.is_tensor


def _reduced(loss, reduction):
    return {0: lambda: loss, 1: loss.mean, 2: loss.sum}[structural(reduction, "the reduction of a loss")]()
