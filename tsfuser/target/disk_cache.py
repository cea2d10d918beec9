"""Compiled kernels on disk, shared by processes and kept between runs.

In: a key (anything printable that decides the content) and a function that makes the file. Out: the path of
the file. Example:

    cache = DiskCache(options.cache_dir())
    path = cache.get(("host", source, flags), ".so", lambda temporary: compile(source, temporary))

A file appears under its name by an atomic rename, so readers see all of it or nothing, and processes that
make the same file at once replace it by its equal. Files are dropped, longest unused first, once they
exceed `limit` bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Callable, Iterator

from . import counters
from ..errors import TsfuserWarning

_LAYOUT = "1"  # changes when the meaning of a stored file does
_OFTEN = 3600  # seconds between two looks at all files
_MAKING = "making-"  # folders of files that are not finished


class DiskCache:
    """The cache in `directory`; where that cannot be written, a directory of this process alone takes its
    place, with one warning."""

    def __init__(self, directory: "Path | str", limit: int = 1 << 30):
        self.limit = limit
        self._asked = Path(directory)
        self._root: Path | None = None
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._trimmed = False

    @property
    def directory(self) -> Path:
        """Where the files are, created on first use."""
        with self._lock:
            if self._root is None:
                self._root = self._open()
            return self._root

    def path(self, key: object, suffix: str) -> Path:
        """Where the file of `key` is, or will be."""
        digest = hashlib.sha256(repr((_LAYOUT, key)).encode()).hexdigest()
        return self.directory / digest[:2] / (digest[2:40] + suffix)

    def get(self, key: object, suffix: str, make: Callable[[Path], None]) -> Path:
        """The file of `key`; `make` writes it to the path it is given if it is not there yet. Threads that
        ask for one key at once make it once."""
        path = self.path(key, suffix)
        if self._present(path):
            counters.count("disk_hits")
            return path
        with self._lock:
            making = self._making.setdefault(path.name, threading.Lock())
        with making:
            if self._present(path):
                return path
            with tempfile.TemporaryDirectory(prefix=_MAKING, dir=self.directory) as scratch:
                temporary = Path(scratch) / path.name
                make(temporary)
                path.parent.mkdir(exist_ok=True)
                os.replace(temporary, path)
            counters.count("kernels_compiled")
        with self._lock:
            self._making.pop(path.name, None)
            trim, self._trimmed = not self._trimmed, True
        if trim and self._is_due():
            self.trim()
        return path

    def first_time(self, key: object) -> bool:
        """Whether no process has asked this with `key` since the cache was empty."""
        path = self.path(key, ".asked")
        path.parent.mkdir(exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def drop(self, path: Path) -> None:
        """Forgets a file that turned out to be broken."""
        path.unlink(missing_ok=True)

    def _is_due(self) -> bool:
        """Whether no process has trimmed within an hour: to look at thousands of files takes longer than to compile one."""
        marker = self.directory / "trimmed"
        try:
            if time.time() - marker.stat().st_mtime < _OFTEN:
                return False
        except FileNotFoundError:
            pass
        marker.touch()
        return True

    def trim(self) -> None:
        """Deletes the longest unused files until the rest takes at most `limit` bytes. Runs once a process at most,
        when it has compiled something."""
        files = [(status.st_mtime, status.st_size, path) for path, status in self._entries("??/*")]
        for folder, status in self._entries(f"{_MAKING}*"):  # left by a process that was killed
            if time.time() - status.st_mtime > 3600:
                shutil.rmtree(folder, ignore_errors=True)
        excess = sum(size for _, size, _ in files) - self.limit
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size

    def _entries(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Files and folders with their state, without those that other processes delete meanwhile."""
        for path in self.directory.glob(pattern):
            try:
                yield path, path.stat()
            except FileNotFoundError:
                continue

    @staticmethod
    def _present(path: Path) -> bool:
        """Whether the file is there; its time of last use becomes now."""
        try:
            if path.stat().st_size == 0:  # a crash of the machine can leave an empty file behind a rename
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:  # readable, owned by someone else
            pass
        return True

    def _open(self) -> Path:
        try:
            self._asked.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._asked):
                pass
            return self._asked
        except OSError as error:
            fallback = tempfile.TemporaryDirectory(prefix="tsfuser-")
            self._fallback = fallback  # removed when the process ends
            reason = f"cannot write to {self._asked} ({error.strerror})"
            advice = "set TSFUSER_CACHE_DIR to a directory that can be written"
            warnings.warn(f"compiled kernels are not kept: {reason}; {advice}", TsfuserWarning, stacklevel=2)
            return Path(fallback.name)
