"""`tsfuser.explain`: what is fused in a function that is scripted or compiled, how, and why the rest is not.

In: what `torch.jit.script` or `torch.compile(..., backend="tsfuser")` returned, and arguments. Out: an
`Explanation`, whose str() is a table and whose `to_html()` is a page. A copy of the function is run, with
state of its own (`isolate`, `isolate_compiled`), so that nothing of the caller's changes but the counters of
`tsfuser.stats()`. Example:

    print(tsfuser.explain(scripted, x, w))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..frontends.torchscript import passes
from ..graph.wrapper import GROUP
from ..grouping.support import Refusals
from .caveat import caveat
from .costs import measured
from .findings import Findings, GraphReport
from .isolate import IsolatedScript, is_scripted, isolate
from .isolate_compiled import compiled, isolate_compiled
from .page import page
from .plans import plans_of
from .reader import GraphReader
from .source import Sources
from .table import text
from .unfused_functions import unwarned

#: Inference is fused in call 2, training in call 3, forward and backward. Each is one call later where
#: branches are settled, and so are fallbacks.
CALLS = 5

#: Said of a function that is neither scripted nor compiled.
_SCRIPTED_HERE = (
    'as torch.jit.script takes it; give torch.compile(..., backend="tsfuser") to see the graphs of that'
)

_FORWARD = ", forward"
_ELSEWHERE = "in a branch, a loop, a fork or a fallback"
_TRAINING = "in training, with no op here that TorchScript's autodiff differentiates"


class Explanation(Findings):
    """`str()` is a table, `to_html()` a page, which notebooks show."""

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        """The page in a frame, whose style is its own."""
        framed = escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{framed}" style="width:100%;height:640px;border:0"></iframe>'

    def to_html(self, path: str | Path | None = None) -> str:
        """One page without external files; also written to `path` if one is given."""
        made = page(self)
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return made


def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What tsfuser makes of `fn(*args)`: a scripted function, module or method, what `torch.jit.script`
    takes, or what `torch.compile(..., backend="tsfuser")` returned. Copies are run some twenty times; where
    results require gradients, backward as well. Copied are the arguments, the module, and the modules,
    tensors and optimizers that a compiled function closes over or finds among its globals. Raises what `fn`
    raises, and TypeError for arguments that it does not take, and for another backend. Warns, once a
    function, where torch has optimised a scripted `fn` before without groups, so that it runs unfused
    itself."""
    if (by_torch := compiled(fn)) is not None:
        return _explain_compiled(by_torch, args, kwargs)
    with isolate(fn, args, kwargs) as isolated, unwarned(), torch.jit.fuser("fuser2"):
        sources = Sources(isolated.graph)
        with passes.watching() as outcomes:
            for _ in range(CALLS):
                isolated.step()
            runs, costs = measured(isolated)
        reader = GraphReader(sources, runs)
        reports = reports_of_scripted(isolated, outcomes, reader)
    fused = any(group.kernels for report in reports for group in report.groups)
    said = caveat(isolated, fused)
    found = Explanation(isolated.name, tuple(reports), said, costs=costs.numbered(reader.numbers))
    return found if is_scripted(fn) else replace(found, front_end=_SCRIPTED_HERE)


def reports_of_scripted(
    isolated: IsolatedScript, outcomes: Sequence[passes.Outcome], reader: GraphReader
) -> list[GraphReport]:
    """Of the plans that its calls run, and of other graphs that the pass has seen."""
    plans = _Plans(reader, {id(o.graph): o.refusals for o in outcomes})
    return [*plans.graphs(isolated.function.get_debug_state()), *plans.rest(o.graph for o in outcomes)]


def _explain_compiled(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Explanation:
    from ..frontends.dynamo import watch  # needs torch._dynamo, which is loaded already
    from .explain_compiled import breaks_of, reports_of
    from .recompile_limit import beyond_limit

    beyond = beyond_limit(fn, args, kwargs)
    with isolate_compiled(fn, args, kwargs) as isolated:
        with watch.watching() as (graphs, outcomes):
            isolated.step()
            runs, costs = measured(isolated)
        reader = GraphReader(Sources(torch._C.Graph()), runs)
        reports = reports_of(outcomes, reader)
        return Explanation(isolated.name, reports, beyond, breaks_of(graphs), costs.numbered(reader.numbers))


class _Plans:
    """Reads execution plans, and graphs in plans."""

    def __init__(self, reader: GraphReader, refusals: Mapping[int, Refusals]):
        self.reader, self.refusals = reader, refusals
        self.reported: set[int] = set()

    def graphs(self, state: Any, title: str = "") -> Iterator[GraphReport]:
        """The graphs of an executor, and of the differentiable graphs in them, forward and backward."""
        for plan in plans_of(state):
            inner = _C.differentiable_states(plan.code)
            seen = self.refusals.get(id(plan.graph))
            self.reported.add(id(plan.graph))
            if seen is not None or not title:
                outer = (
                    "around the differentiated parts" if inner else _TRAINING if seen is None else "inference"
                )
                graph = getattr(plan, "whole", None) or plan.graph
                yield self.reader.report(graph, title or outer, seen, forward=title.endswith(_FORWARD))
            for k, (forward, _) in enumerate(inner, 1):
                name = f"differentiated part {k}{_FORWARD}"
                if forward is None:  # it did not run
                    yield GraphReport(name, (), (), reached=False)
                else:
                    yield from self.graphs(forward, name)
            for k, (_, backward) in enumerate(inner, 1):
                if backward is None:
                    self.reader.incomplete = True
                else:
                    yield from self.graphs(backward, f"differentiated part {k}, backward")

    def rest(self, graphs: Iterator[Any]) -> Iterator[GraphReport]:
        """Graphs that were optimised, but that torch does not let us find from the top."""
        if self.reader.incomplete:
            for graph in graphs:
                if id(graph) not in self.reported and graph.findAllNodes(GROUP, True):
                    found = self.reader.report(graph, _ELSEWHERE, self.refusals[id(graph)])
                    nodes = [*found.left_out, *(node for group in found.groups for node in group.nodes)]
                    forward = any(node.place.file for node in nodes)
                    yield found if forward else replace(found, title=f"{_ELSEWHERE}, backward")
