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
_NICE = 5  # so much lower is the priority of compilers that nobody waits for
_MARGIN = 5.0  # seconds that a target gets to give up by itself: NVRTC, in this process, cannot be ended

_MOST = 1024  # kernels that are compiled ahead, whose result nobody has asked for yet

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
    thread: a pool's would finish all that has not begun, too, before the process ends. `beside`: for a
    program that does not wait, and keeps a core and its priority."""

    def __init__(self, beside: bool = False) -> None:
        self._beside = beside
        self.jobs: dict[tuple, _Job] = {}  # cache: (target, kernel, device) -> until somebody asks for it
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._threads = 0

    def add(self, job: _Job) -> None:
        self.jobs[job.target, job.kernel, job.device] = job
        with self._lock:
            self._waiting.append(job)
            if self._threads >= max(1, _count() - self._beside):
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="tsfuser compiles ahead", daemon=False).start()
        except RuntimeError:  # the interpreter is on its way out, or there are too many threads
            with self._lock:
                self._threads -= 1

    def _work(self) -> None:
        if self._beside:
            _lower_priority()
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._threads -= 1
                    return
                job = self._waiting.popleft()
            job.run()


def _lower_priority() -> None:
    """Of this thread, and of the compilers that it starts."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


_ahead, _beside = _Ahead(), _Ahead(beside=True)  # registry: of this process


def start(target, kernels: Sequence[Kernel], device: str, beside: bool = False) -> list[Future]:
    """Has threads make `kernels` for `device`, and returns at once. What goes wrong shows in `binaries`,
    which waits for them; with `beside` nobody shall, before the futures are done."""
    queue, futures = _beside if beside else _ahead, []
    for kernel in kernels:
        job = _started(target, kernel, device)
        if job is None:
            while len(queue.jobs) >= _MOST:
                queue.jobs.pop(next(iter(queue.jobs)), None)
            job = _Job(target, kernel, device, Stop())
            queue.add(job)
        futures.append(job.future)
    return futures


def _started(target, kernel: Kernel, device: str, take: bool = False) -> _Job | None:
    """The job that makes a kernel; `take`: the caller waits for it."""
    key = target, kernel, device
    if take:
        return _ahead.jobs.pop(key, None) or _beside.jobs.pop(key, None)
    return _ahead.jobs.get(key) or _beside.jobs.get(key)


def forget() -> None:
    """Drops what was started ahead."""
    for queue in (_ahead, _beside):
        for job in list(queue.jobs.values()):
            job.future.cancel()
        queue.jobs.clear()


def _after_fork() -> None:
    global _ahead, _beside
    _ahead, _beside = _Ahead(), _Ahead(beside=True)  # the threads are the parent's


os.register_at_fork(after_in_child=_after_fork)


def _count() -> int:
    return len(os.sched_getaffinity(0))


def binaries(target, kernels: Sequence[Kernel], device: str) -> list[Stored]:
    """What `target` makes of `kernels` for `device`. Raises Refusal, CompileError, Interrupted."""
    found: dict[Kernel, Stored | None] = {}
    ahead = []
    for kernel in dict.fromkeys(kernels):
        job = _started(target, kernel, device, take=True)
        if job is None or job.is_over():
            found[kernel] = target.find(*kernel, device)
        else:
            ahead.append(job)
    missing = [kernel for kernel, stored in found.items() if stored is None]
    if missing or ahead:
        found.update(_compile(target, missing, device, ahead))
    return [found[kernel] for kernel in kernels]


def _compile(target, kernels: Sequence[Kernel], device: str, ahead: list[_Job]) -> dict[Kernel, Stored]:
    """The compiled `kernels`, and those that were started ahead."""
    stop = Stop()
    own = [_Job(target, kernel, device, stop) for kernel in kernels]
    pool = ThreadPoolExecutor(max(1, min(len(kernels), _count())), "tsfuser compiles")
    try:
        for job in own:
            try:
                pool.submit(job.run)
            except RuntimeError:  # the interpreter is on its way out, or there are too many threads
                job.run()
        _wait(target, ahead + own)
        return {job.kernel: job.future.result() for job in ahead + own}
    except BaseException:
        stop.now()
        for job in own:
            job.future.cancel()
        wait([job.future for job in own], _GOODBYE)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(target, jobs: Sequence[_Job]) -> None:
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
            word.tick(target.cache.directory)
