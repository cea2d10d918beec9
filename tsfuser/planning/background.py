"""Plans that are made beside the program, which runs unfused until they are there.

In: a group and a call that no plan serves. Out: the plan and kernels that threads have made for such calls;
None while they are at it. Then the call runs its original nodes, and the next one asks again. Example:

    if background.is_wanted(group_id):
        lowered = background.lowered(group_id, call, make)  # None: not yet

Compilers are processes of low priority, as many at a time as there are cores but one, so that the program
keeps what it needs. `wait` waits for all of them: in benchmarks, and in servers before they take requests.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from .. import options
from ..ir.call import Call
from . import ahead, compile
from .compile import Lowered

_MOST = 16  # classes of calls of one group


class _Job:
    """What is planned for calls like `call`. `result`: Lowered, or the exception, once it is `planned`."""

    def __init__(self, call: Call, make: Callable[[], Lowered]):
        self.call, self._make = call, make
        self.settings = ahead.settings()
        self.result: Lowered | BaseException | None = None
        self._planned = threading.Event()
        self._kernels: list[Future] = []

    def run(self) -> None:
        try:
            made = self._make()
            self._kernels = compile.start(made, beside=True)
            self.result = made
        except BaseException as error:  # for the call that asks next
            self.result = error
        self._planned.set()

    def is_done(self) -> bool:
        return self._planned.is_set() and all(kernel.done() for kernel in self._kernels)

    def wait(self, seconds: float | None) -> bool:
        """Waits at most `seconds`, None: for ever. Whether it is done."""
        begun = time.monotonic()
        if not self._planned.wait(seconds):
            return False
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begun))
        return not wait_for(self._kernels, left).not_done

    def taken(self) -> Lowered:
        """What was made. Raises what has gone wrong."""
        for kernel in self._kernels:
            kernel.result()
        if isinstance(self.result, Lowered):
            return self.result
        assert self.result is not None
        raise self.result

    def may_serve(self, call: Call) -> bool:
        """Whether it is for calls of this class, or may turn out to be: what tells classes apart is known
        only when it is done."""
        if self.settings != ahead.settings() or ahead.structure(self.call) != ahead.structure(call):
            return False
        return not self.is_done() or ahead.serves(self.call, call)


class _Workers:
    """The jobs of this process, and the thread that plans them one after the other: Python plans, so more
    would wait for each other."""

    def __init__(self) -> None:
        self.jobs: dict[int, list[_Job]] = {}  # by group
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def job_for(self, group_id: int, call: Call, make: Callable[[], Lowered]) -> _Job | None:
        """The job that is for such calls, started where there is none; None while the group has too many."""
        with self._lock:
            jobs = self.jobs.setdefault(group_id, [])
            found = next((job for job in jobs if job.may_serve(call)), None)
            if found is not None:
                return found
            if len(jobs) >= _MOST:
                unasked = next((job for job in jobs if job.is_done()), None)
                if unasked is None:
                    return None
                jobs.remove(unasked)
            found = _Job(call, make)
            jobs.append(found)
            self._waiting.append(found)
            starts, self._runs = not self._runs, True
        if starts:
            try:
                threading.Thread(target=self._work, name="tsfuser plans", daemon=False).start()
            except RuntimeError:  # the interpreter is on its way out, or there are too many threads
                with self._lock:
                    self._runs = False
        return found

    def is_pending(self, group_id: int, call: Call) -> bool:
        with self._lock:
            return any(not job.is_done() and job.may_serve(call) for job in self.jobs.get(group_id, ()))

    def forget(self, group_id: int, job: _Job) -> None:
        with self._lock, contextlib.suppress(KeyError, ValueError):
            self.jobs[group_id].remove(job)

    def pending(self) -> list[_Job]:
        with self._lock:
            return [job for jobs in self.jobs.values() for job in jobs if not job.is_done()]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._runs = False
                    return
                job = self._waiting.popleft()
            job.run()


_workers = _Workers()  # registry: of this process
_groups: set[int] = set()  # registry: those whose programs ask for it
_off = 0  # how many contexts of `off` there are


def mark(group_id: int, wanted: bool) -> None:
    """Notes whether plans of the group, which a program has made, are made in the background. Of programs
    that share a group, the last one decides."""
    if wanted:
        _groups.add(group_id)
    else:
        _groups.discard(group_id)


def is_wanted(group_id: int) -> bool:
    """Whether calls of the group wait for no plan."""
    return not _off and (options.in_background() or group_id in _groups)


@contextlib.contextmanager
def off() -> Iterator[None]:
    """A context in which calls wait for their plans, as where somebody looks at them."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def lowered(group_id: int, call: Call, make: Callable[[], Lowered]) -> Lowered | None:
    """What was made for calls like this one, its kernels on disk; None if it is not ready. Raises what `make`
    has raised, Refusal or CompileError among it."""
    job = _workers.job_for(group_id, call, make)
    if job is None or not job.is_done():
        return None
    _workers.forget(group_id, job)
    return job.taken()


def is_pending(group_id: int, call: Call) -> bool:
    """Whether a plan that is being made may serve calls like this one."""
    return _workers.is_pending(group_id, call)


def start(group_id: int, call: Call, make: Callable[[], Lowered]) -> None:
    """Has it made for calls like this one, and returns at once."""
    _workers.job_for(group_id, call, make)


def wait(timeout: float | None = None) -> bool:
    """Waits until all plans are made that calls so far have asked for (`background`, TSFUSER_COMPILE).
    `timeout`: the most seconds to wait; None: as long as it takes. Returns whether all are made. The next
    call of each function takes them."""
    end = None if timeout is None else time.monotonic() + timeout
    for job in _workers.pending():
        left = None if end is None else max(0.0, end - time.monotonic())
        if not job.wait(left):
            return False
    return not _workers.pending()


def forget() -> None:
    """Drops what is not begun, and what was made, as `reset` does with plans."""
    global _workers
    _workers = _Workers()


os.register_at_fork(after_in_child=forget)
