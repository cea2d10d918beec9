"""How many graphs of torch.compile were translated, and what was left out: a part of `tsfuser.stats()`.

In: the outcomes that `watch.done` gets. Out: `snapshot() == {"graphs": 2, "left_to_python": {"cond is
Python's...": 1}, "graphs_unfused": {}}`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

_MOST_REASONS = 1024
_lock = threading.Lock()
_counts: dict[str, Counter[str]] = {"left_to_python": Counter(), "graphs_unfused": Counter()}
_graphs: Counter[str] = Counter()


def count(reasons: Iterable[str], failure: str) -> None:
    """Counts one graph. `reasons`: why nodes of it are left to Python. `failure`: why the whole graph runs
    unfused, or ""."""
    with _lock:
        _graphs["graphs"] += not failure
        for name, given in (("left_to_python", reasons), ("graphs_unfused", [failure] if failure else [])):
            for reason in given:
                known = reason in _counts[name] or len(_counts[name]) < _MOST_REASONS
                _counts[name][reason if known else "other reasons"] += 1


def snapshot() -> dict[str, Any]:
    """A copy of all counters."""
    with _lock:
        return {"graphs": _graphs["graphs"], **{name: dict(found) for name, found in _counts.items()}}


def reset() -> None:
    """Sets all counters to 0."""
    with _lock:
        for counter in (_graphs, *_counts.values()):
            counter.clear()
