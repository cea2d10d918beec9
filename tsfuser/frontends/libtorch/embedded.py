"""What cpp/tsfuser.cpp calls, by the path of this file: importing the package would import torch, and before
that it must be sure that the program runs with the same torch.

In: strings from C++. Out: a string, or an exception, whose text becomes that of `tsfuser::Error`. Example:
`probe("2.13.0", "/usr/lib/libtorch_cpu.so")`, in a process of its own, before the program loads Python.
"""

from __future__ import annotations

import atexit
import filecmp
import importlib.util
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path


def probe(compiled_with: str, libtorch: str) -> str:
    """Checks all that can be checked without loading Python or torch into the program. Returns two lines:
    this interpreter, and its shared library. RuntimeError where something is missing."""
    check(compiled_with, libtorch)
    return f"{sys.executable}\n{libpython()}"


def check(compiled_with: str, libtorch: str) -> None:
    """That the program is compiled and runs with the torch of this Python: `compiled_with` is the version of
    its headers, `libtorch` the path of the libtorch_cpu.so that it has loaded. RuntimeError where not."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        raise RuntimeError(
            f"{sys.executable} has no torch: Options::python names the interpreter of the environment that "
            "has torch and tsfuser"
        )
    folder = Path(found.origin).parent
    [version] = re.findall(r"^__version__ = '(.*)'", (folder / "version.py").read_text(), re.M)
    build_again = f"build the program with the flags of `{sys.executable} -m tsfuser config`"
    if version.partition("+")[0] != compiled_with.partition("+")[0]:
        raise RuntimeError(
            f"the program is compiled with torch {compiled_with}, but {sys.executable} has torch {version}: "
            f"{build_again}"
        )
    if not libtorch:
        raise RuntimeError(f"the program has not loaded libtorch_cpu.so: {build_again}")
    expected = folder / "lib" / "libtorch_cpu.so"
    if not os.path.samefile(libtorch, expected) and not filecmp.cmp(libtorch, expected, shallow=False):
        raise RuntimeError(
            f"the program runs with {libtorch}, but tsfuser with {expected}, and the two differ: "
            f"{build_again}"
        )


def libpython() -> str:
    """The shared library of this interpreter. RuntimeError where it has none."""
    variable = sysconfig.get_config_var
    version = variable("LDVERSION") or "{}.{}".format(*sys.version_info)
    names = dict.fromkeys(
        name
        for name in (variable("INSTSONAME"), variable("LDLIBRARY"), f"libpython{version}.so.1.0")
        if name and ".so" in name
    )
    # a Python that was moved after it was built has wrong variables
    folders = dict.fromkeys(
        str(folder)
        for folder in (variable("LIBDIR"), Path(sys.base_prefix, "lib"), variable("LIBPL"))
        if folder
    )
    candidates = [Path(folder, name) for folder in folders for name in names]
    for path in [*_mapped(), *candidates]:
        if path.exists():
            return str(path.resolve())
    raise RuntimeError(
        f"{sys.executable} has no shared library ({' or '.join(names)} in {' or '.join(folders)}): install "
        f"it (as libpython{version} on Debian), or take a Python that was built with --enable-shared"
    )


def _mapped() -> list[Path]:
    """The shared library that this process runs, if any."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return [
        Path(path) for path in dict.fromkeys(re.findall(r"(/\S.*/libpython3\.\d+\w*\.so\S*)$", maps, re.M))
    ]


def start(compiled_with: str, libtorch: str, *variables: str) -> str:
    """Imports tsfuser with `variables`, each "NAME=value", in the environment, and switches fusion on."""
    check(compiled_with, libtorch)
    chosen = dict(variable.split("=", 1) for variable in variables)
    if chosen and "tsfuser" in sys.modules:
        given = ", ".join(chosen)
        raise RuntimeError(f"{given}: options are read once, and tsfuser is imported in this process already")
    os.environ.update(chosen)
    import tsfuser
    from tsfuser import option_parsers, options

    known = [option.variable for option in options.TABLE]
    for name in chosen:
        if name not in known:
            like = option_parsers.did_you_mean(name, known)
            raise RuntimeError(f"no option is called {name!r}{like}; docs/options.md lists all")
    tsfuser.enable()
    return ""


def stats() -> str:
    """Lines "count name". Counts by reason have the names "fallbacks: REASON", and their sum "fallbacks"."""
    import tsfuser

    counts: dict[str, int] = {}
    for name, value in tsfuser.stats().items():
        reasons = value if isinstance(value, Mapping) else {}
        counts[name] = sum(reasons.values()) if value is reasons else value
        counts |= {f"{name}: {' '.join(reason.split())}": count for reason, count in reasons.items()}
    return "\n".join(f"{count} {name}" for name, count in counts.items())


def stop() -> str:
    """Nothing new is fused."""
    import tsfuser

    tsfuser.disable()
    return ""


def leave() -> str:
    """What Python does at its exit before it takes itself apart."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return ""
