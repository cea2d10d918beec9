"""Passes: named steps over graphs, in ordered lists.

In: what the steps of a list share (`Work`), and the list. Out: the same, changed in place. Each list argues
the places of its steps. Example: `run(work, (Pass("tidy", tidy), Pass("name_groups", name_groups)))`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import log


class Work(Protocol):
    """What steps share. `str(work)` is what a dump shows: its graphs."""

    @property
    def is_done(self) -> bool:
        """Whether the steps that are left would find nothing to do."""


@dataclass(frozen=True)
class Pass:
    """One step: what it is called in logs, and what it does to the work."""

    name: str
    run: Callable[[Any], object]


def run(work: Work, passes: Sequence[Pass]) -> None:
    """Runs `passes`, up to the one after which the work is done. The log `graph_fuser` has the graphs after
    each that changed them at level `>`, and the time of each at `>>`."""
    with no_collection():
        _run(work, passes)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """The collector of cycles waits: a pass makes several objects a node, hardly a cycle, and each time that
    the collector looks at them it may look at all of torch's, too (a fifth of the time for 10,000 nodes)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """An exception from inside carries the name of the pass, for the warning (`planning.failures`)."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "failed_pass"):
            error.failed_pass = name  # type: ignore[attr-defined]
        raise


def _run(work: Work, passes: Sequence[Pass]) -> None:
    before = str(work) if log.enabled("graph_fuser", log.UPDATE) else ""
    for step in passes:
        start = time.perf_counter()
        with named(step.name):
            step.run(work)
        took = (time.perf_counter() - start) * 1e3
        if log.enabled("graph_fuser", log.DEBUG):
            log.write("graph_fuser", f"{step.name} took {took:.1f} ms", "", log.DEBUG)
        if log.enabled("graph_fuser", log.UPDATE) and (after := str(work)) != before:
            log.write("graph_fuser", f"After {step.name}", after, log.UPDATE)
            before = after
        if work.is_done:
            return
