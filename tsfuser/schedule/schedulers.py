"""All schedulers in one ordered tuple.

In: a Segment. Out: the Proposal of the first scheduler that takes it. Example:
`propose(call, segment, GPU).stages(allocations)`.
"""

from __future__ import annotations

from ..ir.call import Call, once_a_call
from ..segment import Segment
from . import outer_rows, pointwise, reduction, rows, scans, short_rows, transpose, transposed_reduction
from .machine import Machine
from .proposal import Proposal

#: Tried in this order for segments without scans, of which `scans` takes all. Each has `propose(call,
#: segment, machine)`, which returns a Proposal or the reason why it has none. Those for transposed
#: operands and short rows come before the one that takes every pointwise segment; those for results that
#: depend on reductions come before the one for plain reductions.
SCHEDULERS = (transpose, short_rows, pointwise, outer_rows, rows, transposed_reduction, reduction)


@once_a_call
def propose(call: Call, segment: Segment, machine: Machine) -> Proposal | str:
    """The first proposal for `segment` as one pass over memory, or the reasons why no scheduler makes one."""
    if segment.scans:
        found = scans.propose(call, segment, machine)
        return found if isinstance(found, Proposal) else f"scans: {found}"
    reasons = []
    for scheduler in SCHEDULERS:
        found = scheduler.propose(call, segment, machine)
        if isinstance(found, Proposal):
            return found
        reasons.append(f"{scheduler.__name__.rpartition('.')[2]}: {found}")
    return "; ".join(reasons)


def is_one_pass(call: Call, segment: Segment, machine: Machine) -> bool:
    """Whether some scheduler takes `segment`."""
    return isinstance(propose(call, segment, machine), Proposal)
