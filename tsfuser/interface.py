"""Whether the extension has the functions that the Python files call.

In: the folder of the extension's sources, which a checkout has beside the package. Out: a digest of the names
of its functions, classes and arguments. `setup.py` builds it into the extension, so that the import finds
out that the sources have changed since, as after `git pull`. Example:

    digest(Path("csrc_stubs"))  # "1f0c1f5a9d..."
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_NAMES = re.compile(rb'(?:\.(?:def\w*|attr)\(|py::arg\(|py::class_<.*>\(m,)\s*"(\w+)"')


def digest(sources: Path) -> str:
    """Of the names, in their order. What functions do is not in it."""
    found = hashlib.sha256()
    for path in sorted(sources.glob("*/*.cpp")):
        text = path.read_bytes()
        if b"py::module_& m" in text or b"PYBIND11_MODULE" in text:
            found.update(b"\n".join([path.name.encode(), *_NAMES.findall(text)]))
    return found.hexdigest()[:32]


def mistake(built: str | None, package: Path) -> str:
    """Why an extension does not fit the Python files in `package`, as a sentence; "" where it does, or where
    there are no sources. `built`: the digest that the extension has."""
    sources = package.parent / "csrc_stubs"
    if not sources.is_dir() or built == digest(sources):
        return ""
    return (
        "tsfuser's extension was built from other sources than its Python files: build it again, by "
        f"`python setup.py build_ext --inplace` in {package.parent}"
    )
