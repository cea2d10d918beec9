"""What stays where between the sweeps over a row.

In: a segment and its schedule. Out: the schedule with a `Placement` for each value that is computed once and
used by several sweeps, or for what one sweep makes of such a value where the others need only that; every
other value is computed again by each sweep that needs it. Example, softmax in registers: `Placement('exp_4',
'register')`, since an exponential costs more than a register.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import ops  # noqa: F401  it defines the symbols
from ..ir.fusion import Lookup, Op, Pointwise, Random, Reduce, Value
from ..ir.symbols import find
from ..segment import Segment
from .loops import Schedule
from .sweeps import Sweeps, sweeps_of


def is_costly(op: Op) -> bool:
    """Whether what `op` computes is worth a register or memory where it is needed again."""
    return isinstance(op, Pointwise) and not find(op.symbol).cheap


def costly_terms(segment: Segment) -> int:
    """Values that cost much and on which a reduction depends: registers keep them for what follows."""
    return len(_costly_terms(segment, segment.reductions))


def kept_terms(segment: Segment) -> int:
    """Those of them that a later sweep needs: of which something else is made than another such value, and on
    which a reduction depends on whose result others do."""
    read = {v.name for op in segment.ops for v in op.operands}
    other = {v.name for op in segment.ops if not is_costly(op) for v in op.operands}
    used = [op for op in segment.reductions if op.output.name in read]
    return len(_costly_terms(segment, used) & other)


def _costly_terms(segment: Segment, reductions: Sequence[Reduce]) -> set[str]:
    wanted = {v.name for op in reductions for v in op.operands}
    found = set()
    for op in reversed(segment.ops):
        if op.output.name in wanted:
            wanted |= {v.name for v in op.operands}
            found |= {op.output.name} if is_costly(op) else set()
    return found


def with_saved_values(segment: Segment, schedule: Schedule, where: str) -> Schedule:
    """`schedule` with the costly values that several sweeps need saved in `where`, `register` or `scratch`:
    registers hold them where they hold the row anyway."""
    loops = [x for x in schedule.loops_of_a_thread if not (x.extent.is_const and x.extent.a == 1)]
    # without loops all sweeps are one scope, and what one has computed the next can read
    if where == "register" and (not loops or any(x.bind == "serial" for x in loops)):
        return schedule
    sweeps = sweeps_of(segment, schedule)
    pairs = _computed_by_pairs(sweeps, schedule)
    names = _moved_on(sweeps, _needed_again(sweeps, where) - pairs, pairs)
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


def _moved_on(sweeps: Sweeps, names: set[str], no_use: set[str]) -> set[str]:
    """`names`, but for each what the same sweep makes of it, where later ones need nothing else of it: then
    these need not make that again, nor may they need what else it is made of. Not what is of `no_use` later.
    Example: of `x * (erf(x) / 2 + 0.5)` the product, and not `erf(x)`."""
    for name in sorted(names):
        while name and (following := _following(sweeps, names, name)) not in (name, *no_use):
            names = (names | {following}) - {name, ""}
            name = following
    return names


def _following(sweeps: Sweeps, names: set[str], name: str) -> str:
    """What to save instead of `name`, one of `names`: what is made of it, itself, or nothing ("")."""
    first = next(k for k in sweeps.numbers if name in _outputs(sweeps.ops_for(sweeps.goals(k))))
    later = [k for k in sweeps.numbers if k > first]
    if any(name in sweeps.goals(k) for k in later):
        return name
    needed = _outputs([op for k in later for op in sweeps.ops_for(sweeps.goals(k), names)])
    readers = [op for op in sweeps.segment.ops if any(v.name == name for v in op.operands)]
    readers = [op for op in readers if op.output.name in needed]
    if not readers:
        return ""
    made = _outputs(sweeps.ops_for(sweeps.goals(first), names - {name}))
    [reader, *others], value = readers, made[name]
    fits = reader.output.dtype.register.itemsize <= value.dtype.register.itemsize
    fits = fits and set(reader.output.axes) == set(value.axes) and isinstance(reader, Pointwise)
    return reader.output.name if fits and not others and reader.output.name in made else name


def _outputs(made: list[Op]) -> dict[str, Value]:
    return {op.output.name: op.output for op in made}


def _computed_by_pairs(sweeps: Sweeps, schedule: Schedule) -> set[str]:
    """Names of the values behind a sum whose maximum the blocks combine together with it: they are of the
    maximum of one block, and so of no use for the next sweep."""
    how = schedule.reduction
    sums = {summed for _, summed in how.cooperative.online_softmax} if how.cooperative else set()
    terms = {op.operands[0].name for op in sweeps.allreduced if op.output.name in sums}
    return {op.output.name for term in terms for op in sweeps.ops_for({term})}
