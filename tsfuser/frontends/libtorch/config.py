"""Flags for programs that use tsfuser.h.

In: the torch that this Python imports. Out: lists of words for a C++ compiler, and the folder of the CMake
package. Example: `cflags()` -> `["-std=c++20", "-I.../cpp", ...]`. Shells, make, meson, CMake, xargs and
shlex have different rules for quotes, so no word has anything to quote.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch
from packaging.version import Version

#: tsfuser.h, tsfuser.cpp with its own headers in tsfuser/, and the CMake package.
FOLDER = Path(__file__).parent / "cpp"


def cflags() -> list[str]:
    """For every file that includes tsfuser.h or torch's headers: the C++ standard and the ABI of torch, the
    headers, and this interpreter, which `tsfuser::Options` has as its default: its path as numbers, as a
    string has quotes. Raises ValueError where a path has characters that tools would take apart."""
    from torch.utils import cpp_extension  # says on stderr that there is no GPU, where torch has CUDA

    standard = "c++20" if Version(torch.__version__) >= Version("2.12") else "c++17"
    python = ",".join(map(str, os.fsencode(sys.executable)))
    return _plain(
        f"-std={standard}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTSFUSER_PYTHON_PATH={python}",
        f"-I{FOLDER}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
    )


def libs() -> list[str]:
    """For the link: tsfuser's source, which is compiled into the program, and torch's libraries. All of them
    stay, though the program names no symbol of some: CUDA's kernels register themselves. Raises ValueError as
    `cflags`."""
    folder = Path(torch.__file__).parent / "lib"
    names = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
    there = [f"-l{name}" for name in names if (folder / f"lib{name}.so").exists()]
    # what torch's own libraries need of CUDA's they find themselves, when they are loaded
    search = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-Wl,--allow-shlib-undefined"]
    keep = ["-Wl,--push-state,--no-as-needed", *there, *_cpp_runtime(), "-Wl,--pop-state"]
    return _plain(str(FOLDER / "tsfuser.cpp"), *search, *keep, "-ldl", "-pthread")


def _plain(*words: str) -> list[str]:
    """The words, none of which needs quotes. Raises ValueError."""
    for word in words:
        if re.search(r"[^\w@%+=:,./~-]", word):
            raise ValueError(
                f"{word!r} has a space or another character that shells and build tools take apart in "
                "different ways: install torch and tsfuser in a folder without such characters"
            )
    return list(words)


def _cpp_runtime() -> list[str]:
    """The C++ standard library that torch runs with. Some compilers link their own into the program, and the
    two would free what the other one allocated."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    return re.findall(r"(/\S.*/libstdc\+\+\.so\S*)$", text, re.M)[:1]
