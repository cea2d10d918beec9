"""A shared library from bytes, not from a file that somebody may change while it is mapped.

In: the content of a library. Out: the library, loaded from memory where the system has files without a name,
else from a copy that only this user can reach. Example: `load(content, "fused_add")`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
import weakref
from _ctypes import dlclose, dlsym

_count = itertools.count()


def load(content: bytes, name: str) -> ctypes.CDLL:
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


def address(library: ctypes.CDLL, name: str) -> int:
    """Where function `name` is. Raises `OSError` where there is none. What `library.name` gives instead holds
    the library in a cycle."""
    return dlsym(library._handle, name)


def _load_from_memory(content: bytes, name: str) -> ctypes.CDLL:
    number = os.memfd_create(name[:64])
    with open(number, "wb") as file:
        file.write(content)
        file.flush()
        return _open(f"/proc/self/fd/{_distinct(next(_count))}{number}")


def _distinct(number: int) -> str:
    """Another spelling of `./` for each number: the loader takes a path that it has seen for the library that
    it has, and numbers of files come again."""
    return "".join("./" if bit == "1" else "/" for bit in f"{number:b}")


def _open(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    # Not at the exit of the process: other threads may still run kernels.
    weakref.finalize(library, dlclose, library._handle).atexit = False
    return library
