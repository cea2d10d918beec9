"""The targets in one table: what compiles kernels for a device, and the machine that schedules plan for.

In: a device, and how kernels for CPU tensors run (`options.host_launch()`). Out: its row. Example:

    row = chosen("cuda:0", "block")
    row.machine("cuda:0").multiprocessors, row.compiler(DiskCache(folder))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import options
from ..errors import Refusal
from ..schedule.machine import GPU, HOST, Machine
from ..target.cuda import CudaTarget
from ..target.disk_cache import DiskCache
from ..target.host import HostTarget


@dataclass(frozen=True)
class Target:
    """`compiler`: made once for each device; has `find`, `compile` and `load`. `machine`: of a device."""

    compiler: Callable[[DiskCache], Any]
    machine: Callable[[str], Machine]


def _host(cache: DiskCache) -> HostTarget:
    return HostTarget(cache, seconds=options.get("compile_timeout"))


def _fibers(cache: DiskCache, check: str = "") -> HostTarget:
    # Their kernels are small and run once or twice: at -O1 g++ takes twice as long for the same bits.
    seconds = options.get("compile_timeout")
    return HostTarget(cache, fibers=True, opt_level=0, seconds=seconds, check=check)


def _cuda(cache: DiskCache) -> CudaTarget:
    numbers = {name: options.get(name) for name in ("max_registers", "opt_level")}
    return CudaTarget(cache, fma=not options.disabled("fma"), **numbers)


def _cuda_machine(device: str) -> Machine:
    try:
        return CudaTarget.machine(device)
    except Refusal:  # no driver: what is planned here does not run here
        return GPU


#: By the launch of kernels for CPU tensors (the words of TSFUSER_HOST_LAUNCH); `cuda` for CUDA tensors.
TARGETS = {
    "block": Target(_host, lambda device: HOST),
    "fibers": Target(_fibers, lambda device: GPU),
    "fibers_races": Target(partial(_fibers, check="races"), lambda device: GPU),
    "fibers_memory": Target(partial(_fibers, check="memory"), lambda device: GPU),
    "cuda": Target(_cuda, _cuda_machine),
}


def chosen(device: str, launch: str) -> Target:
    """The row of `device`."""
    return TARGETS[launch if device == "cpu" else "cuda"]
