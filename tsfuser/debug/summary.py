"""What comes first in a report of a large network: what costs most; and which of its graphs are alike.

In: `Findings`. Out: rows for `table` and `page`. Example: `folded(findings.graphs)` -> [(graph of part 1,
"differentiated parts 1 to 3 and 5, forward"), (graph of part 4, "differentiated part 4, forward")].
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from .costs import Launches
from .findings import Findings, GraphReport, Kernel, Node

MOST = 10  # rows of a list
_LEAST = 0.005  # of a step
_NETWORK = 10  # kernels, or places that are not fused: with more a list of the most costly ones comes first


class CostlyKernel(NamedTuple):
    """A kernel, and its launches in one step."""

    kernel: Kernel
    launches: Launches


class CostlyOp(NamedTuple):
    """An op of torch: how often it is called in one step, the seconds of all these calls, and why it is not
    fused, "" if it is autograd's."""

    kind: str
    times: int
    seconds: float
    reason: str


def is_network(findings: Findings) -> bool:
    """Whether the report is so long that lists of the most expensive kernels and ops help."""
    places = {(node.place, node.reason) for node in findings.left_out}
    return len(findings.kernels) > _NETWORK or len(places) > _NETWORK


def costly_kernels(findings: Findings) -> list[CostlyKernel]:
    """All that were launched, most costly ones first."""
    found, left = [], dict(findings.costs.kernels)
    for kernel in findings.kernels:
        launches = left.pop((kernel.group, kernel.name), None)
        if launches is not None:
            found.append(CostlyKernel(kernel, launches))
    return sorted(found, key=lambda x: -x.launches.seconds)


def costly_ops(findings: Findings) -> list[CostlyOp]:
    """What torch runs that takes a part of the step worth its line, most costly ops first."""
    reasons = {node.kind: node.reason for node in reversed(findings.left_out)}
    found = [CostlyOp(kind, *cost, reasons.get(kind, "")) for kind, cost in findings.costs.ops.items()]
    return sorted((x for x in found if x.seconds > _LEAST * findings.costs.seconds), key=lambda x: -x.seconds)


def folded(graphs: tuple[GraphReport, ...]) -> list[tuple[GraphReport, str]]:
    """Graphs that differ from each other, with the titles of all that are like them. Those that share their
    plans and leave out the same ops of the same lines are alike."""
    found: dict[object, list[GraphReport]] = {}
    for k, graph in enumerate(graphs):
        found.setdefault(_likeness(graph) or k, []).append(graph)
    return [(alike[0], together([graph.title for graph in alike])) for alike in found.values()]


def _likeness(graph: GraphReport) -> object:
    """Equal for graphs that are alike; None for one that has nothing of its own to say."""
    if not graph.items or not graph.reached:
        return ("nothing", graph.reached, _without_number(graph.title))
    groups = tuple((g.number, g.reached, _kinds(g.nodes), times) for g, times in graph.distinct())
    left = frozenset(Counter((n.kind, n.place, n.reason) for n in graph.left_out).items())
    return groups, left, graph.edges, _without_number(graph.title)


def _kinds(nodes: tuple[Node, ...]) -> tuple[str, ...]:
    return tuple(node.kind for node in nodes)


def _without_number(title: str) -> str:
    return re.sub(r"\d+", "", title)


def together(titles: list[str]) -> str:
    """`["part 1, forward", "part 2, forward", "part 4, forward"]` -> `parts 1, 2 and 4, forward`; titles
    differ in one number. Three numbers or more that follow each other are a range."""
    if len(titles) == 1:
        return titles[0]
    before, after = re.split(r"\d+", titles[0], maxsplit=1)
    numbers = [int(re.search(r"\d+", title)[0]) for title in titles]
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    said = [
        text
        for run in runs
        for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(n) for n in run])
    ]
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"{before.rstrip()}s {listed}{after}"
