"""Counters and warnings.

In: what C++ and the targets count, and the failures they report. Out: `stats()` for the user, one warning
for each failure. Example: `stats()["fallbacks"]` -> `{"aten::add of uint8 tensors is not supported": 3}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import _C, errors, options
from ..frontends.dynamo import counts
from ..frontends.torchscript import stored_passes
from ..planning import ahead, background, failures
from ..planning import compile as pipeline
from ..target import counters
from . import unfused_functions
from .source import Sources

_HINT = "The result is right, but slower; PYTORCH_NVFUSER_DISABLE=fallback raises the error instead."


def stats() -> Mapping[str, Any]:
    """`groups`: how many groups there are. And counts since the import or the last `reset()`: `plans_built`,
    `exact_hits`, `class_hits`, `launches`, `python_calls` (how often C++ called Python to group a graph, plan
    or warn), `kernels_compiled`, `disk_hits` (kernels from disk), `plans_read` (those of `plans_built` that
    another process, or group, had made: they came from disk), which are integers, and `fallbacks` (reason ->
    calls). Of torch.compile: `graphs`, forward and backward ones, that were translated or read,
    `graphs_read`, those that came from disk, and `graph_calls` (integers; a call of a graph
    that Python cuts counts once for each piece); `left_to_python` (reason -> nodes) and `graphs_unfused`
    (reason -> graphs). `passes_failed` (failure -> graphs): passes that gave up by a mistake of tsfuser's;
    the graphs run unfused. `optimised_too_early` (function -> graphs): functions that torch optimised while
    fusion was off, which run unfused; a reset does not change it."""
    early = {"optimised_too_early": unfused_functions.names()}
    return {**_C.stats(), **counters.snapshot(), **counts.snapshot(), **failures.snapshot(), **early}


def reset() -> None:
    """Forget all plans and loaded kernels, and set the counters to 0. Safe while other threads run groups.
    Groups stay, as functions hold them: `groups` in `stats()` is as before, and their next calls make new
    plans, or read them from disk: what is there stays."""
    _C.reset()
    ahead.forget()
    background.forget()
    stored_passes.forget()
    pipeline.forget()
    counters.reset()
    counts.reset()
    failures.reset()


def warn(kind: str, group_id: int, reason: str) -> None:
    """Called by C++, once for each new failure of a group: warns with the reason, unchanged. Silent where
    the failure is raised anyway."""
    if not options.fallback_enabled():
        return
    nodes = [node for node in _C.group_graph(group_id).nodes() if node.kind() != "prim::Constant"]
    names = ", ".join(dict.fromkeys(node.kind() for node in nodes))
    file, line = _line_of_program(nodes)
    errors.warn(f"a fusion group ({names}) runs unfused: {reason}. {_HINT}", file=file, line=line)


def _line_of_program(nodes: list[torch._C.Node]) -> tuple[str, int]:
    """Where the program has the first of the nodes that it has; ("", 0) where it has none."""
    sources = Sources(torch._C.Graph())
    places = (sources.place(node) for node in nodes)
    return next(((place.file, place.line) for place in places if place.file), ("", 0))
