"""Which ops torch's min-cut partitioner may have the backward compute again, and takes for fused.

In: torch's own list, of what inductor does at the speed of memory. Out: the same with our ops, while a graph
is divided. Example: within `recomputable()` a dropout by a seed is computed again rather than saved.
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

from . import norms, softmaxes
from .types import hint

#: Computed from elements alone, at the cost of reading them.
_RECOMPUTABLE = (torch.ops.tsfuser.seeded_dropout,)

_mine = threading.local()  # `partitioning`: whether this thread divides a graph of ours


@contextlib.contextmanager
def recomputable() -> Iterator[None]:
    """While a graph is divided by this thread; torch has no argument for it."""
    _install()
    before = getattr(_mine, "partitioning", False)
    _mine.partitioning = True
    try:
        yield
    finally:
        _mine.partitioning = before


@cache
def _install() -> None:
    """Has the partitioner ask here, once."""
    torchs = partitioners.get_default_op_list

    def op_list() -> Any:
        found = torchs()
        return _with_ours(found) if getattr(_mine, "partitioning", False) else found

    partitioners.get_default_op_list = op_list


class _OpTypes(partitioners.OpTypes):
    """Torch's lists, and ours."""

    def is_fusible(self, node: fx.Node) -> bool:
        """Whether what goes into the node, or comes out, need not be stored. A norm's operand need not where
        it is computed from one tensor of its size: to read that one instead costs no more."""
        if softmaxes.reads_result(node):
            return True
        operand = norms.operand_of(node)
        return super().is_fusible(node) or (operand is not None and self._is_of_one(operand))

    def _is_of_one(self, node: fx.Node) -> bool:
        size = _size(node)
        large = [x for x in node.all_input_nodes if 4 * _size(x) > size]
        return len(large) == 1 and self.is_recomputable(node)


def _size(node: fx.Node) -> int:
    """In bytes; 0 where data decide."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        return 0
    sizes = [hint(s) for s in found.shape]
    return 0 if None in sizes else math.prod(sizes) * found.element_size()  # type: ignore[arg-type]


def _with_ours(found: partitioners.OpTypes) -> partitioners.OpTypes:
    ours = type(found.recomputable_ops)(_RECOMPUTABLE)
    lists = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    for name in ("fusible_ops", "recomputable_ops"):
        lists[name] = lists[name] | ours
    return _OpTypes(**lists)
