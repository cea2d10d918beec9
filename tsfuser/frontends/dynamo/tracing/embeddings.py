"""Gradients of embedding tables on a GPU: rows are added by atomics, as in inductor. torch's own op sorts the
indices, which is slower.

In: an `embedding_dense_backward` that is traced, or an `_embedding_bag_backward`; later the typed graph. Out:
its parts: groups take the mask and the casts, and `index_add` works in place on new zeros. Example, with
row 0 for padding:

    embedding_dense_backward(g, indices, 50, 0, False)
becomes
    source = masked_fill(g, unsqueeze(eq(indices, 0), -1), 0)
    index_add_(new_zeros(source, [50, 8]), 0, view(indices, [6]), view(source, [6, 8]))

The order of the additions may differ from call to call. So torch's op stays if torch is asked for
deterministic algorithms.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ....graph.wrapper import Graph, inputs
from ....grouping.support import Refusals
from ....ops import without_row
from ..fx.types import hint

#: Device types on which torch's op sorts.
SORTING = ("cuda",)

_EXACT = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
#: The most elements of a 16-bit table. Its sums are in float32: for a larger table, clearing and rounding
#: them takes longer than sorting.
_MOST_ROUNDED = 1 << 25
#: Elements that are read from the gradients of bags: there is one row for each that is in a bag.
_MOST_READ = 1 << 25
_SUM, _MEAN = range(2)  # modes of bags


def embedding_backward(
    gradient: torch.Tensor, indices: torch.Tensor, rows: Any, padding: Any, by_frequency: bool
) -> Any:
    """The gradient of a table of `rows` rows, or NotImplemented if torch's op is better."""
    if gradient.device.type not in SORTING or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    width = gradient.shape[-1]
    if by_frequency or not isinstance(padding, int) or not _is_added_fast(gradient.dtype, rows, width):
        return NotImplemented
    if any(free_unbacked_symbols(x) for x in (gradient, indices)):
        return NotImplemented  # whether a view is possible depends on data
    return _added(_wide(gradient), indices, rows, padding, gradient.dtype)


def bag_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    bag_sizes: torch.Tensor,
    maxima: torch.Tensor,
    rows: Any,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    weights: torch.Tensor | None,
    padding: int = -1,
) -> Any:
    """The gradient of a table whose rows are summed up, or averaged, by bags: each bag's is added to all rows
    that are in it. NotImplemented where torch's op serves better, and for maxima, which it adds, too."""
    if gradient.device.type not in SORTING or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    width = gradient.shape[-1]
    if by_frequency or sparse or mode not in (_SUM, _MEAN) or not _is_added_fast(gradient.dtype, rows, width):
        return NotImplemented
    if any(free_unbacked_symbols(x) for x in (gradient, indices, bag_of)):
        return NotImplemented
    if bag_of.numel() != indices.numel() or (hint(indices.shape[0] * width) or 0) > _MOST_READ:
        return NotImplemented  # a CPU does without `bag_of` at times
    source = _wide(gradient)
    if mode == _MEAN:
        source = source / bag_sizes[: gradient.shape[0]].clamp(min=1).unsqueeze(-1)
    source = source.index_select(0, bag_of)
    if weights is not None:
        source = source * weights.unsqueeze(-1)
    return _added(source, indices, rows, padding, gradient.dtype)


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype in _HALF else gradient


def _added(source: torch.Tensor, indices: torch.Tensor, rows: Any, padding: int, dtype: torch.dtype) -> Any:
    """New zeros of `rows` rows, plus the rows of the source but those for the padding."""
    if padding >= 0:
        source = source.masked_fill((indices == padding).unsqueeze(-1), 0)
    count, width = prod(indices.shape), source.shape[-1]
    source = source.reshape(count, width)
    add = torch.ops.aten.index_add.default
    return add(source.new_zeros((rows, width)), 0, indices.reshape(count), source).to(dtype)


def _is_added_fast(dtype: torch.dtype, rows: Any, width: Any) -> bool:
    if dtype in _EXACT:
        return True
    known = type(rows) is int and type(width) is int
    return dtype in _HALF and known and rows * width <= _MOST_ROUNDED


def add_in_place(graph: Graph, refusals: Refusals) -> None:
    """Makes `index_add` work in place if its operand is new zeros that nobody else reads; otherwise it would
    copy them. Changes the graph's top block, whose nodes must stay in their order from then on."""
    for node in graph.findAllNodes("aten::index_add", False):
        zeros = node.inputsAt(0)
        if zeros.node().kind() not in without_row.ZEROS or len(zeros.uses()) != 1:
            continue
        made = graph.create("aten::index_add_", inputs(node), 1)
        made.copyMetadata(node)
        made.insertBefore(node)
        refusals.add(made, refusals.reason(node))
        node.output().replaceAllUsesWith(zeros)  # an output of an op in place might be a view of an input
        node.destroy()
