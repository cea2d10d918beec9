"""What is made of the graphs of torch.compile, for `tsfuser.explain`, counters and logs.

In: from compile.py, each graph of TorchDynamo; from program.py, what was made of each graph that AOTAutograd
derived from it. Out: an `Outcome` for each, to every `watching` block. Example:

    with watching() as (graphs, outcomes):
        compiled(x)
    outcomes[0].origin.role      # "inference"
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...grouping.support import Refusals
from . import counts
from .translation.translate import Translation

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Source:
    """A graph of TorchDynamo, numbered through the process. `broken`: why there is a graph break after it, or
    "". `stack`: where the break is, as in `traceback`, outermost call first."""

    number: int
    broken: str = ""
    stack: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a graph of AOTAutograd comes from. `role`: forward, backward or inference."""

    source: Source
    role: str

    def __str__(self) -> str:
        return f"graph {self.source.number}, {self.role}"


@dataclass(frozen=True)
class Outcome:
    """What was made of a graph of AOTAutograd.

    `module` runs: the graph itself, whose only program has the name "", or a graph that calls submodules.
    `programs`: name -> (typed graph with groups, why nodes are in none). `foreign`: name of a node that
    Python runs -> why. `failure`: why the whole graph runs unfused, or ""."""

    origin: Origin
    module: fx.GraphModule
    programs: Mapping[str, tuple[Translation, Refusals]]
    foreign: Mapping[str, str]
    failure: str = ""


_lock = threading.Lock()
_watchers: list[tuple[list[Source], list[Outcome]]] = []  # registry


@contextlib.contextmanager
def watching() -> Iterator[tuple[list[Source], list[Outcome]]]:
    """Collects the graphs and outcomes that come while the block runs, from any thread."""
    seen: tuple[list[Source], list[Outcome]] = ([], [])
    with _lock:
        _watchers.append(seen)
    try:
        yield seen
    finally:
        with _lock:
            _watchers[:] = [other for other in _watchers if other is not seen]


def is_watched() -> bool:
    """Whether somebody collects graphs and outcomes."""
    return bool(_watchers)


def arrived(module: fx.GraphModule) -> Source:
    """Registers a new graph of TorchDynamo."""
    reason = getattr(module, "compile_subgraph_reason", None)
    broken = reason is not None and reason.graph_break
    source = Source(
        next(_numbers), reason.reason if broken else "", tuple(reason.user_stack) if broken else ()
    )
    for sources, _ in tuple(_watchers):
        sources.append(source)
    return source


def done(outcome: Outcome) -> None:
    """Registers what was made of a graph of AOTAutograd."""
    counts.count(outcome.foreign.values(), outcome.failure)
    for _, outcomes in tuple(_watchers):
        outcomes.append(outcome)
