"""`tsfuser.explain`: what is fused in a scripted function, how, and why the rest is not.

In: a scripted function and arguments. Out: an `Explanation`, whose str() is a table and whose `to_html()` is
a page. The function is run as a twin with state of its own (`isolate`), so that nothing of the caller's
changes but the counters of `tsfuser.stats()`. Example:

    print(tsfuser.explain(scripted, x, w))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..errors import CompileError, Refusal
from ..frontends.torchscript import passes
from ..graph.evaluate import CONTROL, is_plain
from ..graph.functionalize import is_idle_cast
from ..graph.rows import row_of
from ..graph.wrapper import CONSTANT, FALLBACK, GROUP, all_blocks, inputs, is_tensor, outputs, schema
from ..grouping.support import Refusals
from ..grouping.unfused_reasons import NOT_RUN
from ..ir.call import Call
from ..ops import table, unsupported
from ..planning.compile import Compiled, kernels_of
from ..planning.parse import parse
from ..planning.planner import group_device
from ..target.cuda import CudaTarget
from .arguments import described
from .caveat import caveat
from .findings import Findings, GraphReport, Group, Kernel, Node, Part
from .isolate import isolate
from .observe import Run, Timing, observing
from .page import page
from .raw import Planned
from .source import Sources
from .table import text

CALLS = 4  # inference is fused in call 2, training in call 3, forward and backward, and fallbacks one later
REPEATS = 5  # of the timed calls; the shortest time counts

_UNSEEN = "one of its tensors was not seen while profiling, as in a branch that did not run:"
_HANDED_ON = ("aten::__getitem__", "aten::wait")  # of lists and of forks: nothing is computed
_ONLY = "in training only what it differentiates is fused"
_WRITE = "whoever holds it has to see that"
_FORWARD = ", forward"
_ELSEWHERE = "in a branch, a loop, a fork or a fallback"
_TRAINING = "in training, without a part that TorchScript's autodiff differentiates"


class Explanation(Findings):
    """`str()` is a table, `to_html()` a page."""

    def __str__(self) -> str:
        return text(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """One page without external files; also written to `path` if one is given."""
        made = page(self)
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return made


def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What tsfuser makes of `fn(*args)`: a scripted function, module or method, or what `torch.jit.script`
    takes. It is run some ten times on copies; where results require gradients, backward as well. Raises what
    `fn` raises, and TypeError for arguments that it does not take. Warns, once a function, where torch has
    optimised `fn` before without groups, so that it runs unfused itself."""
    runs: dict[int, list[Run]] = {}
    with isolate(fn, args, kwargs) as twin, torch.jit.fuser("fuser2"):
        sources = Sources(twin.graph)
        with passes.watching() as outcomes:
            for _ in range(CALLS):
                twin.step()
            with observing(lambda run: runs.setdefault(run.group, []).append(run), timed=True):
                for _ in range(REPEATS):
                    twin.step()
                    runs = {group: _shortest(found) for group, found in runs.items()}
        reader = _Reader(sources, {id(o.graph): o.refusals for o in outcomes}, runs)
        reports = [*reader.graphs(twin.function.get_debug_state()), *reader.rest(o.graph for o in outcomes)]
    fused = any(group.kernels for report in reports for group in report.groups)
    return Explanation(twin.name, tuple(reports), caveat(twin, fused))


def _is_fallback(node: Any) -> bool:
    """Whether the node stands for what runs when a guard does not let a call pass."""
    return node.kind() == FALLBACK or node.kind() == CONSTANT and node.hasAttribute("fallback")


def _undifferentiated(node: Any) -> str:
    """Why a node of a training graph is in none of the parts that autodiff differentiates; no other is
    fused."""
    found, name = schema(node), node.kind()
    if found is not None and found.writes:
        return _in_place(node)
    row = row_of(node)
    known = (
        unsupported.sentence(name) if row is None else unsupported.left_view(name) if row[0].is_view else None
    )
    if known is not None:
        return known
    if not _C.is_differentiable(node):
        instead = next((f" {r.instead}" for r in table.all_rows() if r.name == name and r.instead), "")
        return f"TorchScript's autodiff knows no derivative of {name}{instead}; {_ONLY}"
    if not any(map(_C.is_differentiable, _beside(node))):
        return (
            "it stands alone among ops that TorchScript's autodiff does not differentiate: there is "
            "nothing to fuse it with"
        )
    return f"TorchScript's autodiff leaves it out, as it does with ops around views; {_ONLY}"


