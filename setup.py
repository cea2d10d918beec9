"""Builds tsfuser with its extension `tsfuser._C`, against the torch that is installed.

In: an environment with torch 2.11 or later and a C++ compiler; no CUDA toolkit, even for a CUDA torch.
Out: the package. Example: `pip install --no-build-isolation .`
"""

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import setuptools
from setuptools import setup

OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # which reads the licence as pyproject.toml has it
SOURCES = Path("csrc_stubs")
#: torch's headers that most files include: most of the time of a file goes into them, so they are read once
PRECOMPILED = """\
#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>
"""


def stop(found: str, remedy: str) -> None:
    """Ends the set-up with one line, rather than let pip fetch some torch that then does not fit."""
    sys.exit(f"tsfuser: {found}; {remedy}, then run `pip install --no-build-isolation .`")


def check_setuptools() -> None:
    """Ends the set-up where setuptools would reject pyproject.toml, in a hundred lines: Python 3.10 and 3.11
    make environments with one that is too old."""
    if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
        stop(
            f"setuptools {setuptools.__version__} is too old to build it",
            f"run `pip install 'setuptools>={OLDEST_SETUPTOOLS},<82'`",  # torch 2.11 wants one before 82
        )


def cpp_runtime() -> list[str]:
    """Link arguments for the C++ standard library that torch, which is imported, runs with. Some compilers
    link their own into the extension; with two in a process, an error that one raises ends it."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    [found] = re.findall(r"(/\S.*/libstdc\+\+\.so\S*)$", text, re.M)[:1] or [""]
    return ["-Wl,--push-state,--no-as-needed", found, "-Wl,--pop-state"] if found else []


def precompile(build, extension) -> Path:
    """The header `PRECOMPILED`. Its compiled form, made with the flags of the extension's files, stands
    beside it, where the compiler looks for it. A compiler that cannot use it reads the text."""
    folder = Path(build.build_temp).resolve() / "precompiled"
    folder.mkdir(parents=True, exist_ok=True)
    header, source = folder / "torch_headers.h", folder / "torch_headers.cpp"
    for path in (header, source):
        if not path.exists() or path.read_text() != PRECOMPILED:
            path.write_text(PRECOMPILED)
    [compiled] = build.compiler.compile(
        [str(source)],
        output_dir=str(folder),
        macros=extension.define_macros,
        include_dirs=extension.include_dirs,
        debug=build.debug,
        extra_preargs=["-x", "c++-header"],
        extra_postargs=extension.extra_compile_args,
    )
    link = header.with_suffix(".h.gch")  # clang looks for this name, too
    if not link.is_symlink() or link.resolve() != Path(compiled).resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(compiled)
    return header


def interface(build) -> Path:
    """A source file with the digest by which the import knows whether this build fits the Python files."""
    folder = Path(build.build_temp).resolve() / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    digest = runpy.run_path("tsfuser/interface.py")["digest"](SOURCES)
    source = folder / "interface.cpp"
    text = f'namespace tsfuser {{\nconst char* interface_digest() {{ return "{digest}"; }}\n}}\n'
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


def given_flags() -> list[str]:
    """The flags of CFLAGS: behind those of this file, so that they win."""
    return shlex.split(os.environ.get("CFLAGS", ""))


def extension_build() -> dict:
    """`setup` arguments that build the extension; ends the set-up where torch is missing or too old."""
    remedy = "install torch 2.11 or later if you have none (for example `pip install torch==2.13.0`)"
    try:
        import torch
    except ImportError as error:
        if error.name != "torch":
            stop(f"torch does not import ({error})", remedy)
        isolated = any("build-env" in path for path in sys.path)
        stop("pip builds in an environment without torch" if isolated else "there is no torch here", remedy)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        stop(f"torch {torch.__version__} is too old", remedy)
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Build(BuildExtension):
        """Compiles each file by itself, with a precompiled header, and only those that an edit touched."""

        def build_extension(self, extension):
            header = precompile(self, extension)
            extension.extra_compile_args = ["-include", str(header), *extension.extra_compile_args]
            extension.sources = [*extension.sources, str(interface(self))]
            super().build_extension(extension)

    extension = CppExtension(
        "tsfuser._C",
        sorted(path.as_posix() for path in SOURCES.glob("*/*.cpp")),
        include_dirs=[str(SOURCES.resolve())],
        extra_compile_args=["-O2", "-g0", "-fvisibility=hidden", "-Wall", *given_flags()],
        extra_link_args=cpp_runtime(),
        depends=sorted(str(path) for pattern in ("*/*.h", "*/*.cpp") for path in SOURCES.glob(pattern)),
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": Build.with_options(no_python_abi_suffix=False)},
    }


def version(tag: str = "") -> str:
    [found] = re.findall(r'^__version__ = "(.*)"', Path("tsfuser/version.py").read_text(), re.M)
    return found + tag


def torch_tag() -> str:
    """The part of the version that names torch, as in 0.3.0+torch2.13: an extension loads with the torch that
    it is built for."""
    import torch

    return "+torch" + ".".join(torch.__version__.split(".")[:2])


def description() -> dict[str, str]:
    """README.md as an index of packages shows it: its links and pictures lead to the project's address."""
    [home] = re.findall(r'^Homepage = "(.*)"', Path("pyproject.toml").read_text(), re.M)
    text = Path("README.md").read_text()
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/raw/main/", text)
    text = re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)
    return {"long_description": text, "long_description_content_type": "text/markdown"}


check_setuptools()
if "sdist" in sys.argv:  # it is for every torch
    setup(**description(), version=version())
else:
    setup(**description(), **extension_build(), version=version(torch_tag()))
