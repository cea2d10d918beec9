"""Says that the program waits for tsfuser or for compilers, once that takes long.

In: the step that tsfuser is at; how many kernels are to be compiled, and each that is done. Out: on stderr,
after 2 s of waiting, a line that changes in a terminal and goes when the wait is over, or two lines in a log:

    tsfuser: compiling 7 of 25 kernels, kept in /home/me/.cache/tsfuser
    tsfuser: done after 8 s

Waits for compilers that follow each other, as a model's groups get their plans one by one, count as one.
TSFUSER_PROGRESS=0 silences it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .. import options

PATIENCE = 2.0  # seconds of waiting that need no word
PAUSE = 10.0  # seconds without a compiler after which the next wait is another one
AGAIN = 10.0  # seconds of waiting that need no word in a log that has had one of this wait


class Progress:
    """All waits of this process. Any thread may report. `stream` is asked anew each time: programs replace
    stderr."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        stream: Callable[[], TextIO] = lambda: sys.stderr,
        timer: Callable[..., threading.Timer] = threading.Timer,
    ):
        self._clock = clock
        self._stream = stream
        self._timer = timer
        self._working = threading.local()
        self._lock = threading.Lock()
        self._total = self._done = self._waiting = 0
        self._since = self._last = self._waited = 0.0
        self._patience = PATIENCE
        self._said = ""
        self._said_by: object = None  # a _Work, or self for compilers

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """The program waits within the block while tsfuser does `what`. Work inside of other work is part of
        that, and so needs no word."""
        if getattr(self._working, "on", False) or not options.get("progress"):
            yield
            return
        work = _Work(f"tsfuser: {what}", self._clock())
        timer = self._timer(PATIENCE, self._begin, (work,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out, or has too many threads
            timer.start()
        self._working.on = True
        try:
            yield
            work.has_failed = False
        finally:
            self._working.on = False
            timer.cancel()
            with self._lock:
                if work.is_said:
                    self._over(None if work.has_failed else self._clock() - work.begun)
                work.is_said = True  # also for a timer that comes too late

    def _begin(self, work: _Work) -> None:
        with self._lock:
            if not self._said and not work.is_said:
                self._say(work.text, work)
                work.is_said = True

    @contextlib.contextmanager
    def waiting(self, count: int) -> Iterator[_Wait]:
        """A thread waits for `count` kernels within the block."""
        with self._lock:
            if not self._waiting:
                self._since = self._clock()
                if self._since - self._last > PAUSE:
                    self._total = self._done = 0
                    self._waited, self._patience = 0.0, PATIENCE
            self._waiting += 1
            self._total += count
        wait = _Wait(self, count)
        try:
            yield wait
        finally:
            self._end(wait.left)

    def _end(self, left: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._total -= left
            if not self._waiting:
                self._last = self._clock()
                self._waited += self._last - self._since
                if self._said_by is self:
                    self._over(None if left else self._waited)
                    if not self._is_terminal():
                        self._waited, self._patience = 0.0, AGAIN

    def _over(self, seconds: float | None) -> None:
        """What was said is over: after `seconds`, or None if it has failed."""
        if self._is_terminal():
            self._write("\r\033[K")
        elif seconds is not None:
            self._write(f"tsfuser: done after {seconds:.0f} s\n")
        self._said, self._said_by = "", None

    def done(self) -> None:
        with self._lock:
            self._done += 1

    def tick(self, folder: Path) -> None:
        with self._lock:
            if self._waited + self._clock() - self._since > self._patience and options.get("progress"):
                number = min(self._done + 1, self._total)
                self._say(f"tsfuser: compiling {number} of {self._total} kernels, kept in {folder}", self)

    def _say(self, text: str, by: object) -> None:
        if self._is_terminal():
            shown = text[: shutil.get_terminal_size().columns - 1]
            if shown != self._said:
                self._write(f"\r\033[K{shown}")
                self._said, self._said_by = shown, by
        elif not self._said:
            self._write(f"{text}\n")
            self._said, self._said_by = text, by

    def _is_terminal(self) -> bool:
        try:
            return self._stream().isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except (AttributeError, ValueError):  # no stderr, or a closed one
            return False

    def _write(self, text: str) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._stream().write(text)
            self._stream().flush()


@dataclass
class _Work:
    """What a thread does, and since when."""

    text: str
    begun: float
    is_said: bool = False
    has_failed: bool = True


class _Wait:
    """One thread's wait."""

    def __init__(self, progress: Progress, count: int):
        self._progress = progress
        self.left = count  # kernels that have not come

    def done(self) -> None:
        """One kernel more is there."""
        self.left -= 1
        self._progress.done()

    def tick(self, folder: Path) -> None:
        """Called a few times a second; `folder` is where kernels are kept."""
        self._progress.tick(folder)


progress = Progress()  # registry: the waits of this process