def _beside(node: Any) -> list[Any]:
    """The ops that make what a node reads, or read what it makes; of views those that autodiff considers."""
    makers = [v.node() for v in inputs(node) if is_tensor(v)]
    readers = [use.user for v in outputs(node) for use in v.uses()]
    rows = [(n, row_of(n)) for n in makers + readers]
    return [
        n for n, row in rows
        if n.kind() == "prim::ConstantChunk" or n.kind().startswith("aten::") and not (row and row[0].is_view)
    ]  # fmt: skip


def _in_place(node: Any) -> str:
    """Why an op that changes its operand was left as it is."""
    name, target = node.kind(), node.inputsAt(0).node().kind()
    if target == "prim::GetAttr":
        return "it changes a tensor of the module, which has to be seen there"
    if target == "prim::Param":
        return f"it changes a tensor that is given to the program, or is carried around a loop: {_WRITE}"
    return (
        f"{name} changes its operand in place, which something else than the ops behind it may see, and "
        f"TorchScript's autodiff takes no such op: write {name.rstrip('_').removeprefix('aten::')}, or "
        "inplace=False, to have it fused in training"
    )


def _shortest(runs: list[Run]) -> list[Run]:
    """The last run, with the shortest time of each launch."""
    last = runs[-1]
    alike = [r.launches for r in runs if [x.kernel for x in r.launches] == [x.kernel for x in last.launches]]
    best = tuple(min(same, key=lambda x: x.seconds) for same in zip(*alike))
    return [Run(last.group, last.reason, last.arguments, (), (), best)]


