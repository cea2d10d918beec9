"""One run of a compiler, as a process that cannot outlive our interest in it.

In: a command, a folder for its temporary files, the seconds it may take, and a `Stop`, by which another
thread can end it. Out: its exit status and output. Example:

    stop = Stop()
    status, output = run(("g++", "kernel.cpp"), folder, 120, stop)   # here
    stop.now()                                                       # in another thread: `run` raises Stopped

The process and all that it starts are a session of their own: they are killed together, and Ctrl-C in a
terminal reaches them through us only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path


class Stopped(Exception):
    """Somebody ended the run by `Stop.now`."""


class TimedOut(Exception):
    """The run took too long and was ended."""


class Stop:
    """Ends the runs that it was given to: those that are going on, and those to come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self._asked = False

    def now(self) -> None:
        """Kills them; `run` raises `Stopped`."""
        with self._lock:
            self._asked = True
            for process in self._running:
                _kill(process)

    def check(self) -> None:
        """Raises `Stopped` once `now` was called."""
        if self._asked:
            raise Stopped

    @contextlib.contextmanager
    def running(self, *command, **streams):
        """The process of a command; left with an exception, it is killed. Raises `Stopped` instead of
        starting it."""
        with self._lock:
            self.check()
            process = subprocess.Popen(*command, **streams)
            self._running.add(process)
        try:
            yield process
        except BaseException:
            _kill(process)
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)


def run(command: Sequence[str], folder: Path, seconds: float, stop: Stop | None = None) -> tuple[int, str]:
    """The exit status of `command`, and what it wrote to stdout and stderr, in whatever encoding. Raises
    `Stopped`, `TimedOut`, and OSError where it cannot be started. No process is left when it raises."""
    stop = stop or Stop()
    environment = {**os.environ, "TMPDIR": str(folder)}  # a killed compiler leaves its files
    said = folder / "output"
    with open(said, "wb") as output:  # not a pipe, which a daemon that the command starts may keep open
        streams = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        with stop.running(command, **streams, env=environment, start_new_session=True) as process:
            _wait(process, seconds)
    if process.returncode:
        stop.check()
    return process.returncode, said.read_bytes().decode(errors="backslashreplace")


def _wait(process: subprocess.Popen, seconds: float) -> None:
    """Returns when the process has ended. Raises `TimedOut` when it takes longer."""
    try:
        number = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # no such system call
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimedOut from None
        return
    try:  # unlike `Popen.wait(seconds)`, which looks every 50 ms, this returns when the process ends
        ended = select.poll()
        ended.register(number, select.POLLIN)
        if not ended.poll(1000 * seconds):
            raise TimedOut
    finally:
        os.close(number)
    process.wait()


def _kill(process: subprocess.Popen) -> None:
    """Kills the process, unless it has ended, and all that it has started in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
