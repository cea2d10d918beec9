"""Derivatives of views, joins and reads at places."""

from __future__ import annotations

from ...errors import Refusal
from ...graph.wrapper import LIST, inputs
from ..terms import Term
from .table import items_of, known_rank, rule, structural


@rule("aten::view", "aten::reshape", "aten::flatten", "aten::unflatten", "aten::view_as", "aten::reshape_as")
@rule("aten::squeeze", "aten::_unsafe_view")
def reshaped(grad, self):
    return grad.reshape(self.sizes)


@rule("aten::unsqueeze")
def unsqueeze(grad, dim):
    return grad.squeeze(dim)


@rule("aten::transpose")
def transpose(grad, dim0, dim1):
    return grad.transpose(dim0, dim1)


@rule("aten::swapaxes")
def swapaxes(grad, axis0, axis1):
    return grad.transpose(axis0, axis1)


@rule("aten::swapdims")
def swapdims(grad, dim0, dim1):
    return grad.transpose(dim0, dim1)


@rule("aten::t", "aten::numpy_T", "aten::mT")
def t(grad, self):
    return grad if known_rank(self) < 2 else grad.transpose(-2, -1)


@rule("aten::permute")
def permute(grad, dims):
    dims = [d % len(dims) for d in structural(dims, "the order of a permute")]
    if sorted(dims) != list(range(len(dims))):
        raise Refusal("a permutation that does not name every dim once is an error in eager")
    return grad.permute([dims.index(d) for d in range(len(dims))])


@rule("aten::movedim")
def movedim(grad, source, destination):
    return grad.movedim(destination, source)


@rule("aten::select")
def select(grad, self, dim, index):
    return grad.select_backward(self.sizes, dim, index)


@rule("aten::slice")
def slice_(grad, self, dim, start, end, step):
    start, end = 0 if start is None else start, 2**63 - 1 if end is None else end
    return grad.slice_backward(self.sizes, dim, start, end, step)


@rule("aten::narrow")
def narrow(grad, self, dim, start, length):
    if getattr(start, "is_tensor", False):
        start = grad.writer("aten::Int", start)
    if not isinstance(start, int):  # from the end, where it is negative
        start = grad.writer("aten::remainder", start, grad.writer("prim::max", self.size(dim), 1))
    elif start < 0:
        start = self.size(dim) + start
    return grad.slice_backward(self.sizes, dim, start, start + length, 1)


@rule("aten::diagonal")
def diagonal(grad, self, offset, dim1, dim2):
    return grad.diagonal_backward(self.sizes, offset, dim1, dim2)


@rule("aten::unfold")
def unfold(grad, self, dimension, size, step):
    return grad.unfold_backward(self.sizes, dimension, size, step)


@rule("aten::tril")
def tril(grad, diagonal):
    return grad.tril(diagonal)


@rule("aten::triu")
def triu(grad, diagonal):
    return grad.triu(diagonal)


@rule("aten::flip")
def flip(grad, dims):
    return grad.flip(dims)


@rule("aten::roll")
def roll(grad, shifts, dims):
    return grad.roll([-shift for shift in items_of(shifts, "the shifts of a roll")], dims)


@rule("aten::repeat")
def repeat(grad, self, repeats):
    """Each dim becomes two, of which the first, that of the copies, is summed."""
    repeats = structural(repeats, "the repeats")
    added = len(repeats) - known_rank(self)
    sizes, summed = list(repeats[:added]), list(range(added))
    for d, times in enumerate(repeats[added:]):
        summed.append(len(sizes))
        sizes += [times, self.size(d)]
    return grad.reshape(sizes).sum(summed) if sizes else grad


# ---- joins, and what takes them apart


@rule("aten::cat", "aten::concat", of="tensors")
def cat(grad, tensors, dim, result):
    """A tensor of sizes [0] joins those of any rank, for old programs."""
    start, shares = 0, []
    for tensor in tensors:
        if known_rank(tensor) == 1 and known_rank(result) != 1:
            shares.append(grad.new_zeros(tensor.sizes))
            continue
        length = tensor.size(dim)
        shares.append(grad.narrow(dim, start, length))
        start = length + start
    return shares


@rule("aten::stack", of="tensors")
def stack(grad, tensors, dim):
    return [grad.select(dim, i) for i in range(len(tensors))]


@rule("aten::chunk", "aten::split", "aten::split_with_sizes", "aten::tensor_split", "aten::unsafe_chunk")
def split(grads, results, dim):
    return _joined(grads, results, "aten::cat", dim)


