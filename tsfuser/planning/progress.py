"""Says that the program waits for compilers, once that takes long.

In: how many kernels are to be compiled, and each that is done. Out: on stderr, after 2 s of waiting, a line
that changes in a terminal and goes when the wait is over, or one line in a log: `tsfuser: compiling 7 of 25
kernels, kept in /home/me/.cache/tsfuser`. Waits that follow each other, as a model's groups get their plans
one by one, count as one. TSFUSER_PROGRESS=0 silences it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from .. import options

PATIENCE = 2.0  # seconds of waiting that need no word
PAUSE = 10.0  # seconds without a compiler after which the next wait is another one


class Progress:
    """All waits of this process. Any thread may report. `stream` is asked anew each time: programs replace
    stderr."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, stream: Callable[[], TextIO] = lambda: sys.stderr
    ):
        self._clock = clock
        self._stream = stream
        self._lock = threading.Lock()
        self._total = self._done = self._waiting = 0
        self._since = self._last = self._waited = 0.0
        self._said = ""

    @contextlib.contextmanager
    def waiting(self, count: int) -> Iterator[_Wait]:
        """A thread waits for `count` kernels within the block."""
        with self._lock:
            if not self._waiting:
                self._since = self._clock()
                if self._since - self._last > PAUSE:
                    self._total = self._done = 0
                    self._waited, self._said = 0.0, ""
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
                if self._said and self._is_terminal():
                    self._write("\r\033[K")
                    self._said = ""

    def done(self) -> None:
        with self._lock:
            self._done += 1

    def tick(self, folder: Path) -> None:
        with self._lock:
            if self._waited + self._clock() - self._since > PATIENCE and options.get("progress"):
                number = min(self._done + 1, self._total)
                self._say(f"tsfuser: compiling {number} of {self._total} kernels, kept in {folder}")

    def _say(self, text: str) -> None:
        if self._is_terminal():
            shown = text[: shutil.get_terminal_size().columns - 1]
            if shown != self._said:
                self._write(f"\r\033[K{shown}")
                self._said = shown
        elif not self._said:
            self._write(f"{text}\n")
            self._said = text

    def _is_terminal(self) -> bool:
        try:
            return self._stream().isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except (AttributeError, ValueError):  # no stderr, or a closed one
            return False

    def _write(self, text: str) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._stream().write(text)
            self._stream().flush()


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
