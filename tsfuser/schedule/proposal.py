"""What a scheduler returns: how it would compute a segment.

In: the decisions of one scheduler. Out: a `Proposal`, whose `stages` gives the kernels. Example:
`propose(call, segment, GPU).params`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..segment import Allocations, Segment
from .loops import Schedule


@dataclass(frozen=True)
class Stage:
    """One kernel: what it computes, how, and the parameters from which the schedule was made."""

    segment: Segment
    schedule: Schedule
    params: object


@dataclass(frozen=True)
class Proposal:
    """`params`: what the scheduler decided, for dumps and tests. `stages(allocations)`: the kernels that
    compute the segment, in the order of their launches; it adds the temporaries between them to the
    allocations. `rereads_are_free`: data stays on the chip until its last use, so another pass over it reads
    no memory."""

    params: object
    stages: Callable[[Allocations], list[Stage]] = field(repr=False, compare=False)
    rereads_are_free: bool = False
