"""What stays where between the sweeps over a row.

In: a segment and its schedule. Out: the schedule with a `Placement` for each value that is computed once and
used by several sweeps; every other value is computed again by each sweep that needs it. Example, softmax in
registers: `Placement('exp_4', 'register')`, since an exponential costs more than a register.
"""

from __future__ import annotations

from .. import ops  # noqa: F401  it defines the symbols
from ..ir.fusion import Lookup, Op, Pointwise, Random
from ..ir.symbols import find
from ..segment import Segment
from .loops import Schedule
from .sweeps import Sweeps, sweeps_of


def is_costly(op: Op) -> bool:
    """Whether what `op` computes is worth a register or memory where it is needed again."""
    return isinstance(op, Pointwise) and not find(op.symbol).cheap


def costly_terms(segment: Segment) -> int:
    """Values that cost much and on which a reduction depends: registers keep them for what follows."""
    wanted = {v.name for op in segment.reductions for v in op.operands}
    found = 0
    for op in reversed(segment.ops):
        if op.output.name in wanted:
            wanted |= {v.name for v in op.operands}
            found += is_costly(op)
    return found


def with_saved_values(segment: Segment, schedule: Schedule, where: str) -> Schedule:
    """`schedule` with the costly values that several sweeps need saved in `where`, `register` or `scratch`:
    registers hold them where they hold the row anyway."""
    loops = [x for x in schedule.loops_of_a_thread if not (x.extent.is_const and x.extent.a == 1)]
    # without loops all sweeps are one scope, and what one has computed the next can read
    if where == "register" and (not loops or any(x.bind == "serial" for x in loops)):
        return schedule
    sweeps = sweeps_of(segment, schedule)
    names = _needed_again(sweeps, where) - _computed_by_pairs(sweeps, schedule)
    return schedule.with_values_in(where, [op.output.name for op in segment.ops if op.output.name in names])


def _needed_again(sweeps: Sweeps, where: str) -> set[str]:
    """Names of the values that several sweeps need and that cost much to compute, or cannot be computed
    again at all."""
    seen: set[str] = set()
    found: set[str] = set()
    for number in sweeps.numbers:
        costly = {
            op.output.name
            for op in sweeps.ops_for(sweeps.goals(number), found)
            if is_costly(op) or isinstance(op, Lookup) or (where == "scratch" and isinstance(op, Random))
        }
        found |= costly & seen
        seen |= costly
    return found


def _computed_by_pairs(sweeps: Sweeps, schedule: Schedule) -> set[str]:
    """Names of the values behind a sum whose maximum the blocks combine together with it: they are of the
    maximum of one block, and so of no use for the next sweep."""
    how = schedule.reduction
    sums = {summed for _, summed in how.cooperative.online_softmax} if how.cooperative else set()
    terms = {op.operands[0].name for op in sweeps.allreduced if op.output.name in sums}
    return {op.output.name for term in terms for op in sweeps.ops_for({term})}
