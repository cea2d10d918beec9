"""A loaded kernel, and what it was made of: its source, and the headers that every kernel includes."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

RUNTIME = Path(__file__).parent.parent / "codegen" / "runtime"


@dataclass(frozen=True)
class Function:
    """`handle` is a CUfunction or the address of a host function, valid as long as `keepalive` lives. Of a
    CUDA kernel also what one thread uses: `registers`, and `local_bytes` of spilled registers and local
    arrays; and whether it `waits` for the kernel before it by itself (`wait_for_predecessor` in
    runtime/kernel.h), so that it may be set up while that one runs."""

    handle: int
    keepalive: object = field(repr=False, compare=False)
    registers: int = 0
    local_bytes: int = 0
    waits: bool = False


class RecentFunctions:
    """The functions used last, at most `most`, by their key. A function that is dropped lives as long as
    a plan holds it."""

    def __init__(self, most: int):
        self.most = most
        self._functions: OrderedDict[Hashable, Function] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._functions)

    def get(self, key: Hashable) -> Function | None:
        """The function of `key`, or None."""
        with self._lock:
            found = self._functions.get(key)
            if found is not None:
                self._functions.move_to_end(key)
            return found

    def add(self, key: Hashable, function: Function) -> Function:
        """Keeps `function`; returns the one that was there before, if any."""
        dropped = []  # unloaded after the lock is gone
        with self._lock:
            function = self._functions.setdefault(key, function)
            while len(self._functions) > self.most:
                dropped.append(self._functions.popitem(last=False))
        return function

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            functions, self._functions = self._functions, OrderedDict()
        functions.clear()


def source_digest(source: str) -> str:
    """Stands for a kernel's source in keys."""
    return hashlib.sha256(source.encode()).hexdigest()


@functools.cache
def headers_digest() -> str:
    """sha256 of all runtime headers, part of every kernel's key in the disk cache."""
    digest = hashlib.sha256()
    for header in sorted(RUNTIME.glob("*.h")):
        text = header.read_bytes()
        digest.update(f"{header.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
