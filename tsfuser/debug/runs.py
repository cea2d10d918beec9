"""`PYTORCH_JIT_LOG_LEVEL=">>kernel_cache"`: each run of a group.

In: the runs of all groups from `start()` on. Out: one line each on stderr. Example:
`[kernel_cache] group 0 ran: fused_add_relu`, or `[kernel_cache] group 0 ran unfused: its tensors are...`."""

from __future__ import annotations

from .. import log
from . import observe


def start() -> None:
    """From now on."""
    observe.add(_write, timed=True)


def _write(run: observe.Run) -> None:
    launched = ", ".join(launch.kernel for launch in run.launches) or "nothing to compute"
    what = f"unfused: {run.reason}" if run.reason else f": {launched}"
    log.write("kernel_cache", f"group {run.group} ran{' ' * bool(run.reason)}{what}", "", log.DEBUG)
