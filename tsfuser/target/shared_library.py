"""A shared library from bytes, not from a file that somebody may change while it is mapped.

In: the content of a library. Out: the library, loaded from memory where the system has files without a name,
else from a copy that only this user can reach. Example: `load(content, "fused_add")`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from _ctypes import dlclose, dlopen, dlsym

_count = itertools.count()


class Library:
    """A library that is loaded as long as somebody holds it. ctypes.CDLL makes a class for each."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        # Not at the exit of the process: other threads may still run kernels.
        weakref.finalize(self, dlclose, handle).atexit = False


def load(content: bytes, name: str) -> Library:
    """The library, unloaded when nobody holds the object any more; `name` is for debuggers. Raises `OSError`
    where it cannot be loaded."""
    if hasattr(os, "memfd_create"):
        try:
            return _load_from_memory(content, name)
        except OSError:  # some systems run nothing from there; else the copy fails in the same way
            pass
    with tempfile.NamedTemporaryFile(prefix=f"{name[:64]}-", suffix=".so") as file:
        file.write(content)
        file.flush()
        return _open(file.name)


def address(library: Library, name: str) -> int:
    """Where function `name` is. Raises `OSError` where there is none."""
    return dlsym(library.handle, name)


def _load_from_memory(content: bytes, name: str) -> Library:
    number = os.memfd_create(name[:64])
    with open(number, "wb") as file:
        file.write(content)
        file.flush()
        return _open(f"/proc/self/fd/{_distinct(next(_count))}{number}")


def _distinct(number: int) -> str:
    """Another spelling of `./` for each number: the loader takes a path that it has seen for the library that
    it has, and numbers of files come again."""
    return "".join("./" if bit == "1" else "/" for bit in f"{number:b}")


def _open(path: str) -> Library:
    return Library(dlopen(path, os.RTLD_NOW | os.RTLD_LOCAL))
