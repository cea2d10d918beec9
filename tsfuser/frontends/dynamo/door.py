"""How torch finds the backend by its name.

Where tsfuser is installed, its metadata name an entry point of the group `torch_dynamo_backends`, and torch
imports it when it is asked for. A checkout on the path has no metadata: then `import tsfuser` offers the
same entry point, either to `importlib.metadata`, which torch asks when a backend is looked up for the first
time, or to torch's table, where that has been filled already. torch._dynamo, which takes seconds to import,
is not imported here.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import metadata

from ...version import __version__

GROUP, NAME, VALUE = "torch_dynamo_backends", "tsfuser", "tsfuser.frontends.dynamo:backend"


class _Distribution(metadata.Distribution):
    """The metadata of a checkout."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: tsfuser\nVersion: {__version__}\n",
            "entry_points.txt": f"[{GROUP}]\n{NAME} = {VALUE}\n",
        }
        return texts.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(path)


class _Finder(metadata.DistributionFinder):
    """Finds no module, and one distribution."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None

    def find_distributions(self, context=None):
        wanted = context.name if context is not None else None
        return [_Distribution()] if wanted in (None, NAME) else []


def open_door() -> None:
    """Makes torch find the backend by its name, and carry its files among its artifacts."""
    with contextlib.suppress(ImportError, AttributeError):  # a later torch's cache may have other names
        from .stored import artifacts

        artifacts.register()
    try:
        metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        sys.meta_path.append(_Finder())  # last: what is installed later comes first
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        registry._BACKENDS.setdefault(NAME, metadata.EntryPoint(NAME, VALUE, GROUP))
