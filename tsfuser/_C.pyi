"""The extension, of csrc_stubs/bindings: what it has is told by the docstrings there."""

from typing import Any

def __getattr__(name: str) -> Any: ...
