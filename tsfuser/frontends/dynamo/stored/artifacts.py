"""Files of the cache as artifacts of torch's: `torch.compiler.save_cache_artifacts()` gives them to another
machine, beside inductor's.

In: the files that this process has read or written: graphs, plans and kernels. Out: bytes of torch's, from
which `load_cache_artifacts` writes them into the cache of a process that has imported tsfuser. Example:

    saved, info = torch.compiler.save_cache_artifacts()
    # on another machine
    import torch, tsfuser
    torch.compiler.load_cache_artifacts(saved)
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from .... import options
from ....target import disk_cache

_TYPE = "tsfuser"


class _File(CacheArtifact):  # type: ignore[misc]  # torch is not looked into
    """A file, by its name. Before the artifacts are saved it is not read: thousands of kernels would take as
    much memory as they take on disk."""

    @property
    def content(self) -> bytes:
        found = self.__dict__["content"]
        return found if isinstance(found, bytes) else _read(found)

    @content.setter
    def content(self, given: bytes | Path) -> None:
        self.__dict__["content"] = given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _File) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @staticmethod
    def encode(content: Any) -> Any:
        return content

    @staticmethod
    def type() -> str:
        return _TYPE

    def populate_cache(self) -> None:
        if self.content:
            disk_cache.DiskCache(options.cache_dir()).adopt(self.key, self.content)


def _read(path: Path) -> bytes:
    """The file; nothing where it was deleted meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def register() -> None:
    """Makes torch know these artifacts, once."""
    if _TYPE not in CacheArtifactFactory._artifact_types:
        CacheArtifactFactory.register(_File)
        disk_cache.listeners.append(_record)


def _record(name: str, path: Path) -> None:
    with contextlib.suppress(Exception):  # a kernel does not fail for it
        CacheArtifactManager.record_artifact(_TYPE, name, path)
