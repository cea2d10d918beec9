"""What a step of a program costs: kernels of groups, and ops that are left to torch.

In: an isolated program, whose groups are compiled. Out: the last run of each group, and `Costs`. Example:

    runs, costs = measured(isolated)
    costs.ops["aten::conv2d"]     # seconds in one step, on the device
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .isolate import Isolated
from .observe import Run, observing

REPEATS = 5  # of the timed calls; the shortest time counts
PROFILED = 2  # calls


@dataclass(frozen=True)
class Launches:
    """Those of one kernel in one step."""

    times: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Costs:
    """Of one step, forward and, in training, backward, without the copies of arguments that it needs.
    `seconds`: from the call to the last result; `kernels`: by number of the group and name; `ops`: times
    and seconds of each op of torch that the program or autograd calls, with the ops that it calls itself.
    `ops` is empty where a profiler runs already, or torch has none of the kind that is used here."""

    seconds: float
    kernels: Mapping[tuple[int, str], Launches]
    ops: Mapping[str, tuple[int, float]]

    def numbered(self, numbers: Mapping[int, int]) -> Costs:
        """The same, with the numbers that groups have in a report."""
        found = {(numbers[g], name): x for (g, name), x in self.kernels.items() if g in numbers}
        return replace(self, kernels=found)


def measured(isolated: Isolated) -> tuple[dict[int, list[Run]], Costs]:
    """Group -> its last run in a step, with the shortest times of a few steps; and what a step costs."""
    last: dict[int, Run] = {}
    best: dict[tuple[int, str], Launches] = {}
    for _ in range(REPEATS):
        runs: list[Run] = []
        with observing(runs.append, timed=True):
            isolated.step()
        for run in runs:
            last[run.group] = _quicker(run, last.get(run.group))
        for key, found in _launches(runs).items():
            if key not in best or found.seconds < best[key].seconds:
                best[key] = found
    seconds = min(_seconds(isolated, isolated.arguments()) for _ in range(REPEATS))
    ops: dict[str, tuple[int, float]] = {}
    for _ in range(PROFILED):
        for kind, (times, took) in _ops(isolated).items():
            ops[kind] = (times, min(took, ops.get(kind, (times, took))[1]))
    return {group: [run] for group, run in last.items()}, Costs(seconds, best, ops)


def _quicker(run: Run, before: Run | None) -> Run:
    """The run, with the shorter time of each launch."""
    launches = run.launches
    if before is not None and [x.kernel for x in launches] == [x.kernel for x in before.launches]:
        launches = tuple(min(pair, key=lambda x: x.seconds) for pair in zip(launches, before.launches))
    return Run(run.group, run.reason, run.arguments, (), (), launches)


def _launches(runs: list[Run]) -> dict[tuple[int, str], Launches]:
    found: dict[tuple[int, str], Launches] = {}
    for run in runs:
        for x in run.launches:
            was = found.get((run.group, x.kernel), Launches(0, 0.0, 0))
            found[run.group, x.kernel] = Launches(was.times + 1, was.seconds + x.seconds, was.bytes + x.bytes)
    return found


def _seconds(isolated: Isolated, given: list[Any]) -> float:
    _wait()
    begun = time.perf_counter()
    isolated.step(given)
    _wait()
    return time.perf_counter() - begun


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _ops(isolated: Isolated) -> dict[str, tuple[int, float]]:
    """The ops of one step that no other op calls, by the profiler."""
    try:
        # Kineto, behind torch.profiler, writes to stderr, and takes seconds to start on a GPU.
        from torch.autograd import profiler_legacy
    except ImportError:  # torch calls it deprecated
        return {}
    if torch.autograd._profiler_enabled():
        return {}
    on_gpu = torch.cuda.is_initialized()
    given = isolated.arguments()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with profiler_legacy.profile(use_cuda=on_gpu) as profile:
                _seconds(isolated, given)
    except RuntimeError:  # another thread's profiler runs
        return {}
    times: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    for event in profile.function_events:
        if _is_op(event.name) and not _is_called_by_op(event):
            times[event.name] += 1
            micros[event.name] += event.device_time_total if on_gpu else event.cpu_time_total
    return {name: (n, micros[name] * 1e-6) for name, n in times.items()}


def _is_op(name: str) -> bool:
    return "::" in name and not name.startswith(("autograd::", "torch::"))


def _is_called_by_op(event) -> bool:
    caller = event.cpu_parent
    while caller is not None and not _is_op(caller.name):
        caller = caller.cpu_parent
    return caller is not None
