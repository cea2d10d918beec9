"""What compiling has cost this process.

In: `count("kernels_compiled")` where a compiler really ran, `count("disk_hits")` where the disk cache had
the kernel, `count("plans_read")` where it had a plan, `count("graphs_read")` where it had a graph of
torch.compile, or what a pass makes of a scripted one. Out: `snapshot()`, e.g. `{"kernels_compiled": 1,
"disk_hits": 0, "plans_read": 0, "graphs_read": 0}`, part of `tsfuser.stats()`.
"""

from __future__ import annotations

import threading

_NAMES = ("kernels_compiled", "disk_hits", "plans_read", "graphs_read")
_lock = threading.Lock()
_counts = dict.fromkeys(_NAMES, 0)


def count(name: str) -> None:
    """Adds one to counter `name`."""
    with _lock:
        _counts[name] += 1


def snapshot() -> dict[str, int]:
    """A copy of all counters."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Sets all counters to 0."""
    with _lock:
        _counts.update(dict.fromkeys(_NAMES, 0))
