"""What torch has made of a scripted function: the plans that its calls run.

In: the debug state of a function or an executor. Out: its plans, and those of the copies that run where its
branches are settled (csrc_stubs/torchscript/settled_branches.h): there a plan is a single node, which runs
other functions. The same where joint graphs differentiate it (joint_program.h).
Example:

    for plan in plans_of(scripted.get_debug_state()):
        print(plan.graph)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import _C


class Outlined(NamedTuple):
    """Stands for a plan that is a call of a program with joint graphs: its graph calls the regions. `whole`:
    the same with the packed graph of each region, in the order of those of `code`; None where one has
    several."""

    graph: Any
    code: Any
    whole: Any = None


def plans_of(state: Any) -> Iterator[Any]:
    """The plans, each with a `graph` and its `code`."""
    for plan in state.execution_plans.values():
        settled, program = _C.settled_states(plan.graph), _C.joint_program(plan.graph)
        if settled is None and program is None:
            yield plan
        elif program is not None and (packed := _C.joint_graphs(plan.code)):
            shown = _C.joint_shown(plan.graph)
            is_whole = shown is not None and len(shown[2]) == len(packed)
            yield Outlined(program[1], plan.code, shown[1] if is_whole else None)
        for inner in _C.joint_states(plan.code) if settled is None else settled:
            yield from plans_of(inner)
