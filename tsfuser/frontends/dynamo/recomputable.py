"""Which ops torch's min-cut partitioner may have the backward compute again, and takes for fused.

In: torch's own list, of what inductor does at the speed of memory. Out: the same with our ops, while a graph
is divided. Example: within `recomputable()` a dropout by a seed is computed again rather than saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._functorch import partitioners

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


def _with_ours(found: partitioners.OpTypes) -> partitioners.OpTypes:
    ours = type(found.recomputable_ops)(_RECOMPUTABLE)
    return dataclasses.replace(
        found, fusible_ops=found.fusible_ops | ours, recomputable_ops=found.recomputable_ops | ours
    )
