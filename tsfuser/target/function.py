"""A loaded kernel, and the headers that every kernel includes."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

RUNTIME = Path(__file__).parent.parent / "codegen" / "runtime"


@dataclass(frozen=True)
class Function:
    """`handle` is a CUfunction or the address of a host function, valid as long as `keepalive` lives. Of a
    CUDA kernel also what one thread uses: `registers`, and `local_bytes` of spilled registers and local
    arrays; and whether it `waits` for the kernel before it by itself (`wait_for_turn` in runtime/kernel.h), so
    that it may be set up while that one runs."""

    handle: int
    keepalive: object = field(repr=False, compare=False)
    registers: int = 0
    local_bytes: int = 0
    waits: bool = False


@functools.lru_cache(maxsize=None)
def headers_digest() -> str:
    """sha256 of all runtime headers, part of every kernel's key in the disk cache."""
    digest = hashlib.sha256()
    for header in sorted(RUNTIME.glob("*.h")):
        text = header.read_bytes()
        digest.update(f"{header.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
