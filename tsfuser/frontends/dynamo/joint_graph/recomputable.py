"""Which ops the backward may compute again, and which ops are fused, for torch's min-cut partitioner.

In: torch's own lists of ops that inductor runs at the speed of memory. Out: the same lists with our ops,
while a graph is divided. Example: within `recomputable()` a dropout by a seed is computed again, not saved.
So is a `cat`: our kernels read each element from the operand that has it, which inductor's cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners

from ....ops import table
from ..fx.types import hint
from . import norms, sizes_only, softmaxes

#: Ops of ours that cost no more than reading their operands.
_RECOMPUTABLE = (torch.ops.tsfuser.seeded_dropout,)
_FAMILIES = ("activations", "gradients", "joins", "pointwise")  # of rows that are, too
#: They pick elements of an operand that their kernel computes.
_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)

_mine = threading.local()  # `partitioning`: whether this thread divides a graph of ours


@contextlib.contextmanager
def recomputable() -> Iterator[None]:
    """A context in which the partitioner uses our lists, on this thread. torch has no argument for that."""
    _install()
    before = getattr(_mine, "partitioning", False)
    _mine.partitioning = True
    try:
        yield
    finally:
        _mine.partitioning = before


@cache
def _install() -> None:
    """Makes the partitioner ask for the lists here. Only the first call does anything."""
    torchs = partitioners.get_default_op_list

    def op_list() -> Any:
        found = torchs()
        return _with_ours(found) if getattr(_mine, "partitioning", False) else found

    partitioners.get_default_op_list = op_list


class _OpTypes(partitioners.OpTypes):
    """torch's lists and ours."""

    def is_view(self, node: fx.Node) -> bool:
        """Whether to compute the node again costs nothing, whoever reads it."""
        return sizes_only.is_made_here(node) or super().is_view(node)

    def is_fusible(self, node: fx.Node) -> bool:
        """Whether the node's operands and result need not be stored."""
        if softmaxes.reads_result(node) or node.target in _LOSSES or super().is_fusible(node):
            return True
        operand = norms.operand_of(node)
        return operand is not None and self._may_be_computed(operand, norms.is_gradient(node))

    def _may_be_computed(self, operand: fx.Node, in_backward: bool) -> bool:
        """Whether a norm or its gradient may compute its operand from the tensors that make the operand.
        The gradient may if they are together at most twice as large as the operand: to store the operand and
        to read it moves as many bytes. A norm may if to save them takes no more memory than to save the
        operand. Inputs of the program take none. torch counts a value that need not be stored twice, so it
        would save larger tensors instead."""
        size = _size(operand)
        large = [x for x in operand.all_input_nodes if 4 * _size(x) > size]
        if not large or not self.is_recomputable(operand):
            return False
        if in_backward:
            return sum(map(_size, large)) <= 2 * size
        return sum(_size(x) for x in large if x.op != "placeholder") <= size


def _size(node: fx.Node) -> int:
    """Bytes of the node's value; 0 if data decides its sizes."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        return 0
    sizes = [hint(s) for s in found.shape]
    return 0 if None in sizes else math.prod(sizes) * found.element_size()


def _with_ours(found: partitioners.OpTypes) -> partitioners.OpTypes:
    make = type(found.recomputable_ops)
    views = make(_packets("views"))
    ours = make((*_RECOMPUTABLE, *_packets(*_FAMILIES))) | views
    lists = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    for name, more in {"fusible_ops": ours, "recomputable_ops": ours, "view_ops": views}.items():
        lists[name] = lists[name] | more
    return _OpTypes(**lists)


@cache
def _packets(*families: str) -> tuple[Any, ...]:
    """Torch's ops that have rows of these families."""
    names = (row.name.split("::") for row in table.all_rows() if row.family in families)
    found = (getattr(getattr(torch.ops, namespace), name, None) for namespace, name in names)
    return tuple(packet for packet in found if packet is not None)
