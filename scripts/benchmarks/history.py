"""Figures of scripts/bench over time.

In: what `--json` wrote, and a file with a line of JSON for each earlier run. Out: rows that compare each
figure with the median of the earlier ones on the same device with the same torch. Example of a line:

    {"when": "2026-11-29 17:00", "commit": "af28200", "device": "CPU, 2 threads", "torch": "2.13.0",
     "figures": {"layer_norm": 1.62}}
"""

import json
from dataclasses import dataclass
from statistics import median

NEEDED = 3  # earlier figures: fewer do not tell a slower program from a bad day


@dataclass(frozen=True)
class Row:
    """A figure now, None if it failed; and the median of `count` earlier ones, None without any."""

    name: str
    now: float | None
    before: float | None
    count: int

    @property
    def change(self):
        return self.now / self.before - 1 if self.now is not None and self.before else None

    def is_worse(self, threshold):
        """Whether more than that part of it is lost, and enough runs say so."""
        if self.count < NEEDED:
            return False
        return self.now is None or self.change < -threshold


def run_of(measured, when, commit):
    """The line for a file that `scripts/bench --json` wrote."""
    return {
        "when": when,
        "commit": commit,
        "device": measured["device"],
        "torch": measured["torch"],
        "figures": {row["name"]: _figure(row) for row in measured["results"]},  # null: it failed
    }


def _figure(row):
    """How many times faster tsfuser is than eager, else than the best peer; None where one has no value."""
    mine, eager = (row["peers"].get(peer, {}).get(row["measure"]) for peer in ("tsfuser", "eager"))
    if not mine or not eager:
        return row["ratio"]
    return eager / mine if row["lower"] else mine / eager


def read(path):
    """The runs of the file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path, run):
    """Puts a run at the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


def compared(run, earlier, last):
    """A row for each figure of the run, compared with the `last` runs like it."""
    alike = [x for x in earlier if (x["device"], x["torch"]) == (run["device"], run["torch"])][-last:]
    rows = []
    for name, now in run["figures"].items():
        found = [figure for x in alike if (figure := x["figures"].get(name)) is not None]
        rows.append(Row(name, now, median(found) if found else None, len(found)))
    return rows


def table(rows, threshold):
    """A line for each row."""
    lines = [f"{'times eager':<24}{'now':>10}{'before':>10}{'change':>8}  runs"]
    for row in rows:
        now, before = (f"{x:.3g}" if x is not None else "-" for x in (row.now, row.before))
        change = "-" if row.change is None else f"{row.change:+.0%}"
        worse = "  worse" if row.is_worse(threshold) else ""
        lines.append(f"{row.name:<24}{now:>10}{before:>10}{change:>8}{row.count:>6}{worse}")
    return "\n".join(lines)
