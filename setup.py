"""Builds tsfuser with its extension `tsfuser._C`, against the torch that is installed.

In: an environment with torch 2.11 or later and a C++ compiler; no CUDA toolkit, even for a CUDA torch.
Out: the package. Example: `pip install --no-build-isolation .`
"""

import re
import sys
from pathlib import Path

from setuptools import setup

OLDEST_TORCH = (2, 11)
SOURCES = Path("csrc_stubs")
UNITS = Path("build/units")


def stop(found: str) -> None:
    """Ends the set-up with one line, rather than let pip fetch some torch that then does not fit."""
    sys.exit(
        f"tsfuser: {found}; install torch 2.11 or later first (for example `pip install torch==2.13.0`), "
        "then run `pip install --no-build-isolation .`"
    )


def units() -> list[str]:
    """One translation unit a folder of sources: most of the time of a file goes into torch's headers, which a
    unit reads once. A unit that has not changed keeps its time, and is not built again."""
    UNITS.mkdir(parents=True, exist_ok=True)
    paths = []
    for folder in sorted(path for path in SOURCES.iterdir() if path.is_dir()):
        files = sorted(folder.glob("*.cpp"))
        text = "".join(f'#include "{file.relative_to(SOURCES).as_posix()}"\n' for file in files)
        path = UNITS / f"{folder.name}.cpp"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        paths.append(path.as_posix())
    return paths


def cpp_runtime() -> list[str]:
    """Link arguments for the C++ standard library that torch, which is imported, runs with. Some compilers
    link their own into the extension; with two in a process, an error that one raises ends it."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    [found] = re.findall(r"(/\S.*/libstdc\+\+\.so\S*)$", text, re.M)[:1] or [""]
    return ["-Wl,--push-state,--no-as-needed", found, "-Wl,--pop-state"] if found else []


def extension_build() -> dict:
    """`setup` arguments that build the extension; ends the set-up where torch is missing or too old."""
    try:
        import torch
    except ImportError as error:
        stop("there is no torch here" if error.name == "torch" else f"torch does not import ({error})")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        stop(f"torch {torch.__version__} is too old")
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    # -fopenmp when compiling makes at::parallel_for parallel; not when linking, so that torch's own OpenMP
    # serves it.
    extension = CppExtension(
        "tsfuser._C",
        units(),
        include_dirs=[str(SOURCES.resolve())],
        extra_compile_args=["-O2", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall"],
        extra_link_args=cpp_runtime(),
        depends=sorted(str(path) for pattern in ("*/*.h", "*/*.cpp") for path in SOURCES.glob(pattern)),
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(no_python_abi_suffix=False)},
    }


setup(**extension_build())
