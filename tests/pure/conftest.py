"""The tests of this folder need no torch: where it is missing, the package is entered without running its
`__init__`."""

import importlib.util
import sys
import types
from pathlib import Path

if importlib.util.find_spec("torch") is None:
    package = types.ModuleType("tsfuser")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "tsfuser")]
    sys.modules.setdefault("tsfuser", package)
