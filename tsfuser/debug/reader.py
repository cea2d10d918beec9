"""The report of `explain` on a graph with groups.

In: an optimised graph, why nodes are in no group, and the runs of its groups. Out: a `GraphReport`: its
groups with their kernels, and what is left out. Example:

    GraphReader(Sources(graph), runs).report(graph, "inference", refusals).groups[0].kernels
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from .. import _C
from ..errors import CompileError, Refusal
from ..graph.evaluate import CONTROL, is_plain
from ..graph.functionalize import is_idle_cast
from ..graph.rows import row_of
from ..graph.wrapper import (
    CONSTANT,
    FALLBACK,
    GROUP,
    all_blocks,
    inputs,
    is_tensor,
    is_tensor_list,
    outputs,
    schema,
)
from ..grouping.gelu_products import is_checked
from ..grouping.support import Refusals
from ..grouping.unfused_reasons import NOT_RUN
from ..ir.call import Call
from ..joint.names import plain_name
from ..ops import table, unsupported
from ..planning.compile import Compiled, kernels_of
from ..planning.parse import parse
from ..planning.planner import group_device
from ..target.cuda import CudaTarget
from .arguments import described
from .findings import GraphReport, Group, Kernel, Node, Part
from .observe import Run, Timing
from .raw import Made, Planned
from .source import Sources

_UNSEEN = "one of its tensors was not seen while profiling, as in a branch that did not run:"
#: Nodes of lists, forks, a batch norm's arguments and layouts: they compute nothing.
_HANDED_ON = (
    "aten::__getitem__",
    "aten::wait",
    "tsfuser::checked_batch",
    "tsfuser::asked_item",
    "tsfuser::in_order",
)
_ONLY = "in training only what it differentiates is fused"
_WRITE = "whoever holds it has to see that"

#: Which items of a report have a part in a value.
Makers = frozenset[int]


class Items:
    """The items of one report while it is made, and which of them feeds which."""

    def __init__(self) -> None:
        self.items: list[Group | Node | Part] = []
        self.edges: set[tuple[int, int]] = set()

    def add(self, item: Group | Node | Part, fed: Makers) -> Makers:
        """Adds an item that reads values of the makers `fed`, and returns the makers of its results."""
        self.items.append(item)
        here = len(self.items) - 1
        self.edges.update((source, here) for source in fed)
        return frozenset([here])

    def report(self, title: str) -> GraphReport:
        return GraphReport(title, tuple(self.items), tuple(sorted(self.edges)))


class GraphReader:
    """Turns graphs into reports. `runs`: by group. `incomplete`: whether a graph had a part, like a fork,
    that has an executor of its own. `numbers`: the number of a group in the report, from 0, by its number in
    this process."""

    def __init__(self, sources: Sources, runs: Mapping[int, list[Run]]):
        self.sources, self.runs = sources, runs
        self.incomplete = False
        self.numbers: dict[int, int] = {}

    def report(self, graph: Any, title: str, refusals: Refusals | None, forward: bool = False) -> GraphReport:
        """`refusals` is None for a graph that the pass has not seen: one around what autodiff
        differentiates. `forward`: of a differentiated part."""
        found = Items()
        if refusals is None:
            graph = graph.copy()
            _C.plain_forms(graph)
        self.read(graph, found, refusals, forward)
        return found.report(title)

    def read(
        self,
        graph: Any,
        into: Items,
        refusals: Refusals | None,
        forward: bool = False,
        fed: Sequence[Makers] = (),
    ) -> list[Makers]:
        """Adds the graph's items. `fed`: the makers of its inputs; returns those of its outputs."""
        makers = {v.unique(): known for v, known in zip(graph.inputs(), fed)}
        self._block(graph, into, refusals, forward, makers, "")
        return [makers.get(v.unique(), frozenset()) for v in graph.outputs()]

    def _block(
        self,
        block: Any,
        into: Items,
        refusals: Refusals | None,
        forward: bool,
        makers: dict[int, Makers],
        branch: str,
    ) -> None:
        for node in block.nodes():
            data = (v for v in node.inputs() if not is_plain(v.type()))  # no sizes
            fed = frozenset().union(*(makers.get(v.unique(), frozenset()) for v in data))
            inner = [b for b in node.blocks() if not any(map(_is_fallback, b.nodes()))]
            if is_checked(node):
                inner = inner[:1]  # the other one is the program in calls with other dtypes
            for b in inner:
                for v, given in zip(list(b.inputs())[1:], inputs(node)[2:]):  # what a loop carries
                    makers[v.unique()] = makers.get(given.unique(), frozenset())
                why = (refusals.reason(node) if refusals is not None else "") or branch
                self._block(b, into, refusals, forward, makers, why)
            self.incomplete |= node.kind() == "prim::fork"  # has an executor of its own
            item: Part | Group | Node | None
            if node.kind() == "prim::DifferentiableGraph":
                item = Part(1 + sum(isinstance(other, Part) for other in into.items))
            else:
                item = self._item(node, refusals, branch, forward)
            if item is not None:
                fed = into.add(item, fed)
            for k, v in enumerate(outputs(node)):
                # a loop's start with a bool
                ends = [list(b.outputs())[-node.outputsSize() :] for b in inner]
                through = [makers.get(e[k].unique(), frozenset()) for e in ends]
                makers[v.unique()] = frozenset().union(*through) if inner else fed

    def _item(self, node: Any, refusals: Refusals | None, branch: str, forward: bool) -> Group | Node | None:
        """What stands for the node; None for nodes that no one would ask about, like the other ways that a
        formula of autodiff has. `branch`: why the If or Loop around it is not fused as a whole, "" where that
        was no question."""
        kind = node.kind()
        if kind == GROUP:
            group = self._group(node, forward)
            return group if group.reached or any(n.place.file for n in group.nodes) else None
        if (
            kind in _HANDED_ON
            or kind in CONTROL
            or is_idle_cast(node)
            or not (any(map(is_tensor, outputs(node))) or _changes_tensors(node))
        ):
            return None
        reason = refusals.reason(node) if refusals is not None else _undifferentiated(node)
        place = self.sources.place(node, forward)
        if kind.startswith("prim::") and (refusals is None or reason in ("", NOT_RUN)):
            return None
        if not place.file and (reason == NOT_RUN or (not reason and kind.startswith("tsfuser::"))):
            return None  # the program does not have it
        if not reason and branch:
            reason = f"it is in a branch that could only be fused as a whole: {branch}"
        reason = re.sub(r"^%\S+ was not seen while profiling:", _UNSEEN, reason)
        return Node(kind, place, reason or "no reason was noted; please report it")

    def _group(self, node: Any, forward: bool) -> Group:
        known, subgraph = node.i("cache_id"), node.g("Subgraph")
        number = self.numbers.setdefault(known, len(self.numbers))
        inner = (n for block in all_blocks(subgraph) for n in block.nodes())
        nodes = tuple(
            Node(n.kind(), self.sources.place(n, forward)) for n in inner if not n.kind().startswith("prim::")
        )
        found = self.runs.get(known)
        if not found:
            return Group(number, "", nodes, (), (), reached=False)
        run = found[-1]
        call = Call(tuple(map(described, run.arguments)))
        arguments = tuple(map(str, call.args))
        if run.reason:
            return Group(number, "", nodes, arguments, (), run.reason)
        try:
            device = group_device(call)
            fusion = parse(_C.group_graph(known), call, device)
            compiled, allocations = kernels_of(call, fusion, device)
        except (Refusal, CompileError) as error:
            return Group(number, "", nodes, arguments, (), str(error))
        names = tuple(map(plain_name, node.inputs()))
        numbers = tuple(None if isinstance(a, torch.Tensor) else a for a in run.arguments)
        made: tuple[Made, ...] = tuple(
            (o.value.dtype.name, o.sizes, o.strides, None if o.room is None else o.room.elements)
            for o in fusion.outputs
        )
        made += tuple((t.value.dtype.name, t.sizes, t.strides, None) for t in allocations.temporaries)
        made += tuple(("int64", (length,), (1,), None) for length in fusion.seeds)
        siblings: list[tuple[Planned, str]] = []
        more = (fusion.results, str(_C.group_graph(known)), siblings)
        plans = [
            Planned(
                number, device, names, numbers, call, made, c.kernel, c.function, len(fusion.seeds), *more
            )
            for c in compiled
        ]
        siblings += [(plan, c.source) for plan, c in zip(plans, compiled)]
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
            words.append(f"{f.name} {_listed(value) if isinstance(value, tuple) else value}")
    name = re.sub(r"\B[A-Z]", r" \g<0>", type(params).__name__.removesuffix("Params"))
    return f"{name.lower()}: {', '.join(words)}"


def _listed(values: tuple) -> str:
    """`(("x1", "x0", 1), ("x0", "x0", 0))` -> `x1 x0 1, x0 x0 0`."""
    return ", ".join(" ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)


def _is_fallback(node: Any) -> bool:
    """Whether the node stands for the fallback of a guard."""
    return node.kind() == FALLBACK or node.kind() == CONSTANT and node.hasAttribute("fallback")


def _changes_tensors(node: Any) -> bool:
    """Whether the node returns nothing, and works on a list of tensors, in place."""
    return node.outputsSize() == 0 and any(map(is_tensor_list, inputs(node)))


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
