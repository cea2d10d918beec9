"""The tests of this folder need the compilers, not the extension: where that is not built, the package is
entered without its `__init__`."""

import sys
import types
from pathlib import Path

try:
    import tsfuser  # noqa: F401
except ImportError:
    package = types.ModuleType("tsfuser")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "tsfuser")]
    sys.modules["tsfuser"] = package
    for name in [n for n in sys.modules if n.startswith("tsfuser.")]:
        del sys.modules[name]
