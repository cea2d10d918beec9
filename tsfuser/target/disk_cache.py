"""Compiled kernels on disk, shared by processes and kept between runs.

In: a key (anything printable that decides the content) and a function that makes the file. Out: its content,
checked. Example:

    cache = DiskCache(options.cache_dir())
    stored = cache.get(("host", source, flags), ".so", lambda temporary: compile(source, temporary))
    stored.content  # what the compiler wrote

A file appears under its name by an atomic rename, so readers see all of it or nothing, and processes that
make the same file at once replace it by its equal. Each file ends in a seal of its content and its key (see
seal.py), so a damaged file, or the file of another key, is made anew. Only files that nobody but the user and
root can change are used, since their content is run. Files are dropped, longest unused first, once they
exceed `limit` bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import log
from ..errors import CompileError, Refusal, warn
from . import counters, seal

_LAYOUT = "2"  # changes when the meaning of a stored file does
_OFTEN = 3600  # seconds between two looks at all files
_MAKING = "making-"  # files that are not finished
_NAME = re.compile(r"[0-9a-f][0-9a-f]/[0-9a-f]{38}\.[a-z]+")
_ADVICE = "set TSFUSER_CACHE_DIR to a directory of yours that nobody else can write"
LIMIT = 1 << 30  # bytes

#: Get the name and the path of each file that this process reads or writes, when it first does.
listeners: list[Callable[[str, Path], None]] = []  # registry


@dataclass(frozen=True)
class Stored:
    """A file of the cache. `content` has been checked, and stays what it is whatever happens to the file."""

    path: Path
    content: bytes = field(repr=False)


class DiskCache:
    """The cache in `directory`. Where that belongs to somebody else, others can write it, or it cannot be
    written, new files go to a directory of this process alone, with one warning."""

    def __init__(self, directory: Path | str, limit: int = LIMIT):
        self.limit = limit
        self._asked = Path(directory).absolute()
        self._places: list[Path] = []  # where files are looked for; new ones go to the last
        self._private: tempfile.TemporaryDirectory | None = None  # removed when the process ends
        self._lock = threading.RLock()
        self._making: dict[tuple[int, str], threading.Lock] = {}
        self._trimmed = False
        self._warned = False
        self._told: set[str] = set()

    @property
    def directory(self) -> Path:
        """Where new files go, created on first use."""
        return self._open()[-1]

    def get(self, key: object, suffix: str, make: Callable[[Path], None]) -> Stored:
        """The file of `key`; `make` writes it to the path it is given if it is not there yet. Threads that
        ask for one key at once make it once. Raises what `make` raises, and `CompileError` where there is no
        room for temporary files."""
        name, digest = _name(key, suffix)
        stored = self._find(name, digest)
        if stored:
            counters.count("disk_hits")
            return stored
        asked = (os.getpid(), name)  # a lock that is held at a fork is held for ever in the child
        with self._lock:
            making = self._making.setdefault(asked, threading.Lock())
        try:
            with making:
                stored = self._find(name, digest)
                return stored or self._store(name, digest, _made(make, Path(name).name))
        finally:
            with self._lock:
                self._making.pop(asked, None)

    def find(self, key: object, suffix: str) -> Stored | None:
        """The file of `key` if it is there."""
        stored = self._find(*_name(key, suffix))
        if stored:
            counters.count("disk_hits")
        return stored

    def put(self, key: object, suffix: str, content: bytes) -> None:
        """Makes `content` the file of `key`, if the directory can be written."""
        name, digest = _name(key, suffix)
        with contextlib.suppress(OSError):
            _write(self.directory / name, seal.sealed(content, digest))
            self._tell(name, self.directory / name)

    def adopt(self, name: str, content: bytes) -> None:
        """Puts a file there that another cache has held under `name`, if the directory can be written. Its
        seal is looked at when it is read. Raises ValueError for a name that no file of a cache has."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no file of a cache of tsfuser's")
        with contextlib.suppress(OSError):
            _write(self.directory / name, content)

    def read(self, key: object, suffix: str) -> bytes | None:
        """What was `put` under `key`."""
        stored = self._find(*_name(key, suffix))
        return stored.content if stored else None

    def text(self, key: object) -> str | None:
        """The text that was `put` under `key`."""
        content = self.read(key, ".txt")
        return None if content is None else content.decode()

    def first_time(self, key: object) -> bool:
        """Whether no process has asked this with `key` since the cache was empty. Raises `OSError` where the
        directory cannot be written."""
        path = self.directory / _name(key, ".asked")[0]
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            path.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True

    def keep(self, name: str, text: str) -> str:
        """Writes `text` where a user can look at it, under `name`. Returns the path, or why there is none."""
        path = self.directory / name
        try:
            path.write_text(text)
            return str(path)
        except OSError as error:
            return f"not kept, {error.strerror}"

    def drop(self, stored: Stored) -> None:
        """Forgets a file that turned out to be of no use."""
        with contextlib.suppress(OSError):
            stored.path.unlink()

    def hindrance(self) -> str:
        """Why the directory cannot be used, and what to do, as a sentence; "" where it can."""
        try:
            self._asked.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._asked.stat()
        except OSError as error:
            return _with_advice(f"cannot write to {self._asked} ({error.strerror})", self._asked)
        if reason := seal.distrust(status):
            return f"{self._asked} {reason}; {_ADVICE}"
        if not os.access(self._asked, os.R_OK | os.X_OK, effective_ids=True):
            return _with_advice(f"cannot read {self._asked}", self._asked)
        return ""

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """All that is kept."""
        return [*self._entries("??/*"), *self._entries("failed-*")]

    def trim(self) -> None:
        """Deletes the longest unused files until the rest takes at most `limit` bytes. Runs once a process at
        most, when it has compiled something."""
        files = [(status.st_mtime, status.st_size, path) for path, status in self.files()]
        for path, status in self._entries(f"{_MAKING}*"):  # left by a process that was killed
            if time.time() - status.st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else _unlink(path)
        excess = sum(size for _, size, _ in files) - self.limit
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            _unlink(path)
            excess -= size

    def _find(self, name: str, digest: bytes) -> Stored | None:
        """The file if it is there, whole, and nobody else's; its time of last use becomes now."""
        for place in self._open():
            path = place / name
            try:
                content, reason = seal.read(path, digest)
            except PermissionError:
                self._warn(
                    _with_advice(f"compiled kernels in {place} are not used: cannot read {path}", path)
                )
                continue
            except OSError:  # most often it is not there
                continue
            if content is not None:
                with contextlib.suppress(OSError):  # readable, owned by root
                    os.utime(path)
                self._tell(name, path)
                return Stored(path, content)
            if reason == seal.BROKEN:
                log.write("kernel_cache", f"{path} is damaged and is made anew", level=log.UPDATE)
            else:
                self._warn(f"{path} is not used, since it {reason}; delete it")
        return None

    def _store(self, name: str, digest: bytes, content: bytes) -> Stored:
        """Writes the file. Where that fails, this process goes on without it."""
        counters.count("kernels_compiled")
        path = self.directory / name
        try:
            _write(path, seal.sealed(content, digest))
        except OSError as error:
            reason = f"cannot write to {path.parents[1]} ({error.strerror})"
            self._use_private(_with_advice(reason, path))
            path = self.directory / name
            with contextlib.suppress(OSError):
                _write(path, seal.sealed(content, digest))
        self._tell(name, path)
        with self._lock:
            trim, self._trimmed = not self._trimmed, True
        if trim:
            with contextlib.suppress(OSError):
                if self._is_due():
                    self.trim()
        return Stored(path, content)

    def _tell(self, name: str, path: Path) -> None:
        with self._lock:
            if name in self._told:
                return
            self._told.add(name)
        for listener in listeners:
            listener(name, path)

    def _is_due(self) -> bool:
        """Whether no process has trimmed within an hour: to look at thousands of files takes longer than to
        compile one."""
        marker = self.directory / "trimmed"
        try:
            if time.time() - marker.stat().st_mtime < _OFTEN:
                return False
        except FileNotFoundError:
            pass
        marker.touch(mode=0o600)
        return True

    def _entries(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Files and folders with their state, without those that other processes delete meanwhile, and links
        that lead nowhere."""
        for path in self.directory.glob(pattern):
            try:
                yield path, path.stat()
            except OSError:
                continue

    def _open(self) -> list[Path]:
        """The places, chosen on first use."""
        with self._lock:
            if not self._places:
                if reason := self.hindrance():
                    self._use_private(reason)
                else:
                    self._places = [self._asked]
            return list(self._places)

    def _use_private(self, reason: str) -> None:
        """From now on new files go to a directory of this process alone; raises `CompileError` where there
        can be none."""
        with self._lock:
            if self._private is None:
                try:
                    self._private = tempfile.TemporaryDirectory(prefix="tsfuser-")
                except OSError as error:
                    text = f"nor can a temporary directory be written ({error.strerror})"
                    raise CompileError(f"{reason}; {text}") from None
                self._places.append(Path(self._private.name))
        self._warn(f"compiled kernels are not kept: {reason}")

    def _warn(self, text: str) -> None:
        """Tells the user once."""
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            warn(text)


def _with_advice(reason: str, path: Path) -> str:
    """The reason why `path` cannot be used, with its owner if that is the reason, and the remedy."""
    for place in (path, *path.parents):  # the first of another user, upwards from the first that exists
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        if owner == os.geteuid():
            break
        if os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            break
        if owner == 0:
            yours = f"`sudo chown -R {os.geteuid()} {place}` makes it yours"
            return (
                f"{reason}: {place} belongs to root, as where a container has made it; {yours}, or {_ADVICE}"
            )
        return f"{reason}: {place} belongs to another user (number {owner}); {_ADVICE}"
    return f"{reason}; {_ADVICE}"


def _name(key: object, suffix: str) -> tuple[str, bytes]:
    """Where in the directory the file of `key` is, or will be, and what its seal says of the key."""
    digest = hashlib.sha256(repr((_LAYOUT, key)).encode()).digest()
    return f"{digest.hex()[:2]}/{digest.hex()[2:40]}{suffix}", digest


def _made(make: Callable[[Path], None], name: str) -> bytes:
    """What `make` writes to a file."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix="tsfuser-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CompileError(f"cannot write temporary files ({error.strerror})") from None
    with scratch as folder:
        path = Path(folder) / name
        make(path)
        return path.read_bytes()


def _write(path: Path, data: bytes) -> None:
    """Makes `path` hold `data`, at once for every reader."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Only the user may read or write what mkstemp makes.
    number, temporary = tempfile.mkstemp(prefix=_MAKING, dir=path.parents[1])
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        _unlink(Path(temporary))
        raise


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def remember(cache: DiskCache, target: str, compiler: str) -> None:
    """Notes which compiler has made the latest kernels of `target`."""
    key = ("compiler", target)
    if cache.text(key) != compiler:
        cache.put(key, ".txt", compiler.encode())


def remembered(cache: DiskCache, target: str, ask: Callable[[], str]) -> str | None:
    """What tells the compiler of `target` from others, as `ask` says, or as was noted where there is no
    compiler."""
    try:
        return ask()
    except (Refusal, OSError):
        return cache.text(("compiler", target))
