"""How a segment is computed: named loops and where tensors live. A scheduler a file: `choose`, `apply`.

In: a Segment. Out: `choose` gives the stages that compute it, each one kernel. Example: `[stage] = choose(call, segment, GPU)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.call import Call
from ..segment import Allocations, Segment
from . import pointwise, reduction, rows, transpose
from .domain import domain
from .following import scheduler
from .loops import Schedule
from .machine import Machine
from .moments import expanded

__all__ = ["Stage", "accepts", "choose", "expanded"]


@dataclass(frozen=True)
class Stage:
    """One kernel to be: what it computes, how, and by which parameters."""

    segment: Segment
    schedule: Schedule
    params: object


def choose(call: Call, segment: Segment, machine: Machine, allocations: Allocations) -> list[Stage]:
    """The first scheduler that takes the segment. Raises Refusal where none does."""
    if segment.reductions and rows.follows(segment):
        return [Stage(*stage) for stage in scheduler(call, segment, machine).stages(call, segment, machine, allocations)]
    if segment.reductions and rows.suits(call, segment, machine):
        return [Stage(*stage) for stage in rows.stages(call, segment, machine, allocations)]
    if segment.reductions:
        return [Stage(*stage) for stage in reduction.stages(call, segment, machine, allocations)]
    space = domain(call, segment)
    params = transpose.choose(call, segment, space, machine)
    if params is not None:
        return [Stage(segment, transpose.apply(space, params, machine), params)]
    params = pointwise.choose(call, segment, space, machine)
    return [Stage(segment, pointwise.apply(space, params, machine), params)]


def accepts(call: Call, segment: Segment, machine: Machine) -> "str | None":
    """Why a segment in which results depend on reductions is not one kernel; None if it is."""
    return scheduler(call, segment, machine).accepts(call, segment, machine)
