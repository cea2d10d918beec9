"""An explanation as one HTML page without external files.

In: `Findings`. Out: the page: a summary, for each graph a drawing (groups green, nodes left out amber, what
one hands to another as lines) and its table, then the program with its lines in the same colours."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..grouping.unfused_reasons import NOT_RUN
from .drawing import drawing
from .findings import Findings, GraphReport, Group
from .table import UNREACHED, bandwidth, by_reason, count, duration, ops, size, summary

_STYLE = """
:root { --fused: #1a7f4b; --fused-soft: #e3f4ea; --left: #a4660a; --left-soft: #fdf1dc; --bad: #b3261e;
  --bad-soft: #fbe4e2; --ink: #1d2129; --soft: #667085; --line: #dfe3ea; --paper: #ffffff; --back: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --fused: #63d297; --fused-soft: #17382a; --left: #f0b95b;
  --left-soft: #3d2f14; --bad: #ff9a91; --bad-soft: #46201d; --ink: #e8eaee; --soft: #9aa4b2; --line: #353b46;
  --paper: #1b1f26; --back: #12151a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 19px; margin: 36px 0 12px; }
p.summary { color: var(--soft); margin: 0 0 20px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 16px;
  margin: 12px 0; overflow-x: auto; }
.bar { display: flex; height: 12px; border-radius: 6px; overflow: hidden; background: var(--line); }
.bar .fused { background: var(--fused); } .bar .left { background: var(--left); }
.legend { display: flex; gap: 20px; color: var(--soft); font-size: 13px; margin-top: 8px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th { white-space: nowrap; } td.why { min-width: 340px; } td code { overflow-wrap: anywhere; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr.top td { border-bottom: 0; padding-bottom: 0; } tr.top + tr td { padding-top: 0; }
tr:last-child td { border-bottom: 0; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.number { text-align: right; }
code, pre { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; }
.tag { display: inline-block; padding: 1px 8px; border-radius: 9px; font-size: 12px; white-space: nowrap; }
.tag.fused { color: var(--fused); background: var(--fused-soft); }
.tag.left { color: var(--left); background: var(--left-soft); }
.tag.idle { color: var(--soft); background: var(--back); } .tag.left, .tag.idle { white-space: normal; }
.tag.bad { color: var(--bad); background: var(--bad-soft); }
.where { color: var(--soft); font-size: 13px; }
details summary { cursor: pointer; color: var(--soft); font-size: 13px; }
details pre { width: 0; min-width: 100%; overflow-x: auto; background: var(--back);
  padding: 12px; border-radius: 8px; }
.source { padding: 8px 0; }
.source div { display: flex; width: max-content; min-width: 100%; padding: 0 16px;
  border-left: 4px solid transparent; }
.source .no { color: var(--soft); width: 48px; flex: none; text-align: right; padding-right: 16px;
  user-select: none; font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; }
.source pre { margin: 0; white-space: pre; }
.source .why { color: var(--soft); margin-left: 24px; font-size: 12px;
  align-self: center; }
.source .gap { height: 1px; margin: 8px 0; background: var(--line); }
.source .fused { background: var(--fused-soft); border-color: var(--fused); }
.source .left { background: var(--left-soft); border-color: var(--left); }
.source .both { background: linear-gradient(90deg, var(--fused-soft), var(--left-soft));
  border-color: var(--left); }
svg text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); }
svg .box.fused { fill: var(--fused-soft); stroke: var(--fused); }
svg .box.left { fill: var(--left-soft); stroke: var(--left); }
svg .box.bad { fill: var(--bad-soft); stroke: var(--bad); }
svg { display: block; margin: 0 auto; height: auto; }
svg .box.idle { fill: var(--back); stroke: var(--line); }
svg .title { font-weight: 600; }
svg .edge { fill: none; stroke: var(--soft); stroke-width: 1.3; opacity: .7; }
"""


def page(findings: Findings) -> str:
    """The whole page."""
    body = [_head(findings), *map(_graph, findings.graphs), _breaks(findings), _program(findings)]
    title = escape(f"tsfuser: {findings.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><main>\n{''.join(body)}</main></body></html>\n"
    )


def _head(findings: Findings) -> str:
    fused = sum(len(g.nodes) for g in findings.groups if g.reached and not g.refusal)
    left = sum(n.reason != NOT_RUN for n in findings.left_out) + sum(
        len(g.nodes) for g in findings.groups if g.refusal
    )
    seconds = sum(k.seconds or 0 for g in findings.groups for k in g.kernels)
    time = f" &middot; {duration(seconds)} in kernels" if seconds else ""
    line = escape(summary(findings).partition(": ")[2])
    caveat = f'<p class="tag bad">{escape(_sentence(findings.caveat))}.</p>' if findings.caveat else ""
    return (
        f'<h1>{escape(findings.name)}</h1><p class="summary">{line}{time}</p>{caveat}'
        f'<div class="bar"><div class="fused" style="flex:{fused}"></div>'
        f'<div class="left" style="flex:{left}"></div></div><div class="legend">'
        f'<span><i style="background:var(--fused)"></i>{count(fused, "op")} fused</span>'
        f'<span><i style="background:var(--left)"></i>{count(left, "op")} not fused</span></div>\n'
    )


def _graph(graph: GraphReport) -> str:
    parts = [f"<h2>{escape(graph.title[:1].upper() + graph.title[1:])}</h2>\n"]
    if not graph.items:
        what = "Nothing in it works on tensors." if graph.reached else f"{_sentence(UNREACHED)}."
        return f'{parts[0]}<div class="card where">{what}</div>\n'
    parts.append(f'<div class="card">{drawing(graph)}</div>\n')
    if graph.groups:
        parts.append(_kernels(graph.distinct()))
    if graph.left_out:
        parts.append(_left(graph))
    return "".join(parts)


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
        tag = f'<span class="tag {kind}">group {group.number}</span>'
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
            shape = f"{launch.grid} x ({launch.block_x}, {launch.block_y})" if launch else "not launched"
            cells = "".join(f'<td class="number">{n}</td>' for n in [shape, *numbers])
            name = escape(k.name).replace("_", "_<wbr>")
            code = f"<details><summary>code</summary><pre>{escape(k.source)}</pre></details>"
            rows.append(
                f'<tr class="top"><td>{names if i == 0 else ""}</td><td><code>{name}</code>'
                f'<div class="where">segment {k.segment} &middot; {escape(k.schedule)}</div></td>{cells}</tr>'
                f'<tr><td></td><td colspan="5">{code}</td></tr>'
            )
    titles = ("group", "kernel and schedule")
    numbers = ("grid x block", "time", "memory", "bandwidth")
    head = "".join(f"<th>{t}</th>" for t in titles) + "".join(f'<th class="number">{t}</th>' for t in numbers)
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
