"""`tsfuser.check`: runs a scripted or compiled function fused and unfused, and compares group by group.

In: a function as `explain` takes it, and arguments. Out: a `Report`; its str() names the first group whose
results differ, with its graph and arguments. What torch.compile compiled is compared with eager mode as well
(`check_compiled`), as not only groups can be wrong there. Example:

    report = tsfuser.check(scripted, x)
    assert report, report
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import _C, options
from ..frontends.torchscript import passes
from .caveat import caveat
from .compare import Difference, compare
from .explain import CALLS, explain, reports_of_scripted
from .isolate import isolate
from .isolate_compiled import compiled, isolate_compiled
from .observe import Run, observing
from .reader import GraphReader
from .source import Sources
from .table import UNREACHED, count, left_out
from .unfused_functions import unwarned


@dataclass(frozen=True)
class Report:
    """True where groups ran fused and nothing differs. `compared`: groups that ran fused and were compared;
    `random`: groups that were not, as fused random numbers are others than eager's, unless these are asked
    for; `unfused`: reasons of those that did not run fused; `nothing`: why no group ran fused at all, ""
    where one did; `caveat`: why the function itself runs unfused, "" where it does not; `eager`: how many
    results and gradients of a compiled program were compared with eager's."""

    name: str
    compared: tuple[int, ...]
    random: tuple[int, ...]
    unfused: tuple[tuple[int, str], ...]
    difference: Difference | None
    nothing: str = ""
    caveat: str = ""
    eager: int = 0

    def __bool__(self) -> bool:
        return self.difference is None and not self.nothing

    def __str__(self) -> str:
        if self.difference:
            return str(self.difference)
        equal = f"{count(len(self.compared), 'group')} compared, all equal within their dtypes' precision"
        parts = [f"{self.name}: {self.nothing or (equal if self.compared else 'no group was compared')}"]
        parts += [f"but {self.caveat}; a copy was compared"] if self.caveat else []
        parts += [f"its results and gradients ({self.eager}) are eager's"] if self.eager else []
        parts += [f"group {g} has random numbers and was not compared" for g in self.random]
        parts += [f"group {g} ran unfused: {reason}" for g, reason in self.unfused]
        return "\n".join(parts)


def check(fn: Any, *args: Any, **kwargs: Any) -> Report:
    """Runs `fn(*args)`, forward and, where results require gradients, backward, on copies, until it is fused.
    Then each group runs twice in one more call, fused and node by node, from equal arguments and random
    states. Modules and tensors of the caller stay as they are, but not the counters of `tsfuser.stats()`, nor
    anything else that a compiled function changes, such as a list. Takes what `explain` takes, raises what it
    raises, and warns as it does."""
    seen = Seen()
    if (by_torch := compiled(fn)) is not None:
        from ..frontends.dynamo import watch  # needs torch._dynamo, which is loaded already
        from .check_compiled import differs_from_eager
        from .explain_compiled import reports_of
        from .recompile_limit import beyond_limit

        said = beyond_limit(by_torch, args, kwargs)
        with isolate_compiled(by_torch, args, kwargs) as isolated:
            with watch.watching() as (_, traced):
                whole, eager = differs_from_eager(isolated)
            with observing(seen.look, unfused=True):
                isolated.step()
            reader = GraphReader(Sources(torch._C.Graph()), {})
            reports_of(traced, reader)
        return _report(isolated.name, seen.numbered(reader), whole, eager, said, (fn, args, kwargs))
    with isolate(fn, args, kwargs) as script, unwarned(), torch.jit.fuser("fuser2"):
        reader = GraphReader(Sources(script.graph), {})
        with passes.watching() as outcomes:
            for _ in range(CALLS):
                script.step()
        with observing(seen.look, unfused=True):
            script.step()
        reports_of_scripted(script, outcomes, reader)
        seen = seen.numbered(reader)
    said = caveat(script, seen.ran)
    return _report(script.name, seen, None, 0, said, (fn, args, kwargs))


class Seen:
    """What runs of groups showed."""

    def __init__(self) -> None:
        self.compared: dict[int, None] = {}
        self.random: dict[int, None] = {}
        self.unfused: dict[int, str] = {}
        self.differences: list[Difference] = []

    @property
    def ran(self) -> bool:
        """Whether a group ran fused."""
        return bool(self.compared or self.random)

    def look(self, run: Run) -> None:
        if run.reason:
            self.unfused[run.group] = run.reason
        elif _is_random(run.group) and not options.enabled("eager_random"):
            self.random[run.group] = None
        else:
            self.compared[run.group] = None
            difference = compare(run)
            if difference:
                self.differences.append(difference)

    def numbered(self, reader: GraphReader) -> Seen:
        """The same, with the numbers that groups have in `explain`'s report on these graphs."""
        made, numbers = Seen(), reader.numbers
        made.compared = {numbers.get(g, g): None for g in self.compared}
        made.random = {numbers.get(g, g): None for g in self.random}
        made.unfused = {numbers.get(g, g): reason for g, reason in self.unfused.items()}
        made.differences = [d.of_group(numbers.get(d.group, d.group)) for d in self.differences]
        return made


def _report(
    name: str, seen: Seen, whole: Difference | None, eager: int, said: str, call: tuple[Any, ...]
) -> Report:
    first = seen.differences[0] if seen.differences else whole
    nothing = "" if seen.ran else _why_nothing(bool(seen.unfused), *call)
    unfused = tuple(seen.unfused.items())
    return Report(name, tuple(seen.compared), tuple(seen.random), unfused, first, nothing, said, eager)


def _why_nothing(unfused: bool, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why no group ran fused: what `explain` says, unless there were groups that ran `unfused`."""
    if unfused:
        return "nothing was compared: no group ran fused"
    found = explain(fn, *args, **kwargs)
    if found.groups:
        return f"nothing was compared: its {count(len(found.groups), 'group')} {UNREACHED}"
    left = [line for graph in found.graphs for line in left_out(graph)]
    return "\n".join(["nothing was compared: it has no group", *left])


def _is_random(group: int) -> bool:
    """Whether a node of the group draws random numbers."""
    return any(node.isNondeterministic() for node in _C.group_graph(group).nodes())
