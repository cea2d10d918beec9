"""`scripts/bench --dashboard`: whole models through torch.compile, tsfuser beside inductor and eager.

In: names of models, modes and parts, and a file of JSON lines. Out: a line for each model, mode and part that
was measured, added to the file at once; what the file has already is not measured again, so a run that was
cut off goes on. The models are a fixed list (dashboard_models.py); those that fail stay in it. The parts:

- `steady`: whether results and gradients of the first and third step are right, judged against float64; then
  the time of a step by the clock, of its kernels, and its peak memory. Each model has a process of its own,
  in which the peers take turns. Several processes compile side by side, then one after the other measures.
- `first`, `filled`: seconds of the first step, with nothing on disk and with all that a first process left.
- `sizes`: seconds and graphs that six more batch sizes need.

Example:

    measure(Request(["gpt2"], ["training"], ["steady"], peers, large=True), Path("results.jsonl"))
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .child import Child
from .dashboard_blocks import BLOCKS
from .dashboard_models import MODELS as WHOLE
from .report import shown
from .timing import CUDA

MODELS = {**WHOLE, **BLOCKS}
COMPARED = ("eager", "compile", "tsfuser")
MODES = ("training", "inference")
PARTS = ("steady", "first", "filled", "sizes")
SIDE_BY_SIDE = 8  # processes that compile at the same time; each has a model in float64 on the device
WARM_UP, MOST = 280, 40  # seconds of a process, in which it compiles and in which it measures
_CHILD = Path(__file__).with_name("dashboard_child.py")
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TSFUSER_CACHE_DIR")
_COLUMNS = {"steady": None, "first": "first s", "filled": "filled s", "sizes": None}


@dataclass(frozen=True)
class Request:
    """What is to be measured; `deadline`: when no process may begin any more, by time.monotonic()."""

    models: list[str]
    modes: list[str]
    parts: list[str]
    peers: list[str]
    large: bool
    deadline: float = float("inf")


def measure(request: Request, path: Path) -> Iterator[dict]:
    """The rows that `path` does not have yet, as they come; each is added to the file."""
    had = {_key(row) for row in read(path)}
    orders = [
        {"model": model, "mode": mode, "part": part, "large": request.large, "peers": list(request.peers)}
        for part in PARTS
        if part in request.parts
        for mode in request.modes
        for model in request.models
        if mode in MODELS[model].modes and (model, mode, part) not in had and MODELS[model].installed()
    ]
    with tempfile.TemporaryDirectory(prefix="tsfuser-dashboard-") as root:
        steady = [order for order in orders if order["part"] == "steady"]
        for k in range(0, len(steady), SIDE_BY_SIDE):
            yield from _noted(_side_by_side(steady[k : k + SIDE_BY_SIDE], request), path)
        others = (order for order in orders if order["part"] != "steady")
        yield from _noted((_alone(order, request, root) for order in others), path)


def read(path: Path) -> list[dict]:
    """The rows of a file; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _key(row):
    return row["model"], row["mode"], row["part"]


def _noted(rows, path):
    """The rows that were measured, each added to the file."""
    for row in rows:
        if row is not None:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            yield row


def _row(order):
    kept = {name: order[name] for name in ("model", "mode", "part")}
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    where = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    return {**kept, **where, "cells": {peer: {} for peer in order["peers"]}}


def _note(found, row):
    """Adds a finding: of a peer, or of all that have none where the process failed."""
    if "peer" in found:
        row["cells"].setdefault(found.pop("peer"), {}).update(found)
    elif "error" in found:
        for cell in row["cells"].values():
            if "ms" not in cell and not any(name.endswith(" s") for name in cell):
                cell.setdefault("error", found["error"])


def _side_by_side(orders, request):
    """The rows of the part `steady`; None for what there was no time for. A model that fails runs once more
    by itself: the others may have held the device's memory."""
    if time.monotonic() > request.deadline:
        return
    # inductor starts as many compilers in each process as there are cores
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    children, rows = [Child(_CHILD, alone) for _ in orders], [_row(order) for order in orders]
    again = []
    try:
        end = min(request.deadline, time.monotonic() + WARM_UP)
        for order, child in zip(orders, children):
            child.send(order, last=False)
        for row, child in zip(rows, children):
            for found in child.told(max(0.0, end - time.monotonic()), until="ready"):
                _note(found, row)
        for order, row, child in zip(orders, rows, children):
            left = min(MOST, request.deadline - time.monotonic())
            if child.process.poll() is None and left > 0:
                child.send("measure")
                for found in child.told(left):
                    _note(found, row)
            if len(orders) > 1 and any(map(_has_failed, row["cells"].values())):
                again.append(order)
            else:
                yield None if time.monotonic() > request.deadline and not _whole(row) else row
    finally:
        for child in children:
            child.end()
    for order in again:
        yield from _side_by_side([order], request)


def _whole(row):
    """Whether each peer was timed, or has failed by itself and not for want of time."""
    return all("ms" in cell or _has_failed(cell) for cell in row["cells"].values())


def _has_failed(cell):
    return "error" in cell and "not all was measured" not in cell["error"]


def _alone(order, request, root):
    """The row of another part, each peer in a process of its own; None where there was no time."""
    row = _row({**order, "peers": [peer for peer in order["peers"] if peer != "eager"]})
    for peer in row["cells"]:
        environment = {name: f"{root}/{order['model']}-{order['mode']}-{peer}/{name}" for name in _FOLDERS}
        for folder in environment.values():
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(2 if order["part"] == "filled" else 1):
            if time.monotonic() > request.deadline:
                return None
            child = Child(_CHILD, environment)
            child.send({**order, "peers": [peer], "column": _COLUMNS[order["part"]]})
            for found in child.told(min(WARM_UP, request.deadline - time.monotonic())):
                _note(found, row)
    return row


