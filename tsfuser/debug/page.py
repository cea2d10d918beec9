"""An explanation as one HTML page without external files.

In: `Findings`. Out: the page: a summary, of a network with the most expensive kernels and ops, a list of its
graphs and a field that searches them; for each graph, or all that are alike, a drawing (groups green, nodes
left out amber, what one hands to another as lines) and its table; then the program with its lines in the same
colours."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..grouping.unfused_reasons import NOT_RUN
from .drawing import drawing
from .findings import Findings, GraphReport, Group, launch_size
from .page_style import SCRIPT, STYLE
from .summary import MOST, costly_kernels, costly_ops, folded, is_network
from .table import (
    UNREACHED,
    bandwidth,
    by_reason,
    clause,
    count,
    duration,
    ops,
    size,
    step,
    summary,
)


def page(findings: Findings) -> str:
    """The whole page."""
    graphs = folded(findings.graphs)
    found = [_graph(graph, title, k) for k, (graph, title) in enumerate(graphs)]
    first = [_costs(findings), _contents([title for _, title in graphs])] if is_network(findings) else []
    body = [_head(findings), *first, *found, _breaks(findings), _program(findings)]
    title = escape(f"tsfuser: {findings.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n{''.join(body)}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _head(findings: Findings) -> str:
    fused = sum(len(g.nodes) for g in findings.groups if g.reached and not g.refusal)
    left = sum(n.reason != NOT_RUN for n in findings.left_out) + sum(
        len(g.nodes) for g in findings.groups if g.refusal
    )
    front_end = [findings.front_end] if findings.front_end else []
    time = "".join(f"<br>{escape(line.strip())}" for line in [*step(findings), *front_end])
    line = escape(summary(findings).partition(": ")[2])
    caveat = f'<p class="tag bad">{escape(_sentence(findings.caveat))}.</p>' if findings.caveat else ""
    return (
        f'<h1>{escape(findings.name)}</h1><p class="summary">{line}{time}</p>{caveat}'
        f'<div class="bar"><div class="fused" style="flex:{fused}"></div>'
        f'<div class="left" style="flex:{left}"></div></div><div class="legend">'
        f'<span><i style="background:var(--fused)"></i>{count(fused, "op")} fused</span>'
        f'<span><i style="background:var(--left)"></i>{count(left, "op")} not fused</span></div>\n'
    )


def _costs(findings: Findings) -> str:
    """What takes most of a step: kernels, and ops of torch."""
    kernels = [
        (found.launches.seconds, _group_link(found.kernel.group), found.kernel.name, found.launches.times, "")
        for found in costly_kernels(findings)
    ]
    ops_of_torch = [
        (op.seconds, "", op.kind.removeprefix("aten::"), op.times, clause(op.reason))
        for op in costly_ops(findings)
    ]
    parts = []
    for title, what, rows in (
        ("Kernels that cost most", "launch", kernels),
        ("Ops of torch that cost most", "call", ops_of_torch),
    ):
        if rows:
            lines = "".join(_cost(row, what, rows[0][0]) for row in rows[:MOST])
            parts.append(f'<h2>{title}</h2>\n<div class="card"><table class="costs">{lines}</table></div>\n')
    return "".join(parts)


def _cost(row: tuple[float, str, str, int, str], what: str, most: float) -> str:
    """A line with a bar."""
    seconds, link, name, times, why = row
    return (
        f'<tr><td class="number">{duration(seconds)}</td><td class="share">'
        f'<div style="width:{100 * seconds / (most or 1.0):.0f}%"></div></td>'
        f'<td>{link} <code>{_name(name)}</code><div class="where">{escape(why)}</div></td>'
        f'<td class="number">{count(times, what)}</td></tr>'
    )


def _contents(titles: list[str]) -> str:
    links = "".join(f'<li><a href="#graph-{k}">{escape(title)}</a></li>' for k, title in enumerate(titles))
    return (
        f"<h2>Graphs</h2>\n"
        f'<input type="search" id="search" placeholder="only graphs with this op, group, kernel or file">\n'
        f'<ul class="contents">{links}</ul>\n'
    )


def _group_link(number: int) -> str:
    return f'<a class="tag fused" href="#group-{number}">group {number}</a>'


def _name(kernel: str) -> str:
    """It may be broken at its words."""
    return escape(kernel).replace("_", "_<wbr>")


def _graph(graph: GraphReport, title: str, number: int) -> str:
    parts = [f'<h2 id="graph-{number}">{escape(title[:1].upper() + title[1:])}</h2>\n']
    if not graph.items:
        what = "Nothing in it works on tensors." if graph.reached else f"{_sentence(UNREACHED)}."
        parts.append(f'<div class="card where">{what}</div>\n')
    else:
        parts.append(f'<div class="card drawing">{drawing(graph)}</div>\n')
    if graph.groups:
        parts.append(_kernels(graph.distinct()))
    if graph.left_out:
        parts.append(_left(graph))
    return f'<section class="graph">{"".join(parts)}</section>\n'


def _breaks(findings: Findings) -> str:
    rows = [
        f'<tr><td><code>{escape(found.place.text)}</code> <span class="where">{escape(str(found.place))}'
        f'</span></td><td class="why">{escape(found.reason)}</td></tr>'
        for found in findings.breaks
    ]
    head = '<h2>Graph breaks</h2>\n<div class="card"><table><tr><th>at</th><th>why</th></tr>'
    return f"{head}{''.join(rows)}</table></div>\n" if rows else ""


def _kernels(groups: list[tuple[Group, int]]) -> str:
    rows = []
    for group, times in groups:
        kind = "idle" if not group.reached else "bad" if group.refusal else "fused"
        tag = f'<span class="tag {kind}" id="group-{group.number}">group {group.number}</span>'
        names = f"{tag} {escape(ops(group.nodes))}" + (f" ({times} times)" if times > 1 else "")
        if group.refusal:
            rows.append(
                f'<tr><td>{names}</td><td colspan="5">runs unfused: {escape(group.refusal)}</td></tr>'
            )
        if not group.reached:
            rows.append(f'<tr><td>{names}</td><td colspan="5">{UNREACHED}</td></tr>')
        for i, k in enumerate(group.kernels):
            launch = k.launch
            numbers = ["", "", ""]
            if launch:
                rate = bandwidth(launch) if launch.seconds else ""
                share = f" ({k.fraction:.0%})" if k.fraction is not None else ""
                numbers = [duration(launch.seconds), size(launch.bytes), rate + share]
            shape = launch_size(k) if launch else "not launched"
            cells = "".join(f'<td class="number">{n}</td>' for n in [shape, *numbers])
            code = f"<details><summary>code</summary><pre>{escape(k.source)}</pre></details>"
            rows.append(
                f'<tr class="top"><td>{names if i == 0 else ""}</td><td><code>{_name(k.name)}</code>'
                f'<div class="where">segment {k.segment} &middot; {escape(k.schedule)}</div></td>{cells}</tr>'
                f'<tr><td></td><td colspan="5">{code}</td></tr>'
            )
    titles = ("group", "kernel and schedule")
    measured = ("launch", "time", "memory", "bandwidth")
    head = "".join(f"<th>{t}</th>" for t in titles)
    head += "".join(f'<th class="number">{t}</th>' for t in measured)
    return f'<div class="card"><table><tr>{head}</tr>{"".join(rows)}</table></div>\n'


def _left(graph: GraphReport) -> str:
    rows = []
    for (place, reason), nodes in by_reason(graph.left_out).items():
        # broken at commas
        names = escape(ops(nodes)).replace(" (", "&nbsp;(").replace(" times", "&nbsp;times")
        line = f"<div><code>{escape(place.text)}</code></div>" if place.text else ""
        rows.append(
            f'<tr><td><span class="tag {"idle" if reason == NOT_RUN else "left"}">{names}</span></td>'
            f'<td class="why">{escape(_sentence(reason))}</td>'
            f'<td><span class="where">{escape(str(place))}</span>{line}</td></tr>'
        )
    head = "<tr><th>not fused</th><th>why</th><th>where</th></tr>"
    return f'<div class="card"><table>{head}{"".join(rows)}</table></div>\n'


def _sentence(reason: str) -> str:
    return reason if reason.startswith("aten::") else reason[:1].upper() + reason[1:]


def _program(findings: Findings) -> str:
    """The lines of the program around those that are in the graphs."""
    lines: dict[tuple[str, int], dict[str, set[str]]] = {}
    for kind, node in _placed(findings):
        if node.place.file:
            entry = lines.setdefault(
                (node.place.file, node.place.line),
                {"fused": set(), "left": set(), "idle": set(), "text": set()},
            )
            entry[kind].add(node.kind.removeprefix("aten::"))
            entry["text"].add(node.place.text)
    parts = []
    for file in dict.fromkeys(file for file, _ in sorted(lines)):
        numbers = sorted(line for f, line in lines if f == file)
        try:
            text = dict(enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1))
        except (OSError, UnicodeDecodeError):  # a program from a string or a notebook: the known lines only
            text = {n: next(iter(lines[file, n]["text"])) for n in numbers}
        shown = sorted({n for at in numbers for n in range(at - 2, at + 3) if n in text})
        body = ""
        for before, n in zip([None, *shown], shown):
            body += '<div class="gap"></div>' if before is not None and n != before + 1 else ""
            body += _line(n, text[n], lines.get((file, n)))
        parts.append(f'<h2>{escape(Path(file).name)}</h2><div class="card source">{body}</div>\n')
    return "".join(parts)


def _placed(findings: Findings):
    """(`fused`, `left` or, where it did not run, `idle`, node) for every node."""
    for node in findings.left_out:
        yield "idle" if node.reason == NOT_RUN else "left", node
    for group in findings.groups:
        for node in group.nodes:
            yield ("left" if group.refusal else "fused"), node


def _line(number: int, text: str, entry: dict[str, set[str]] | None) -> str:
    kind = why = ""
    if entry:
        marks = [kind for kind in ("fused", "left") if entry[kind]]
        kind = "both" if len(marks) == 2 else "".join(marks)
        notes = (("not fused", entry["left"]), ("did not run", entry["idle"]))
        why = "; ".join(f"{note}: {', '.join(sorted(kinds))}" for note, kinds in notes if kinds)
    note = f'<span class="why">{escape(why)}</span>' if why else ""
    return f'<div class="{kind}"><span class="no">{number}</span><pre>{escape(text) or " "}</pre>{note}</div>'
