"""What was measured, printed and written.

In: `Result`s, each with a cell of named values for every peer. Out: tables of at most 120 columns, a summary,
JSON. Example:

    cells = {"eager": {"its": 5670.0}, "tsfuser": {"its": 9700.0}}
    Result("gelu", "gelu(x + b) * y", "its", cells=cells).table()
"""

import json
from dataclasses import dataclass, field

from .peers import PEERS, THUNDER

_WIDTH, _LINE, _NAMES = 13, 120, 29


_PEERS = {**PEERS, **THUNDER}

#: The error of cases that were not measured because `--budget` was used up: nothing has failed.
OUT_OF_TIME = "not measured: the time budget is used up"


@dataclass
class Result:
    """`measure` is the column by which peers are compared: more is better, or less where `lower`."""

    name: str
    title: str
    measure: str
    lower: bool = False
    cells: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)

    def value(self, peer):
        return self.cells.get(peer, {}).get(self.measure)

    def best_peer(self):
        """The peer, not ours, with the best value; None where none has one."""
        found = [name for name in self.cells if not _PEERS[name].ours and self.value(name) is not None]
        return (min if self.lower else max)(found, key=self.value) if found else None

    def ratio(self, name="tsfuser"):
        """How many times better `name` is than the best peer; None where one of them has no value."""
        best, mine = self.best_peer(), self.value(name)
        if best is None or mine is None:
            return None
        return self.value(best) / mine if self.lower else mine / self.value(best)

    def of_compile(self, name="tsfuser"):
        """The device time of `name` over torch.compile's, where both have one."""
        mine, other = (self.cells.get(peer, {}).get("gpu us") for peer in (name, "compile"))
        return mine / other if _is_number(mine) and _is_number(other) else None

    def columns(self):
        """Those of all cells, in the order of the one that has most."""
        cells = sorted(self.cells.values(), key=len, reverse=True)
        return list(dict.fromkeys(column for cell in cells for column in cell if column != "error"))

    def table(self):
        """Lines: the title, the columns, a line for each peer."""
        columns = self.columns()
        ours = any(self.ratio(name) is not None for name in self.cells if _PEERS[name].ours)
        header = columns + (["of best"] if ours else [])
        width = min(_WIDTH, (_LINE - _NAMES) // max(len(header), 1))
        lines = [self.title, f"  {'':<27}" + "".join(f"{c:>{width}}" for c in header)]
        for name, cell in self.cells.items():
            line = f"  {_PEERS[name].title:<27}" + "".join(shown(cell.get(c), width) for c in columns)
            if _PEERS[name].ours and self.ratio(name) is not None:
                line += shown(self.ratio(name), width)
            lines.append(line)
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        return "\n".join(lines) + "\n"


def _is_number(value):
    return isinstance(value, (int, float)) and value > 0


def shown(value, width=_WIDTH):
    """A number in its column, with four digits; a word as it is; a dash where there is nothing."""
    if value is None or isinstance(value, str):
        text = value or "-"
    elif isinstance(value, int) or value >= 1000:
        text = f"{value:.0f}"
    else:
        text = f"{value:.3g}" if value < 1 else f"{value:.4g}"
    return f"{text:>{width}}"


def summary(results):
    """A line for each result that compares: ours, the best peer, the ratios."""
    titles = ("", "tsfuser", "best peer", "ratio", "gpu/compile", "of floor")
    lines = [f"{'':<23}" + "".join(f"{title:>12}" for title in titles) + "  best peer"]
    for result in results:
        if result.ratio() is None:
            continue
        best, mine = result.best_peer(), result.cells["tsfuser"]
        values = (
            result.value("tsfuser"),
            result.value(best),
            result.ratio(),
            result.of_compile(),
            mine.get("of floor"),
        )
        line = f"{result.name:<23}{result.measure:>12}" + "".join(shown(value, 12) for value in values)
        lines.append(f"{line}  {_PEERS[best].title}")
    return "\n".join(lines)


def not_measured(name, peers):
    """The Result of a case that no time is left for."""
    return Result(name, name, "its", cells={peer: {"error": OUT_OF_TIME} for peer in peers})


def has_failed(results, peer):
    """Whether a result of a peer is wrong, or could not be measured though there was time."""
    return any(result.cells.get(peer, {}).get("error", OUT_OF_TIME) != OUT_OF_TIME for result in results)


def errors(results):
    """A line for each peer that failed, with the last line of its error."""
    failed = [
        (r.name, _PEERS[name].title, cell["error"])
        for r in results
        for name, cell in r.cells.items()
        if "error" in cell
    ]
    return "\n".join(
        f"{name}, {peer}: {error.strip().splitlines()[-1][:90]}"[:120] for name, peer, error in failed
    )


def as_json(results, where):
    """Everything, with ratios, as text."""
    rows = [
        {
            "name": r.name,
            "title": r.title,
            "measure": r.measure,
            "lower": r.lower,
            "peers": r.cells,
            "facts": r.facts,
            "best_peer": r.best_peer(),
            "ratio": r.ratio(),
            "gpu_of_compile": r.of_compile(),
        }
        for r in results
    ]
    return json.dumps({**where, "results": rows}, indent=1) + "\n"
