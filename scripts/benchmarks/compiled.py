"""`scripts/bench --compile`: torch.compile with tsfuser beside inductor and eager, model by model; and
`scripts/bench --thunder`: the same with lightning-thunder and its executors.

In: names of cases and peers. Out: a `Result` each, when it is there. Each backend runs in a process of its
own with folders of its own for compiled kernels: empty ones, and in a second process the same again. The
next process imports torch while one measures. Example:

    for result in measure(["mlp"], peers, large=False, deadline=float("inf")):
        print(result.table())
"""

import math
import tempfile
import time
from pathlib import Path

from .child import Child
from .compiled_cases import CASES, PACKAGES
from .report import OUT_OF_TIME, Result
from .thunder_cases import CASES as OF_THUNDER
from .thunder_cases import EXECUTORS
from .timing import CUDA

COMPARED = ("eager", "compile", "tsfuser")
WITH_THUNDER = ("eager", *EXECUTORS)
MOST = 75  # seconds for one process
_CHILD = Path(__file__).with_name("compiled_child.py")
_ORDER = ("first s", "filled s", "its", "gpu us", "kernels", "peak MB", "graphs", "new krnls", "error")
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TSFUSER_CACHE_DIR")


def measure(names, peers, large, deadline):
    """A Result for each model for which time is left; `peers` are of COMPARED, or of WITH_THUNDER."""
    with tempfile.TemporaryDirectory(prefix="tsfuser-bench-") as root:
        orders = [order for name in names for order in _orders(name, peers, large)]
        waiting = _started(root, orders[0]) if orders else None
        results = {}
        for k, order in enumerate(orders):
            left = deadline - time.monotonic()
            result = results.setdefault(order["model"], _result(order["model"], peers, large))
            child, waiting = waiting, None
            if k + 1 < len(orders):
                waiting = _started(root, orders[k + 1])
            if left > 2:
                _do({**order, "seconds": min(MOST, left)}, child, result)
                if left < MOST and time.monotonic() > deadline:
                    _say_out_of_time(result.cells[order["peer"]])
            else:
                child.end()
                result.cells[order["peer"]].setdefault("error", OUT_OF_TIME)
            if k + 1 == len(orders) or orders[k + 1]["model"] != order["model"]:
                for cell in result.cells.values():
                    for column in [column for column in _ORDER if column in cell]:
                        cell[column] = cell.pop(column)
                yield results[order["model"]]


def _orders(name, peers, large):
    """What the processes of a model do: eager comes with tsfuser."""
    chosen = [peer for peer in dict.fromkeys((*COMPARED, *WITH_THUNDER)) if peer in peers]
    if any(peer.endswith("tsfuser") for peer in chosen):
        chosen = [peer for peer in chosen if peer != "eager"]
    for peer in chosen:
        for more in (True, False) if peer != "eager" else (True,):
            order = {"model": name, "peer": peer, "large": large, "more": more}
            yield {**order, "thunder": _of_thunder(peers)}


def _of_thunder(peers):
    return any(peer in EXECUTORS for peer in peers)


def _started(root, order):
    """A process that imports torch and waits; both of a model and peer have the same folders for kernels."""
    path = Path(root, f"{order['model']}-{order['peer']}")
    folders = {name: path / name for name in _FOLDERS}
    for folder in folders.values():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Child(_CHILD, {name: str(folder) for name, folder in folders.items()})


def _result(name, peers, large):
    of_thunder = _of_thunder(peers)
    case = (OF_THUNDER if of_thunder else {**CASES, **PACKAGES})[name]
    details = ["training" if case.trains else "inference"]
    narrow = "bfloat16" if of_thunder else "bfloat16 autocast" if case.autocast else "float32"
    details += [narrow if CUDA else "float32"]
    shape = list(case.inputs(large, case.first(large))[0].shape)
    title = ", ".join([case.title, str(shape), *details])
    compared = WITH_THUNDER if of_thunder else COMPARED
    return Result(name, title, "its", cells={peer: {} for peer in compared if peer in peers})


def _do(order, child, result):
    cell = result.cells[order["peer"]]
    child.send(order)
    for found in child.told(order["seconds"]):
        if "eager" in found:
            result.cells.setdefault("eager", {}).update(found["eager"])
        elif order["more"]:
            cell.update(found)
        elif "first s" in found:
            cell["filled s"] = found["first s"]
        else:
            cell.setdefault("error", found["error"])
    if (done := cell.pop("shapes", None)) not in (None, 20):
        result.facts[f"{order['peer']}, shapes"] = f"{done} of 20"


def _say_out_of_time(cell):
    """Replaces the message of a process that ran out of budget."""
    if cell.get("error", "").startswith("not all was measured"):
        cell["error"] = OUT_OF_TIME


#: What is compared with torch.compile's: column -> whether less is better
_COLUMNS = {"first s": True, "filled s": True, "its": False, "gpu us": True, "peak MB": True}


def summary(results):
    """Geometric means of tsfuser's figures over inductor's, and sums over twenty sizes."""
    lines = []
    for column, lower in _COLUMNS.items():
        pairs = [[r.cells.get(peer, {}).get(column) for peer in ("tsfuser", "compile")] for r in results]
        pairs = [(a, b) for a, b in pairs if isinstance(a, float) and isinstance(b, float) and a > 0 < b]
        if pairs:
            mean = math.exp(sum(math.log(a / b) for a, b in pairs) / len(pairs))
            better = f"{'less' if lower else 'more'} is better, {len(pairs)} models"
            lines.append(f"{column:<10}{mean:>8.3f} of torch.compile's ({better})")
    for column in ("graphs", "new krnls"):
        found = [[r.cells.get(peer, {}).get(column) for peer in ("tsfuser", "compile")] for r in results]
        found = [pair for pair in found if None not in pair]
        if found:
            ours, other = map(sum, zip(*found))
            lines.append(f"{column:<10}{ours:>8} for 20 more sizes, torch.compile's {other}")
    return "\n".join(lines)
