"""The order of lowering.

In: Segment, Schedule. Out: the finished Kernel. `vectorize` comes before `hoist`, since a vector load of a
broadcast operand leaves the row loop as a whole; `bound` after `hoist`, since a loop's bound may only use
what is computed before it; `stage` after them, since it splits loops, and `overlap` and `refill` then move
their loads and what comes behind them; `branch` and `whole_windows` last, since no other pass need know of
their branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..schedule.loops import Schedule
from ..segment import Segment
from .branches import branch
from .host import chunk, draw, peel, store_once
from .kernel import Kernel
from .nest import nest
from .overlap import overlap
from .passes import bound, flatten, hoist
from .prefetch import refill
from .rounds import cut_rounds
from .stage import stage
from .vectorize import vectorize
from .whole_windows import whole_windows

PASSES: tuple[tuple[str, Callable], ...] = (
    ("flatten", flatten),
    ("vectorize", vectorize),
    ("hoist", hoist),
    ("cut_rounds", cut_rounds),  # after `hoist`: the remaining rounds might not find what it moves
    ("peel", peel),
    ("chunk", chunk),
    ("bound", bound),
    ("store_once", store_once),
    ("stage", stage),
    ("overlap", overlap),
    ("refill", refill),
    ("draw", draw),
    ("branch", branch),
    ("whole_windows", whole_windows),
)

ON_VECTORS = (
    "peel",
    "chunk",
    "store_once",
    "draw",
    "whole_windows",
)  # passes for loops that a compiler vectorises
ON_THREADS = ("cut_rounds",)  # passes for the others


def lower(
    segment: Segment, schedule: Schedule, name: str, after: Callable[[str, Kernel], None] | None = None
) -> Kernel:
    """The kernel that computes `segment` as `schedule` says. `after(step, kernel)` sees every intermediate
    form, for dumps and checks."""
    kernel = nest(segment, schedule, name)
    if after:
        after("nest", kernel)
    known = {x.name: x.extent.a for x in schedule.loops if x.extent.is_const}
    for step, run in PASSES:
        if step in (ON_THREADS if schedule.is_vectorised else ON_VECTORS):
            continue
        rounds = (known, kernel.index) if run is cut_rounds else ()
        kernel = replace(kernel, body=run(kernel.body, *rounds))
        if after:
            after(step, kernel)
    return kernel
