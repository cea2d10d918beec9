"""A graph as SVG: groups and nodes left out as boxes, in layers, with lines from makers to readers.

In: a `GraphReport`. Out: an `<svg>` element; colours come from the page's classes `fused`, `left`, `bad`,
`idle`. Example: two groups around a matrix product are three boxes, one below the other."""

from __future__ import annotations

from html import escape

from ..grouping.unfused_reasons import NOT_RUN
from .findings import GraphReport, Group, Node, Part
from .table import UNREACHED, ops

_CHARACTER, _LINE, _PAD, _GAP_X, _GAP_Y = 7.9, 18, 12, 28, 40
_MOST_LINES = 9  # of ops in a box
_WIDEST = 40  # characters of a line
_SMALLEST = 0.65  # scale of a wide drawing; wider ones are scrolled
_LANE = 6  # width that an edge takes in a layer that it passes


def drawing(graph: GraphReport) -> str:
    """The SVG text."""
    texts = [_text(item) for item in graph.items]
    sizes: list[tuple[float, float]]
    sizes = [(_CHARACTER * max(map(len, t)) + 2 * _PAD, _LINE * len(t) + 2 * _PAD - 4) for t in texts]
    layers, routes = _layers(graph)
    sizes += [(_LANE, 0.0)] * (1 + max(map(max, layers)) - len(sizes))
    width = max(sum(sizes[i][0] + _GAP_X for i in layer) for layer in layers) + _GAP_X
    places: dict[int, tuple[float, float]] = {}
    feet: dict[int, float] = {}  # where the layer ends that an item is in
    y = float(_PAD)
    for layer in layers:
        x = (width - sum(sizes[i][0] for i in layer) - _GAP_X * (len(layer) - 1)) / 2
        for i in layer:
            places[i] = (x, y)
            x += sizes[i][0] + _GAP_X
        foot = y + max(sizes[i][1] for i in layer)
        feet.update((i, foot) for i in layer)
        y = foot + _GAP_Y
    edges = "".join(_edge([(*places[i], *sizes[i], feet[i]) for i in route]) for route in routes)
    boxes = "".join(_box(item, texts[i], places[i], sizes[i]) for i, item in enumerate(graph.items))
    height = y - _GAP_Y + _PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" '
        f'style="width:clamp({_SMALLEST * width:.0f}px,100%,{width:.0f}px)" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(graph.title)}">'
        f"{edges}{boxes}</svg>"
    )


def _layers(graph: GraphReport) -> tuple[list[list[int]], list[list[int]]]:
    """Items by the longest path that leads to them, in a layer as near below their makers as they come; and
    for each edge what it goes through. Where it passes a layer, a number behind those of the items stands for
    its lane, so that it does not run under a box."""
    depth = [0] * len(graph.items)
    for a, b in sorted(graph.edges, key=lambda edge: edge[1]):  # makers stand before readers
        depth[b] = max(depth[b], depth[a] + 1)
    made = {b for _, b in graph.edges}
    for i in range(len(graph.items)):
        if i not in made:  # weights' casts, say: near those who read them, not all in one row
            readers = [depth[b] - 1 for a, b in graph.edges if a == i]
            depth[i] = min(readers, default=depth[i - 1] if i else 0)
    layers: list[list[int]] = [[] for _ in range(max(depth) + 1)]
    for i, d in enumerate(depth):
        layers[d].append(i)
    lanes: dict[tuple[int, int], int] = {}  # (maker, layer): its edges share a lane
    routes = []
    for a, b in graph.edges:
        passed = range(depth[a] + 1, depth[b])
        for d in passed:
            if (a, d) not in lanes:
                lanes[a, d] = len(graph.items) + len(lanes)
                layers[d].append(lanes[a, d])
        routes.append([a, *(lanes[a, d] for d in passed), b])
    makers: dict[int, set[int]] = {}
    for route in routes:
        for a, b in zip(route, route[1:]):
            makers.setdefault(b, set()).add(a)
    rank: dict[int, float] = {}
    for layer in layers:
        layer.sort(key=lambda i: sum(rank[a] for a in makers[i]) / len(makers[i]) if makers.get(i) else i)
        rank.update((i, k - len(layer) / 2) for k, i in enumerate(layer))
    return layers, routes


def _text(item: Group | Node | Part) -> list[str]:
    if isinstance(item, Part):
        return [f"differentiated part {item.number}"]
    if isinstance(item, Node):
        return [_cut(item.kind.removeprefix("aten::"))]
    lines = [""]
    for word in ops(item.nodes).split(", "):
        if lines[-1] and len(lines[-1]) + len(word) + 2 > _WIDEST:
            lines[-1] += ","
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + _cut(word)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"and more: {len(item.nodes)} ops in all"]
    return [f"group {item.number}", *lines]


def _cut(name: str) -> str:
    return name if len(name) <= _WIDEST else name[: _WIDEST - 3] + "..."


def _kind(item: Group | Node | Part) -> tuple[str, str]:
    """The class of its box, and what shows while the pointer is over it."""
    if isinstance(item, Part):
        return "idle", "its own graphs, forward and backward, follow"
    if isinstance(item, Node):
        return "idle" if item.reason == NOT_RUN else "left", item.reason
    if not item.reached:
        return "idle", UNREACHED
    return ("bad", item.refusal) if item.refusal else ("fused", ", ".join(k.name for k in item.kernels))


def _box(
    item: Group | Node | Part, lines: list[str], place: tuple[float, float], size: tuple[float, float]
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
    made = f"<g><title>{escape(hint)}</title>{box}{rows}</g>"
    return f'<a href="#group-{item.number}">{made}</a>' if isinstance(item, Group) else made


def _edge(stops: list[tuple[float, float, float, float, float]]) -> str:
    """A curve from the bottom of the first box to the top of the last, straight down where it is in a layer,
    whose end is the fifth number of a stop."""
    x, y, w, h, _ = stops[0]
    d = f"M{x + w / 2:.0f} {y + h:.0f}"
    for (x1, _, w1, _, foot), (x2, y2, w2, _, _) in zip(stops, stops[1:]):
        start, end, bend = x1 + w1 / 2, x2 + w2 / 2, max((y2 - foot) / 2, 16)
        d += f" V{foot:.0f} C{start:.0f} {foot + bend:.0f} {end:.0f} {y2 - bend:.0f} {end:.0f} {y2:.0f}"
    return f'<path class="edge" d="{d}"/>'
