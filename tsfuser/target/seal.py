"""What stands at the end of a stored file, so that a file whose content is run is the one that was written.

In: content and the digest of its key. Out: the content followed by its seal: a mark, the length, and the
sha256 of key and content. Example:

    path.write_bytes(sealed(content, key))
    read(path, key)  # (content, None), or (None, why not)

The seal finds damage (a disk that was full, a process that was killed, flipped bits) and files under a wrong
name. Against other users stands `distrust`: who can write the file can seal it, too.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

_MARK = b"tsfuser kernel 1"
_LENGTH = 8
_SIZE = len(_MARK) + _LENGTH + hashlib.sha256().digest_size

BROKEN = "is damaged"


def sealed(content: bytes, key: bytes) -> bytes:
    """`content` with its seal behind it. Programs that read ELF files take no notice of that."""
    return content + _seal(content, key)


def read(path: Path, key: bytes) -> tuple[bytes | None, str | None]:
    """(content, None) of a file that is whole and can be trusted, else (None, reason). Raises `OSError` where
    it cannot be read."""
    # Who puts a pipe there must not make us wait.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        reason = distrust(status)
        if reason or not stat.S_ISREG(status.st_mode) or status.st_size < _SIZE:
            return None, reason or BROKEN
        length = status.st_size - _SIZE
        file.seek(length)
        found = file.read(_SIZE)
        if not found.startswith(_head(length)):  # looked at first: a file may be larger than memory
            return None, BROKEN
        file.seek(0)
        content = file.read(length)
        return (content, None) if found == _seal(content, key) else (None, BROKEN)


def distrust(status: os.stat_result) -> str | None:
    """Why others than the user and root may have written this file or directory, or None."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (number {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    return None


def _head(length: int) -> bytes:
    return _MARK + length.to_bytes(_LENGTH, "little")


def _seal(content: bytes, key: bytes) -> bytes:
    return _head(len(content)) + hashlib.sha256(key + content).digest()
