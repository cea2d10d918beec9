"""From a Fusion to the kernels that compute it.

In: a Fusion. Out: the stages of all its segments, in the order of their launches, and the tensors that the
plan has to allocate for them. Example: `stages, allocations = fusion_stages(call, fusion, GPU)`.
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir.call import Call
from ..ir.fusion import Fusion
from ..segment import Allocations, BufferKind, segments
from .columns_first import by_columns
from .machine import Machine
from .moments import expanded
from .proposal import Proposal, Stage
from .quotients import with_shared_divisors
from .scan_levels import in_levels
from .schedulers import is_one_pass, propose
from .stored_sums import from_memory
from .tails import joined


def fusion_stages(
    call: Call, fusion: Fusion, machine: Machine
) -> tuple[list[tuple[int, Stage]], Allocations]:
    """(number of the segment, stage) for each kernel, and the allocations. Raises Refusal if no scheduler
    takes a segment."""
    allocations = Allocations(len(fusion.outputs))
    found = []
    parts = segments(
        call,
        in_levels(
            expanded(call, by_columns(call, from_memory(call, joined(fusion), machine), machine), machine)
        ),
        allocations,
        lambda s: is_one_pass(call, s, machine),
    )
    for number, segment in enumerate(parts):
        segment = with_shared_divisors(segment) if machine.has_fast_forms else segment
        proposal = propose(call, segment, machine)
        if not isinstance(proposal, Proposal):
            raise Refusal(f"no schedule takes {segment.name} ({proposal})")
        found += [(number, stage) for stage in proposal.stages(allocations)]
    _check_updates([stage for _, stage in found])
    return found, allocations


def _check_updates(stages: list[Stage]) -> None:
    """Raises Refusal if a kernel would read an argument that an earlier kernel has changed."""
    changed: set[int] = set()
    for stage in stages:
        loads = {b.index for b in stage.segment.loads if b.kind is BufferKind.INPUT}
        if not changed.isdisjoint(loads | {op.table for op in stage.segment.lookups}):
            raise Refusal("a tensor that is changed in place would be read afterwards")
        changed |= {b.index for b in stage.segment.stores if b.kind is BufferKind.UPDATE}
