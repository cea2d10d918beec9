"""Findings as a table for a terminal.

In: `Findings`. Out: text: what a step costs, of a network with the kernels and ops that cost most; then a
block for each graph, or for all that are alike: its groups with their kernels, then the lines of the program
with the ops outside of groups, and why."""

from __future__ import annotations

import re
from collections import Counter

from ..grouping.unfused_reasons import NOT_RUN
from .findings import Findings, GraphReport, Group, Kernel, Node, launch_size
from .observe import Timing
from .summary import MOST, costly_kernels, costly_ops, folded, is_network

UNREACHED = "did not run: its guard did not let the call pass, or the program went another way"


def text(findings: Findings) -> str:
    """The whole table."""
    said = [f"  {findings.front_end}"] if findings.front_end else []
    said += [f"  but {findings.caveat}; what follows is a copy's"] if findings.caveat else []
    first = [*step(findings), *(_most_costly(findings) if is_network(findings) else [])]
    graphs = (line for g, title in folded(findings.graphs) for line in _graph(g, title))
    return "\n".join([summary(findings), *said, *first, *graphs, *_breaks(findings)])


def step(findings: Findings) -> list[str]:
    """A line with the costs of one step, if they are known."""
    if not findings.costs.seconds:
        return []
    launches = [found.launches for found in costly_kernels(findings)]
    times, moved = sum(x.times for x in launches), sum(x.bytes for x in launches)
    kernels = f"{count(times, 'launch')} of kernels {duration(sum(x.seconds for x in launches))}"
    left = sum(op.seconds for op in costly_ops(findings))
    rest = f", ops of torch {duration(left)}" if findings.costs.ops else ""
    return [f"  a step takes {duration(findings.costs.seconds)}: {kernels} ({size(moved)}){rest}"]


def _most_costly(findings: Findings) -> list[str]:
    """Of a network: the kernels and ops that take most of a step."""
    kernels = [
        (duration(x.seconds), f"group {k.group}", k.name, count(x.times, "launch"))
        for k, x in costly_kernels(findings)[:MOST]
    ]
    ops_of_torch = [
        (duration(op.seconds), op.kind.removeprefix("aten::"), count(op.times, "call"), clause(op.reason))
        for op in costly_ops(findings)[:MOST]
    ]
    lines = []
    for title, rows in (("kernels that cost most", kernels), ("ops of torch that cost most", ops_of_torch)):
        if rows:
            widths = [max(map(len, column)) for column in zip(*rows)]
            lines += ["", title]
            for first, *others in rows:
                cells = "  ".join(map(str.ljust, others, widths[1:]))
                lines.append(f"  {first.rjust(widths[0])}  {cells}".rstrip())
    return lines


def _breaks(findings: Findings) -> list[str]:
    """Two lines for each break."""
    lines = ["", "graph breaks"] if findings.breaks else []
    for found in findings.breaks:
        place = found.place
        lines += [f"    at {place}{': ' + place.text if place.text else ''}", f"      {found.reason}"]
    return lines


def summary(findings: Findings) -> str:
    """One line with the counts."""
    groups = [group for group in findings.groups if group.reached]
    unreached = len(findings.groups) - len(groups)
    left = [node for node in findings.left_out if node.reason != NOT_RUN]
    idle = len(findings.left_out) - len(left)
    fused = sum(len(g.nodes) for g in groups if not g.refusal)
    kernels = [k for g in groups for k in g.kernels]
    unfused = len(left) + sum(len(g.nodes) for g in groups if g.refusal)
    if not (findings.groups or findings.left_out or findings.breaks):
        return f"{findings.name}: this call computes nothing, as an optimizer's step without gradients"
    return (
        f"{findings.name}: {count(fused, 'op')} fused in {count(len(groups), 'group')} and "
        f"{count(len(kernels), 'kernel')}, {unfused} not fused"
    ) + "".join(
        f", {what}"
        for n, what in (
            (idle, f"{idle} in branches that did not run"),
            (unreached, f"{count(unreached, 'group')} that did not run"),
            (len(findings.breaks), count(len(findings.breaks), "graph break")),
        )
        if n
    )


def count(n: int, what: str) -> str:
    """`1 op`, `2 ops`, `2 launches`."""
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def _graph(graph: GraphReport, title: str) -> list[str]:
    lines = ["", title]
    for group, times in graph.distinct():
        alike = [node for other in graph.groups if other.number == group.number for node in other.nodes]
        lines += _group(group, times, alike)
    lines += ["  not fused", *left_out(graph)] if graph.left_out else []
    return lines if len(lines) > 2 else [*lines, f"  {'nothing to fuse' if graph.reached else UNREACHED}"]


def left_out(graph: GraphReport) -> list[str]:
    """Two lines for the unfused ops of a place: which, and why."""
    lines = []
    for (place, reason), nodes in by_reason(graph.left_out).items():
        lines.append(f"    {ops(nodes)}  at {place}{': ' + place.text if place.text else ''}")
        lines.append(f"      {reason}")
    return lines


def by_reason(nodes: list[Node]) -> dict:
    """Nodes of one place that have the same reason, together."""
    found: dict = {}
    for node in nodes:
        found.setdefault((node.place, node.reason), []).append(node)
    return found


def ops(nodes) -> str:
    """`add, mul (2 times)`."""
    counts = Counter(node.kind.removeprefix("aten::") for node in nodes)
    return ", ".join(kind if n == 1 else f"{kind} ({n} times)" for kind, n in counts.items())


def _group(group: Group, times: int, alike: list[Node]) -> list[str]:
    """`alike`: the nodes of all that share its plans."""
    places = dict.fromkeys(n.place.outer for n in alike if n.place.file)
    lines = [f"  group {group.number}{f' ({times} times)' if times > 1 else ''}: {ops(group.nodes)}"]
    lines += [f"    from {', '.join(places)}"] if places else []
    lines += [f"    runs unfused: {group.refusal}"] if group.refusal else []
    lines += [] if group.reached else [f"    {UNREACHED}"]
    for kernel in group.kernels:
        lines.append(f"    segment {kernel.segment}: {kernel.name}")
        lines.append(f"      {kernel.schedule}")
        lines.append(f"      {measured(kernel)}")
    return lines


def measured(kernel: Kernel) -> str:
    """Launch sizes, time, bytes, bandwidth and its fraction."""
    launch = kernel.launch
    if launch is None:
        return "not launched: there was nothing to compute"
    parts = [
        launch_size(kernel),
        duration(launch.seconds),
        size(launch.bytes),
    ]
    if kernel.fraction is not None:
        parts.append(f"{bandwidth(launch)}, {kernel.fraction:.2f} of the device's")
    if kernel.registers:
        parts.append(f"{kernel.registers} registers")
    return ", ".join(parts)


def clause(reason: str) -> str:
    """What comes first in a reason."""
    return re.split(r"[;:] ", reason)[0]


def bandwidth(launch: Timing) -> str:
    rate = launch.bytes / launch.seconds / 1e9
    return f"{rate:.{0 if rate >= 10 else 1}f} GB/s"


def duration(seconds: float) -> str:
    if seconds < 1e-6:
        return f"{seconds * 1e9:.0f} ns"
    if seconds < 1:
        return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def size(n: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} bytes"