def line(row: dict) -> str:
    """A row in one line: of each peer what was found, or its error."""
    return "; ".join(
        f"{peer} " + (cell.get("error") or ", ".join(f"{n} {shown(v, 0)}" for n, v in cell.items()))[:110]
        for peer, cell in row["cells"].items()
    )


def has_failed(rows: list[dict], peer: str) -> bool:
    """Whether a result of the peer is wrong, or it could not run a model."""
    cells = [row["cells"].get(peer, {}) for row in rows]
    return any("error" in cell or cell.get("right") == "no" for cell in cells)


#: column -> its title in the table of ratios, tsfuser over inductor
RATIOS = {
    "ms": "clock",
    "kernel us": "kernels",
    "peak MB": "memory",
    "first s": "first",
    "filled s": "filled",
}


def table(rows: list[dict], mode: str) -> str:
    """Of one mode, a line for each model: right or not; times eager's steps of inductor and tsfuser; kernel
    us of both; tsfuser's kernels, memory, first steps and new sizes over inductor's; geometric means last."""
    merged = _merged(rows, mode)
    width = 2 + max([10, *map(len, merged)])
    head = f"{mode:<{width}}{'right':>9}{'x eager':>14}{'kernel us':>18}" + "".join(
        f"{title:>9}" for title in RATIOS.values()
    )
    lines = [head]
    for model, cells in merged.items():
        eager, other, ours = (cells.get(peer, {}) for peer in COMPARED)
        right = "/".join(cell.get("right", "failed" if "error" in cell else "-") for cell in (other, ours))
        faster = " / ".join(_shown(_ratio(eager, cell, "ms")) for cell in (other, ours))
        times = " / ".join(_shown(cell.get("kernel us"), 0) for cell in (other, ours))
        ratios = "".join(f"{_shown(_ratio(ours, other, column)):>9}" for column in RATIOS)
        lines.append(f"{model:<{width}}{right:>9}{faster:>14}{times:>18}{ratios}")
    means = {column: _mean(merged, column) for column in RATIOS}
    lines.append(
        f"{'mean':<{width}}{'':>9}{_speed(merged):>14}{'':>18}"
        + "".join(f"{_shown(mean):>9}" for mean in means.values())
    )
    return "\n".join(lines)


def failures(rows: list[dict]) -> str:
    """A line for each peer that failed at a model."""
    return "\n".join(
        f"{row['model']}, {row['mode']}, {row['part']}, {peer}: {cell['error'].strip().splitlines()[0][:100]}"
        for row in rows
        for peer, cell in row["cells"].items()
        if "error" in cell
    )


def _merged(rows, mode):
    """model -> peer -> all that the parts found, in the order of the list."""
    found = {model: {} for model in MODELS}
    for row in rows:
        if row["mode"] == mode and row["model"] in found:
            for peer, cell in row["cells"].items():
                found[row["model"]].setdefault(peer, {}).update(cell)
    return {model: cells for model, cells in found.items() if cells}


def _ratio(one, other, column):
    a, b = one.get(column), other.get(column)
    return a / b if isinstance(a, float) and isinstance(b, float) and b > 0 else None


def _mean(merged, column, one="tsfuser", other="compile"):
    """The geometric mean over the models of which both have a figure."""
    found = [_ratio(cells.get(one, {}), cells.get(other, {}), column) for cells in merged.values()]
    found = [ratio for ratio in found if ratio]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def _speed(merged):
    return " / ".join(_shown(_mean(merged, "ms", "eager", peer)) for peer in ("compile", "tsfuser"))


def _shown(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def draw(rows: list[dict], path: Path, where: str) -> None:
    """For each mode, bars of the steps a second of inductor and tsfuser over eager's, models in the order of
    tsfuser's; a PNG."""
    from .chart import pyplot

    plt = pyplot()
    found = {mode: speeds for mode in MODES if (speeds := _speeds(_merged(rows, mode)))}
    figure, all_axes = plt.subplots(
        len(found), 1, figsize=(12, 3.6 * len(found)), layout="constrained", squeeze=False
    )
    for axes, (mode, speeds) in zip(all_axes[:, 0], found.items()):
        for k, (peer, color) in enumerate((("inductor", "#b8c0c8"), ("tsfuser", "#22577a"))):
            places = [place + 0.4 * k - 0.2 for place in range(len(speeds))]
            axes.bar(places, [pair[k] for pair in speeds.values()], 0.4, label=peer, color=color)
        axes.axhline(1, color="#3d4148", linewidth=0.8)
        axes.text(len(speeds) - 0.35, 1, "eager", va="center", fontsize=9, color="#3d4148")
        axes.set_xlim(-0.6, len(speeds) - 0.4)
        axes.set_xticks(range(len(speeds)), speeds, rotation=60, ha="right", fontsize=9)
        axes.set_title(f"{mode}: steps a second, times eager's (more is better)", loc="left", fontsize=11)
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.995, 0.995, where, ha="right", va="top", fontsize=8, color="#666666")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _speeds(merged):
    """model -> steps a second of inductor and tsfuser over eager's, the slowest first."""
    ratios = {
        model: [_ratio(cells.get("eager", {}), cells.get(peer, {}), "ms") for peer in ("compile", "tsfuser")]
        for model, cells in merged.items()
    }
    return dict(sorted(((m, pair) for m, pair in ratios.items() if all(pair)), key=lambda found: found[1][1]))
