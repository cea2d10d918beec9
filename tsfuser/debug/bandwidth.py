"""`PYTORCH_NVFUSER_DUMP=dump_eff_bandwidth`: time and bandwidth of each launch.

In: the launches of every fused group from `start()` on. Out: one line each on stdout, as nvFuser wrote it.
Example: `fused_add_relu run in 0.0412 ms, achieved: 3256.1 GB/s`."""

from __future__ import annotations

from . import observe


def start() -> None:
    """From now on."""
    observe.add(_print, timed=True)


def _print(run: observe.Run) -> None:
    for launch in run.launches:
        rate = launch.bytes / launch.seconds * 1e-9 if launch.seconds else 0.0
        print(f"{launch.kernel} run in {launch.seconds * 1e3:.4f} ms, achieved: {rate:.1f} GB/s", flush=True)
