"""The kernels of one plan, compiled at the same time, or ahead of the plan.

In: (source, name) pairs. Out: their binaries, from disk or from compilers, in the same order. Example:

    start(target, [(source, "fused_add"), (third, "fused_mul")], "cpu")  # returns at once
    stored = binaries(target, [(source, "fused_add"), (other, "fused_sum")], "cpu")

The thread that plans waits here, and looks around while it does: Ctrl-C, the failure of another kernel, and a
compiler that takes too long end the wait, and all compilers of the plan with it. Those that were started
ahead go on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from .. import options
from ..errors import CompileError
from ..target.disk_cache import Stored
from ..target.job import Stop
from . import interrupts
from .progress import progress

_LOOK = 0.05  # seconds between two looks around
_GOODBYE = 1.0  # seconds that killed compilers get to be gone
_NICE = 10  # that much lower is the priority of compilers that nobody waits for
_MARGIN = 5.0  # seconds that a target gets to give up by itself: NVRTC, in this process, cannot be ended

_MOST = 1024  # kernels that are started ahead, of which nobody has asked for the result

Kernel = tuple[str, str]  # source, name


class _Job:
    """One kernel to compile. `began`: when, None while it waits for a thread."""

    def __init__(self, target, kernel: Kernel, device: str, stop: Stop):
        self.target, self.kernel, self.device, self.stop = target, kernel, device, stop
        self.began: float | None = None
        self.future: Future = Future()

    def run(self) -> None:
        """In a thread."""
        if not self.future.set_running_or_notify_cancel():
            return
        self.began = time.monotonic()
        target, of = self.target, (*self.kernel, self.device)
        try:
            self.stop.check()
            self.future.set_result(target.find(*of) or target.compile(*of, stop=self.stop))
        except BaseException as error:
            self.future.set_exception(error)

    def is_over(self) -> bool:
        """Whether nothing can be expected of it: it has not begun, and now never does, or it has failed."""
        return self.future.cancel() or (self.future.done() and self.future.exception() is not None)


class _Ahead:
    """What was started ahead, and its threads. These end where nothing is left to do, and with the main
    thread: a pool's would finish all that has not begun, too, before the process ends."""

    def __init__(self) -> None:
        self.jobs: dict[tuple, _Job] = {}  # cache: (target, kernel, device) -> until somebody asks for it
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._threads = 0

    def add(self, job: _Job) -> None:
        self.jobs[job.target, job.kernel, job.device] = job
        with self._lock:
            self._waiting.append(job)
            if self._threads >= _count():
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="tsfuser compiles ahead", daemon=False).start()
        except RuntimeError:  # the interpreter is on its way out, or there are too many threads
            with self._lock:
                self._threads -= 1

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._threads -= 1
                    return
                job = self._waiting.popleft()
            job.run()


_ahead = _Ahead()  # registry: of this process


def start(target, kernels: Sequence[Kernel], device: str) -> None:
    """Has threads make `kernels` for `device`, and returns at once. What goes wrong shows in `binaries`."""
    for kernel in kernels:
        if (target, kernel, device) in _ahead.jobs:
            continue
        while len(_ahead.jobs) >= _MOST:
            _ahead.jobs.pop(next(iter(_ahead.jobs)), None)
        _ahead.add(_Job(target, kernel, device, Stop()))


def forget() -> None:
    """Drops what was started ahead."""
    for job in list(_ahead.jobs.values()):
        job.future.cancel()
    _ahead.jobs.clear()


def _after_fork() -> None:
    global _ahead
    _ahead = _Ahead()  # its threads are the parent's


os.register_at_fork(after_in_child=_after_fork)


def _count() -> int:
    return len(os.sched_getaffinity(0))


def binaries(target, kernels: Sequence[Kernel], device: str, beside: bool = False) -> list[Stored]:
    """What `target` makes of `kernels` for `device`; `beside`: nobody waits for it, and the program keeps a
    core and its priority. Raises Refusal, CompileError, Interrupted."""
    found: dict[Kernel, Stored | None] = {}
    ahead = []
    for kernel in dict.fromkeys(kernels):
        job = _ahead.jobs.pop((target, kernel, device), None)
        if job is None or job.is_over():
            found[kernel] = target.find(*kernel, device)
        else:
            ahead.append(job)
    missing = [kernel for kernel, stored in found.items() if stored is None]
    if missing or ahead:
        found.update(_compile(target, missing, device, ahead, beside))
    return [found[kernel] for kernel in kernels]


def _compile(
    target, kernels: Sequence[Kernel], device: str, ahead: list[_Job], beside: bool
) -> dict[Kernel, Stored]:
    """Those of `kernels`, and of what was started ahead."""
    stop = Stop()
    own = [_Job(target, kernel, device, stop) for kernel in kernels]
    threads = max(1, min(len(kernels), _count() - beside))
    pool = ThreadPoolExecutor(threads, "tsfuser compiles", _lower_priority if beside else None)
    try:
        for job in own:
            try:
                pool.submit(job.run)
            except RuntimeError:  # the interpreter is on its way out, or there are too many threads
                job.run()
        _wait(target, ahead + own, quiet=beside)
        return {job.kernel: job.future.result() for job in ahead + own}
    except BaseException:
        stop.now()
        for job in own:
            job.future.cancel()
        wait([job.future for job in own], _GOODBYE)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    """Of this thread, and of the compilers that it starts."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _wait(target, jobs: Sequence[_Job], quiet: bool) -> None:
    """Returns when all are done. Raises when one has failed."""
    pending = {job.future for job in jobs}
    seconds = options.get("compile_timeout")
    with progress.waiting(len(pending)) as word:
        while pending:
            done, pending = wait(pending, _LOOK, FIRST_COMPLETED)
            for future in done:
                future.result()  # raises what the compiler did
                word.done()
            interrupts.check()
            now = time.monotonic()
            for job in jobs:
                if job.future in pending and now - (job.began or now) > seconds + _MARGIN:
                    limit = "TSFUSER_COMPILE_TIMEOUT sets this limit"
                    raise CompileError(
                        f"the compiler did not finish kernel {job.kernel[1]} in {seconds} s; {limit}"
                    )
            if not quiet:
                word.tick(target.cache.directory)
