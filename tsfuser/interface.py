"""Whether there is an extension, and whether it has the functions that the Python files call.

In: the folder of the extension's sources, which a checkout has beside the package. Out: a digest of the names
of its functions, classes and arguments. `setup.py` builds it into the extension, so that the import finds
out that the sources have changed since, as after `git pull`. Example:

    digest(Path("csrc_stubs"))  # "1f0c1f5a9d..."
"""

from __future__ import annotations

import hashlib
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_NAMES = re.compile(rb'(?:\.(?:def\w*|attr)\(|py::arg\(|py::class_<.*>\(m,)\s*"(\w+)"')


def digest(sources: Path) -> str:
    """Of the names, in their order. The code of functions is not in it."""
    found = hashlib.sha256()
    for path in sorted(sources.glob("*/*.cpp")):
        text = path.read_bytes()
        if b"py::module_& m" in text or b"PYBIND11_MODULE" in text:
            found.update(b"\n".join([path.name.encode(), *_NAMES.findall(text)]))
    return found.hexdigest()[:32]


def missing(package: Path) -> str:
    """Why there is no extension to load in `package`, as a sentence; "" where there is one."""
    if any((package / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return ""
    python = ".".join(map(str, sys.version_info[:2]))
    if (package.parent / "csrc_stubs").is_dir():
        return (
            f"{package} is a checkout, whose extension is not built for Python {python}: build it, by "
            f"`python setup.py build_ext --inplace` in {package.parent}; or, if tsfuser is installed, start "
            "Python in another folder"
        )
    return f"{package} has no extension for Python {python}: install tsfuser again, with this Python"


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