class _Reader:
    """Turns execution plans into reports."""

    def __init__(self, sources: Sources, refusals: dict[int, Refusals], runs: dict[int, list[Run]]):
        self.sources, self.refusals, self.runs = sources, refusals, runs
        self.reported: set[int] = set()
        self.incomplete = False

    def graphs(self, state: Any, title: str = "") -> Iterator[GraphReport]:
        """The graphs of an executor, and of the differentiable graphs in them, forward and backward."""
        plans = list(state.execution_plans.values())
        if not plans:
            yield GraphReport(title, (), (), reached=False)
        for plan in plans:
            inner = self._states(plan.code.differentiable_op_executor_states)
            seen = self.refusals.get(id(plan.graph))
            self.reported.add(id(plan.graph))
            if seen is not None or not title:
                outer = (
                    "around the differentiated parts" if inner else _TRAINING if seen is None else "inference"
                )
                yield self._report(plan.graph, title or outer, seen, forward=title.endswith(_FORWARD))
            for k, forward in enumerate(inner, 1):
                yield from self.graphs(forward, f"differentiated part {k}{_FORWARD}")
            for k, backward in enumerate(self._states(plan.code.grad_executor_states), 1):
                yield from self.graphs(backward, f"differentiated part {k}, backward")

    def rest(self, graphs: Iterator[Any]) -> Iterator[GraphReport]:
        """Graphs that were optimised, but that torch does not let us find from the top."""
        if self.incomplete:
            for graph in graphs:
                if id(graph) not in self.reported and graph.findAllNodes(GROUP, True):
                    found = self._report(graph, _ELSEWHERE, self.refusals[id(graph)])
                    nodes = [*found.left_out, *(node for group in found.groups for node in group.nodes)]
                    forward = any(node.place.file for node in nodes)
                    yield found if forward else replace(found, title=f"{_ELSEWHERE}, backward")

    def _states(self, ask: Any) -> list[Any]:
        """Executors inside of a plan; none where one of them has not run: torch has an internal error for
        it."""
        try:
            return list(ask())
        except RuntimeError:
            self.incomplete = True
            return []

    def _report(
        self, graph: Any, title: str, refusals: Refusals | None, forward: bool = False
    ) -> GraphReport:
        items: list[Group | Node | Part] = []
        makers: dict[int, frozenset[int]] = {}
        edges: set[tuple[int, int]] = set()

        def walk(block: Any, branch: str) -> None:
            for node in block.nodes():
                data = (v for v in node.inputs() if not is_plain(v.type()))  # no sizes
                fed = frozenset().union(*(makers.get(v.unique(), frozenset()) for v in data))
                inner = [b for b in node.blocks() if not any(map(_is_fallback, b.nodes()))]
                for b in inner:
                    for v, given in zip(list(b.inputs())[1:], inputs(node)[2:]):  # what a loop carries
                        makers[v.unique()] = makers.get(given.unique(), frozenset())
                    walk(b, (refusals.reason(node) if refusals is not None else "") or branch)
                self.incomplete |= node.kind() == "prim::fork"  # has an executor of its own
                if node.kind() == "prim::DifferentiableGraph":
                    item = Part(1 + sum(isinstance(other, Part) for other in items))
                else:
                    item = self._item(node, refusals, branch, forward)
                if item is not None:
                    items.append(item)
                    edges.update((source, len(items) - 1) for source in fed)
                    fed = frozenset([len(items) - 1])
                for k, v in enumerate(outputs(node)):
                    # a loop's start with a bool
                    ends = [list(b.outputs())[-node.outputsSize() :] for b in inner]
                    through = [makers.get(e[k].unique(), frozenset()) for e in ends]
                    makers[v.unique()] = frozenset().union(*through) if inner else fed

        walk(graph, "")
        return GraphReport(title, tuple(items), tuple(sorted(edges)))

    def _item(self, node: Any, refusals: Refusals | None, branch: str, forward: bool) -> Group | Node | None:
        """What stands for the node; None for what no one would ask about, like the other ways that a formula
        of autodiff has. `branch`: why the If or Loop around it is not fused as a whole, "" where that was no
        question."""
        kind = node.kind()
        if kind == GROUP:
            group = self._group(node, forward)
            return group if group.reached or any(n.place.file for n in group.nodes) else None
        if (
            kind in _HANDED_ON
            or kind in CONTROL
            or is_idle_cast(node)
            or not any(map(is_tensor, outputs(node)))
        ):
            return None
        reason = refusals.reason(node) if refusals is not None else _undifferentiated(node)
        place = self.sources.place(node, forward)
        if kind.startswith("prim::") and (refusals is None or reason in ("", NOT_RUN)):
            return None
        if reason == NOT_RUN and not place.file:
            return None
        if not reason and branch:
            reason = f"it is in a branch that could only be fused as a whole: {branch}"
        reason = re.sub(r"^%\S+ was not seen while profiling:", _UNSEEN, reason)
        return Node(kind, place, reason or "no reason was noted; please report it")

    def _group(self, node: Any, forward: bool) -> Group:
        number, subgraph = node.i("cache_id"), node.g("Subgraph")
        inner = (n for block in all_blocks(subgraph) for n in block.nodes())
        nodes = tuple(
            Node(n.kind(), self.sources.place(n, forward)) for n in inner if not n.kind().startswith("prim::")
        )
        found = self.runs.get(number)
        if not found:
            return Group(number, "", nodes, (), (), reached=False)
        run = found[-1]
        call = Call(tuple(map(described, run.arguments)))
        arguments = tuple(map(str, call.args))
        if run.reason:
            return Group(number, "", nodes, arguments, (), run.reason)
        try:
            device = group_device(call)
            fusion = parse(_C.group_graph(number), call, device)
            compiled, allocations = kernels_of(call, fusion, device)
        except (Refusal, CompileError) as error:
            return Group(number, "", nodes, arguments, (), str(error))
        names = tuple(v.debugName() for v in node.inputs())
        numbers = tuple(None if isinstance(a, torch.Tensor) else a for a in run.arguments)
        made = tuple((o.value.dtype.name, o.sizes, o.strides) for o in fusion.outputs)
        made += tuple((t.value.dtype.name, t.sizes, t.strides) for t in allocations.temporaries)
        plans = [Planned(number, device, names, numbers, call, made, c.kernel, c.function) for c in compiled]
        return Group(number, device, nodes, arguments, tuple(_kernels(compiled, run.launches, plans)))


def _kernels(
    compiled: list[Compiled], launches: tuple[Timing, ...], plans: list[Planned]
) -> Iterator[Kernel]:
    """Each kernel with its launch; those with nothing to do were not launched."""
    waiting = list(launches)
    for c, plan in zip(compiled, plans):
        device = plan.device
        peak = CudaTarget.machine(device).bandwidth if device.startswith("cuda") else None
        launch = waiting.pop(0) if waiting and waiting[0].kernel == c.kernel.name else None
        fraction = launch.bytes / launch.seconds / peak if launch and peak and launch.seconds else None
        yield Kernel(
            c.part, c.kernel.name, _chosen(c.params), c.source, c.function.registers, launch, fraction, plan
        )


def _chosen(params: Any) -> str:
    """`OuterRowParams(vector=4, across=8, exact=False)` -> `outer row: vector 4, across 8`."""
    words = []
    for f in fields(params):
        value = getattr(params, f.name)
        if value is True or value == 1 and f.default is False:  # conditions of a call come as numbers
            words.append(f.name)
        elif value:
            words.append(f"{f.name} {', '.join(value) if isinstance(value, tuple) else value}")
    name = re.sub(r"\B[A-Z]", r" \g<0>", type(params).__name__.removesuffix("Params"))
    return f"{name.lower()}: {', '.join(words)}"
