"""A graph as SVG: groups and nodes left out as boxes, in layers, with lines from makers to readers.

In: a `GraphReport`. Out: an `<svg>` element; colours come from the page's classes `fused`, `left`, `bad`.
Example: two groups around a matrix product are three boxes, one below the other."""

from __future__ import annotations

from html import escape

from .findings import GraphReport, Group, Node, Part

_CHARACTER, _LINE, _PAD, _GAP_X, _GAP_Y = 7.9, 18, 12, 28, 40
_MOST_LINES = 9  # of ops in a box
_WIDEST = 34  # characters of a line


def drawing(graph: GraphReport) -> str:
    """The SVG text."""
    texts = [_text(item) for item in graph.items]
    sizes = [(_CHARACTER * max(map(len, t)) + 2 * _PAD, _LINE * len(t) + 2 * _PAD - 4) for t in texts]
    layers = _layers(graph)
    width = max(sum(sizes[i][0] + _GAP_X for i in layer) for layer in layers) + _GAP_X
    places: "dict[int, tuple[float, float]]" = {}
    y = float(_PAD)
    for layer in layers:
        x = (width - sum(sizes[i][0] for i in layer) - _GAP_X * (len(layer) - 1)) / 2
        for i in layer:
            places[i] = (x, y)
            x += sizes[i][0] + _GAP_X
        y += max(sizes[i][1] for i in layer) + _GAP_Y
    edges = "".join(_edge(places, sizes, a, b) for a, b in graph.edges)
    boxes = "".join(_box(item, texts[i], places[i], sizes[i]) for i, item in enumerate(graph.items))
    height = y - _GAP_Y + _PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(graph.title)}">'
        f"{edges}{boxes}</svg>"
    )


def _layers(graph: GraphReport) -> "list[list[int]]":
    """Items by the longest path that leads to them; in a layer as near below their makers as they come."""
    depth = [0] * len(graph.items)
    makers: "dict[int, list[int]]" = {}
    for a, b in graph.edges:  # sorted, and makers stand before readers
        makers.setdefault(b, []).append(a)
    for b in range(len(graph.items)):
        depth[b] = max((depth[a] + 1 for a in makers.get(b, ())), default=0)
    layers: "list[list[int]]" = [[] for _ in range(max(depth) + 1)]
    for i, d in enumerate(depth):
        layers[d].append(i)
    rank: "dict[int, float]" = {}
    for layer in layers:
        layer.sort(key=lambda i: sum(rank[a] for a in makers[i]) / len(makers[i]) if makers.get(i) else i)
        rank.update((i, k - len(layer) / 2) for k, i in enumerate(layer))
    return layers


def _text(item: "Group | Node | Part") -> "list[str]":
    if isinstance(item, Part):
        return [f"differentiated part {item.number}"]
    if isinstance(item, Node):
        return [_cut(item.kind.removeprefix("aten::"))]
    lines: "list[str]" = []
    for node in item.nodes:
        name = node.kind.removeprefix("aten::")
        if lines and len(lines[-1]) + len(name) + 2 <= _WIDEST:
            lines[-1] += f", {name}"
        else:
            lines.append(_cut(name))
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"and more: {len(item.nodes)} ops in all"]
    return [f"group {item.number}", *lines]


def _cut(name: str) -> str:
    return name if len(name) <= _WIDEST else name[: _WIDEST - 3] + "..."


def _kind(item: "Group | Node | Part") -> "tuple[str, str]":
    """The class of its box, and what shows while the pointer is over it."""
    if isinstance(item, Part):
        return "part", "its own graphs, forward and backward, follow"
    if isinstance(item, Node):
        return "left", item.reason
    return ("bad", item.refusal) if item.refusal else ("fused", ", ".join(k.name for k in item.kernels))


def _box(
    item: "Group | Node | Part", lines: "list[str]", place: "tuple[float, float]", size: "tuple[float, float]"
) -> str:
    (x, y), (w, h) = place, size
    kind, hint = _kind(item)
    titled = ' class="title"' if isinstance(item, Group) else ""
    rows = "".join(
        f'<text x="{x + _PAD:.0f}" y="{y + _PAD + 10 + _LINE * k:.0f}"'
        f"{titled if k == 0 else ''}>{escape(line)}</text>"
        for k, line in enumerate(lines)
    )
    box = f'<rect class="box {kind}" x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="8"/>'
    return f"<g><title>{escape(hint)}</title>{box}{rows}</g>"


def _edge(places, sizes, a: int, b: int) -> str:
    """A curve from the bottom of `a` to the top of `b`."""
    x1, y1 = places[a][0] + sizes[a][0] / 2, places[a][1] + sizes[a][1]
    x2, y2 = places[b][0] + sizes[b][0] / 2, places[b][1]
    bend = max((y2 - y1) / 2, 16)
    points = f"{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    return f'<path class="edge" d="M{x1:.0f} {y1:.0f} C{points}"/>'
