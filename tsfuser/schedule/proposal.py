"""What a scheduler hands in: how it would compute a segment.

In: the decisions of one scheduler. Out: a `Proposal`, whose `stages` are the kernels to be. Example:
`propose(call, segment, GPU).params`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..segment import Allocations, Segment
from .loops import Schedule


@dataclass(frozen=True)
class Stage:
    """One kernel to be: what it computes, how, and by which parameters."""

    segment: Segment
    schedule: Schedule
    params: object


@dataclass(frozen=True)
class Proposal:
    """`params`: what the scheduler decided, for dumps and tests. `stages`: gives the kernels that compute the
    segment, in the order of their launches; temporaries between them are added to the allocations.
    `rereads_are_free`: what a kernel reads stays on the chip until its last use, so another pass over it
    costs no memory."""

    params: object
    stages: Callable[[Allocations], list[Stage]] = field(repr=False, compare=False)
    rereads_are_free: bool = False
