"""Timers. Host times by the clock, device times by events behind a filled queue, kernels from the profiler.

In: a step, a function without arguments. Out: medians, in the unit that the name says. Example:

    steps_per_second(step, 100), kernels(step)
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def seconds(function):
    """Wall time of one call, the device's work included; and what it returned."""
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - start, result


def steps_per_second(step, count, repeats=5):
    """Median over `repeats` of `count` steps each, host and device."""
    return statistics.median(
        count / seconds(lambda: [step() for _ in range(count)] and None)[0] for _ in range(repeats)
    )


def host_us(call, count):
    """Host time of a call whose kernels are too small to matter, in us: median of 5 averages."""
    for _ in range(20):
        call()
    averages = []
    for _ in range(5):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        averages.append(1e6 * (time.perf_counter() - start) / count)
    synchronize()
    return statistics.median(averages)


def time_us(call, sets, repeats, ahead_ms=10, warm_up=6):
    """Median time of `call(*sets[i])` in us. On a device: between events, behind a sleeping kernel that gives
    the host `ahead_ms` to run ahead. On the CPU: by the clock."""
    for i in range(warm_up):
        call(*sets[i % len(sets)])
    synchronize()
    if not CUDA:
        return clock_us(call, sets, repeats, 0)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(int(ahead_ms * 1.9e6))  # cycles, of a clock of at most 1.98 GHz
    marks[0].record()
    for i in range(repeats):
        call(*sets[i % len(sets)])
        marks[i + 1].record()
    synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))


def clock_us(call, sets, repeats, warm_up=6):
    """Median wall time of `call(*sets[i])` in us."""
    for i in range(warm_up):
        call(*sets[i % len(sets)])
    return 1e6 * statistics.median(seconds(lambda: call(*sets[i % len(sets)]))[0] for i in range(repeats))


def copy_bandwidth():
    """Bytes a second, read and written, of copying tensors that no cache holds."""
    size = 1 << (26 if CUDA else 22)
    sets = [(torch.randn(size, device=DEVICE), torch.empty(size, device=DEVICE)) for _ in range(2)]
    return 2e6 * sets[0][0].nbytes / time_us(lambda x, out: out.copy_(x), sets, 30)


def kernels(step, steps=20):
    """(us, number) a step of kernels, copies and fills that ran on the device, and those that ran at the same
    time, as a kernel does that is set up while the one before it runs, counted once; None on the CPU. From
    the profiler's trace, where annotations of ranges are told from kernels by their category."""
    if not CUDA:
        return None
    for _ in range(3):
        step()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ran = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return busy(ran) / steps, len(ran) / steps


def busy(intervals):
    """The length of the union of (begin, end) pairs."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