@rule("aten::unbind")
def unbind(grads, results, dim):
    return _joined(grads, results, "aten::stack", dim)


def _joined(grads, results, kind, dim):
    """Parts without a gradient have zeros."""
    given = next(grad for grad in grads if grad is not None)
    parts = [given.new_zeros(part.sizes) if grad is None else grad for grad, part in zip(grads, results)]
    return results[0].writer(kind, parts, dim)


@rule("aten::broadcast_tensors", of="tensors")
def broadcast_tensors(grads, tensors):
    return [g and g.writer("aten::_grad_sum_to_size", g, t.sizes) for g, t in zip(grads, tensors)]


# ---- at places


@rule("aten::index_select")
def index_select(grad, self, dim, index):
    return grad.new_zeros(self.sizes).index_add(dim, index, grad)


@rule("aten::gather")
def gather(grad, self, dim, index):
    return grad.writer("tsfuser::gather_backward", grad, self.sizes, dim, index)


@rule("aten::index")
def index(grad, self, indices):
    """A group may compute that of one tensor of places."""
    node = indices.value.node()
    if node.kind() == LIST and node.inputsSize() == 1:
        (places,) = (Term(grad.writer, v) for v in inputs(node))
        if places.facts.dtype in ("int64", "int32"):
            return grad.writer("tsfuser::index_backward", grad, self.sizes, places)
    return grad.new_zeros(self.sizes).index_put(indices, grad, True)


@rule("aten::index_put", of="self values")
def index_put(grad, indices, values, accumulate):
    """Where values were put, the gradient is theirs."""
    by_values = grad.writer("aten::_grad_sum_to_size", grad.index(indices), values.sizes)
    if structural(accumulate, "accumulate"):
        return grad, by_values
    return grad.index_put(indices, grad.new_zeros(values.sizes), False), by_values


@rule("aten::masked_select")
def masked_select(grad, self, mask):
    """Operand and mask are broadcast."""
    read = mask.where(grad.new_zeros(self.sizes), 0).masked_scatter(mask, grad)
    return grad.writer("aten::_grad_sum_to_size", read, self.sizes)


@rule("aten::scatter", of="self src")
def scatter(grad, dim, index):
    return grad.scatter(dim, index, 0), grad.gather(dim, index)


@rule("aten::scatter_add", of="self src")
def scatter_add(grad, dim, index):
    return grad, grad.gather(dim, index)


@rule("aten::index_add", of="self source")
def index_add(grad, dim, index, alpha):
    return grad, grad.index_select(dim, index) * alpha


@rule("aten::index_fill", of="self value")
def index_fill(grad, dim, index):
    places = index._unique(False)[0]
    return grad.index_fill(dim, index, 0), grad.index_select(dim, places).sum()


@rule("aten::index_copy", of="self source")
def index_copy(grad, dim, index):
    return grad.index_fill(dim, index, 0), grad.index_select(dim, index)


@rule("aten::embedding", of="weight")
def embedding(grad, weight, indices, padding_idx, scale_grad_by_freq):
    return grad.embedding_dense_backward(indices, weight.size(0), padding_idx, scale_grad_by_freq)


# ---- paddings


@rule("aten::constant_pad_nd")
def constant_pad_nd(grad, pad):
    return grad.constant_pad_nd([-width for width in items_of(pad, "the widths of a pad")], 0)


@rule("aten::slice_backward", of="grad_output")
def slice_backward(grad, dim, start, end, step):
    return grad.slice(dim, start, end, step)


@rule("aten::select_backward", of="grad_output")
def select_backward(grad, dim, index):
    return grad.select(dim, index)


def _padding(kind):
    def write(grad, self, padding, _kind=f"aten::{kind}_backward"):
        return grad.writer(_kind, grad, self, padding)

    rule(f"aten::{kind}")(write)


for _kind in ("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"):
    _padding(_kind)
for _kind in ("replication_pad1d", "replication_pad2d", "replication_pad3d"):
    _padding(_kind)


@rule("aten::take_along_dim")
def take_along_dim(grad, self, indices, dim):
    """Sizes broadcast but in that dim. No index is negative (expansions.py)."""
    dims, dim = range(known_rank(self)), structural(dim, "the dim")
    sizes = [self.size(d) if d == dim % len(dims) else grad.size(d) for d in dims]
    full = grad.new_zeros(sizes).scatter_add(dim, indices.expand(grad.sizes), grad)
    return grad.writer("aten::_grad_sum_to_size", full, self.sizes)


@rule("tsfuser::checked_batch", of="batch")
def checked_batch(grad):
    """It is its operand."""
    return grad
