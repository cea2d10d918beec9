"""Which values stay where between the sweeps over a row.

In: a segment and its schedule. Out: the schedule with a `Placement` for each value that one sweep computes
and saves for others. If the others only need a value that is made from it, that one is saved instead. Every
other value is computed again by each sweep that needs it. Example, softmax in registers: `Placement('exp_4',
'register')`, because an exponential costs more than a register. A sum of two inputs takes no more registers
than these, so it is saved if the other sweeps do not need them otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import ops  # noqa: F401  it defines the symbols
from ..ir.fusion import Lookup, Op, Pointwise, Random, Reduce, Scan, Value
from ..ir.symbols import find
from ..segment import Segment
from .loops import Schedule
from .sweeps import Sweeps, sweeps_of


def is_costly(op: Op) -> bool:
    """Whether it is cheaper to save the result of `op` than to compute it again."""
    return isinstance(op, Scan) or (isinstance(op, Pointwise) and not find(op.symbol).cheap)


def costly_terms(segment: Segment) -> int:
    """The number of costly values on which a reduction depends: registers keep them for later sweeps."""
    return len(_costly_terms(segment, segment.reductions))


def kept_terms(segment: Segment) -> int:
    """The number of those that a later sweep may need: a reduction whose result is read depends on them, and
    an op that is not costly reads them."""
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
    """`schedule`, with placements in `where` (`register` or `scratch`) for the costly values that several
    sweeps need. Registers are used if they hold the row anyway."""
    loops = [x for x in schedule.loops_of_a_thread if not (x.extent.is_const and x.extent.a == 1)]
    # without loops all sweeps are one scope, and what one has computed the next can read
    if where == "register" and (not loops or any(x.bind == "serial" for x in loops)):
        return schedule
    sweeps = sweeps_of(segment, schedule)
    pairs = _computed_by_pairs(sweeps, schedule)
    names = _moved_on(sweeps, _needed_again(sweeps, where) - pairs, pairs)
    if where == "register":
        names = _instead_of_sources(sweeps, names, pairs, schedule)
    return schedule.with_values_in(where, [op.output.name for op in segment.ops if op.output.name in names])


def _needed_again(sweeps: Sweeps, where: str) -> set[str]:
    """Names of the values that several sweeps need and that are costly, or that cannot be computed again."""
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
    """`names`, each replaced by a value that the same sweep makes from it, if later sweeps need only that
    value: then they need not compute it again, and may not need its other operands. A value in `no_use` is
    not taken. Example: of `x * (erf(x) / 2 + 0.5)` the product is saved, and not `erf(x)`."""
    for name in sorted(names):
        while name and (following := _following(sweeps, names, name)) not in (name, *no_use):
            names = (names | {following}) - {name, ""}
            name = following
    return names


def _following(sweeps: Sweeps, names: set[str], name: str) -> str:
    """The name of the value to save instead of `name`, one of `names`; "" for none."""
    made_by = [_outputs(sweeps.ops_for(sweeps.goals(k))).keys() for k in sweeps.numbers]
    first = next(k for k, made in zip(sweeps.numbers, made_by) if name in made)
    later = [k for k in sweeps.numbers if k > first]
    if any(name in sweeps.goals(k) for k in later):
        return name
    needed: dict[str, Value] = {}
    saved = names & made_by[0]  # the sweep that saves a value needs what it is made from
    for k in sweeps.numbers:
        needed |= _outputs(sweeps.ops_for(sweeps.goals(k), saved)) if k in later else {}
        saved = saved | (names & made_by[k])
    readers = [op for op in sweeps.segment.ops if any(v.name == name for v in op.operands)]
    readers = [op for op in readers if op.output.name in needed]
    if not readers:
        return ""
    # another of `names` that this sweep makes from the value is not known to it before
    before = _outputs([op for k in range(first) for op in sweeps.ops_for(sweeps.goals(k))])
    made = _outputs(sweeps.ops_for(sweeps.goals(first), names & before.keys()))
    [reader, *others], value = readers, made[name]
    fits = reader.output.dtype.register.itemsize <= value.dtype.register.itemsize
    fits = fits and set(reader.output.axes) == set(value.axes) and isinstance(reader, Pointwise)
    return reader.output.name if fits and not others and reader.output.name in made else name


def _instead_of_sources(sweeps: Sweeps, names: set[str], no_use: set[str], schedule: Schedule) -> set[str]:
    """The values to save: those of `names`, and values of the first sweep that take no more registers than
    inputs and random numbers from which later sweeps would compute them again, and which these do not need
    otherwise. What only such a value needs is not saved."""
    fetched = {p.value for p in schedule.placements}
    sources = [b.value for b in sweeps.segment.loads] + [op.output for op in sweeps.segment.randoms]
    sizes = {v.name: v.dtype.itemsize for v in sources if sweeps.varies(v) and v.name not in fetched}
    freed = _freed_later(sweeps, names, sizes)
    for op in reversed(sweeps.ops_for(sweeps.goals(0))):
        value = op.output
        if not isinstance(op, Pointwise) or value.name in names | no_use:
            continue
        if freed.get(value.name, -1) >= value.dtype.register.itemsize:
            names = names | {value.name}
            freed = _freed_later(sweeps, names, sizes)
    return names & freed.keys()


def _freed_later(sweeps: Sweeps, names: set[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """By the name of a value that sweeps after the first need where `names` are saved: the bytes of the
    sources, which have `sizes`, that they need for this value alone."""
    above = _needed_through(sweeps, names)
    freed = {name: sizes.get(name, 0) for name in above}
    made = [op.output.name for op in sweeps.segment.ops]
    for name in [*(above.keys() - set(made)), *(name for name in made if name in above)]:
        if above[name]:
            freed[above[name]] += freed[name]
    return freed


def _needed_through(sweeps: Sweeps, names: set[str]) -> dict[str, str]:
    """By the name of a value that sweeps after the first need where `names` are saved: the nearest other
    value that is on every way from their results to it; "" where there is none. This is its dominator
    (Cooper, Harvey, Kennedy, "A simple, fast dominance algorithm", 2001)."""
    saved = names & _outputs(sweeps.ops_for(sweeps.goals(0))).keys()
    above: dict[str, str] = {}
    computed: set[str] = set()
    for number in sweeps.numbers[1:]:
        made = _outputs(sweeps.ops_for(sweeps.goals(number), saved)).keys()
        above.update(dict.fromkeys(sweeps.goals(number), ""))
        computed |= made
        saved = saved | (names & made)
    depth = {"": 0}

    def nearest(a: str, b: str) -> str:
        """The nearest dominator of both, which may be one of them."""
        while a != b:
            a, b = (above[a], b) if depth[a] > depth[b] else (a, above[b])
        return a

    for op in reversed(sweeps.segment.ops):
        name = op.output.name
        if name in computed:
            depth[name] = depth[above[name]] + 1
            for operand in (v for v in op.operands if not v.is_number):
                above[operand.name] = nearest(above.get(operand.name, name), name)
    return above


def _outputs(made: list[Op]) -> dict[str, Value]:
    return {op.output.name: op.output for op in made}


def _computed_by_pairs(sweeps: Sweeps, schedule: Schedule) -> set[str]:
    """Names of the values that depend on a maximum which the blocks combine only together with the next sum.
    In that sweep they depend on the maximum of one block, so the next sweep cannot use them."""
    how = schedule.reduction
    sums = {summed for _, summed in how.cooperative.online_softmax} if how.cooperative else set()
    terms = {op.operands[0].name for op in sweeps.allreduced if op.output.name in sums}
    return {op.output.name for term in terms for op in sweeps.ops_for({term})}
