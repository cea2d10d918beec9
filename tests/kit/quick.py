"""Kernels for CPU tensors, compiled in half of the time that users' take, for the same numbers.

In: a test run. Out: g++ makes its kernels at -O0 and reads the runtime headers precompiled; on Linux the
linker does not look through the C library, whose functions the loader finds in this process, and what runs
the threads of fibers is a library of its own, compiled once. What g++ does at
-O3 alone, to vectorise, is for the modules marked `optimized`, for programs that tests
start without `compiler`, for kernels written by hand (harness.py), and for --long. Example:

    with level(QUICK):
        scripted(x)
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import tsfuser
from kit import joined
from tsfuser.errors import CompileError, Refusal
from tsfuser.planning import compile as pipeline
from tsfuser.planning import targets
from tsfuser.target import cxx
from tsfuser.target.function import RUNTIME, headers_digest, source_digest
from tsfuser.target.host import _GCC, HostTarget

#: Digits after -O: of most tests, and of users.
QUICK, USERS = 0, 3
HEADERS = Path(os.environ["TSFUSER_CACHE_DIR"] + "-headers")
#: What runs the threads of fibers, for other libraries to call.
FIBERS = '#define FIBER_LINKAGE\n#include "fiber.h"\n'


class QuickHost(HostTarget):
    """A HostTarget whose kernels of blocks are compiled at `level`, which tests change."""

    level = QUICK

    def flags(self):
        if self.name == "host":
            self._opt_level = QuickHost.level
        words = tuple(word for word in super().flags() if self.libraries or word != "-Wl,--no-undefined")
        unchecked = self._mode == ("-DTSFUSER_FIBERS", "-U_FORTIFY_SOURCE")
        called = fiber_library(precompiled.compiler, words) if unchecked and not self.libraries else ()
        return (*words, *called)

    @property
    def joins(self):
        """Whether kernels may be compiled together (joined.py)."""
        return QuickHost.level == QUICK

    def keep(self, source, content):
        """What the disk cache holds then as the library of a kernel."""
        key = (source_digest(source), *self._identity(cxx.identity(cxx.find_compiler())))
        return self.cache.get(key, ".so", lambda output: output.write_bytes(content))

    @property
    def libraries(self):
        return () if QuickHost.level == QUICK and sys.platform == "linux" else super().libraries

    def _include(self):
        return (*precompiled(cxx.find_compiler(), self.flags()), *super()._include())


def _install():
    """From now on, tsfuser compiles its kernels for the CPU so in this process."""
    targets.HostTarget = QuickHost
    joined.install()
    pipeline._target.cache_clear()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libmvec.so.1", ctypes.RTLD_GLOBAL)  # the part of the C library that torch does not load
    with contextlib.suppress(Refusal):
        precompiled.compiler = cxx.find_compiler()  # not those that tests put in its place


@contextlib.contextmanager
def level(digit):
    """Inside, kernels are compiled at -O`digit`; those that were loaded before are forgotten."""
    if targets.HostTarget is not QuickHost:
        _install()
    before, QuickHost.level = QuickHost.level, digit
    tsfuser.reset()
    try:
        yield
    finally:
        QuickHost.level = before
        tsfuser.reset()


@functools.cache
def precompiled(compiler, flags):
    """Options by which g++ finds the runtime headers precompiled, made once on this disk. None for other
    compilers, and where g++ cannot read what it wrote."""
    try:
        if compiler != precompiled.compiler or not cxx.is_gcc(compiler):
            return ()
        key = repr((headers_digest(), cxx.identity(compiler), flags))
        folder = HEADERS / hashlib.sha256(key.encode()).hexdigest()[:16]
        if not (folder / "tsfuser.h.gch").exists():
            _precompile((*compiler, *_GCC, *flags), folder)
        return ("-iquote", str(folder))
    except (CompileError, OSError, subprocess.SubprocessError):
        return ()


precompiled.compiler = None


@functools.cache
def fiber_library(compiler, flags):
    """The option for kernels of fibers by which they call the functions of codegen/runtime/fiber_run.h, which
    are in this process then: a library of them is made once on this disk. None for other compilers, and where
    it cannot be made."""
    try:
        if compiler is None or not cxx.is_gcc(compiler):
            return ()
        key = repr((headers_digest(), cxx.identity(compiler), flags, FIBERS))
        made = HEADERS.absolute() / hashlib.sha256(key.encode()).hexdigest()[:16] / "fibers.so"
        if not made.exists():
            made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
                text, new = Path(scratch) / "fibers.cpp", Path(scratch) / made.name
                text.write_text(FIBERS)
                _run((*compiler, *flags, "-O2", "-iquote", str(RUNTIME), str(text), "-o", str(new)))
                os.replace(new, made)
        ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
        return ("-DTSFUSER_FIBER_LIBRARY",)
    except (CompileError, OSError, subprocess.SubprocessError):
        return ()


@functools.cache
def compiler():
    """The `CXX` of programs whose kernels are compiled at -O0, the last of several levels counts, and with
    precompiled headers."""
    command = cxx.find_compiler()
    return script(command, f"-O{QUICK}", precompiled_for_programs(command))


@functools.cache
def precompiled_for_programs(command):
    """A folder with the runtime headers precompiled for kernels of users' flags at -O0, of blocks and of
    fibers, made once on this disk. None as of `precompiled`."""
    targets = [HostTarget(None), HostTarget(None, fibers=True, opt_level=0)]
    flags = [(*_GCC, *target.flags(), f"-O{QUICK}") for target in targets]
    try:
        if not cxx.is_gcc(command):
            return None
        key = repr((headers_digest(), cxx.identity(command), flags, "programs"))
        folder = HEADERS.absolute() / hashlib.sha256(key.encode()).hexdigest()[:16]
        for target, words in zip(targets, flags):
            name = f"tsfuser.h.gch/{target.name}"  # g++ takes the one that fits
            if not (folder / name).exists():
                _precompile((*command, *words), folder, name)
        return folder
    except (CompileError, OSError, subprocess.SubprocessError):
        return None


def script(command, last="", headers=None):
    """The path of a program that runs `command` with its arguments, and `last`, and finds the runtime headers
    in `headers` first. Its file stays as it is, so that the next run finds the kernels in the cache."""
    text = f'exec {shlex.join(command)} "$@" {last}\n'
    if headers is not None:
        words = (
            f'*" -iquote "{shlex.quote(str(RUNTIME))}" "*) set -- -iquote {shlex.quote(str(headers))} "$@"'
        )
        text = f'case " $* " in {words} ;; esac\n{text}'
    text = f"#!/bin/sh\n{text}"
    path = HEADERS.absolute() / hashlib.sha256(text.encode()).hexdigest()[:16] / "c++"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o700)
        os.replace(file.name, path)
    return str(path)


def _precompile(command, folder, name="tsfuser.h.gch"):
    """Raises `CalledProcessError` where g++ does not make the header, or does not find it then."""
    (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        made.parent.mkdir(exist_ok=True)
        _run([*command, "-c", "-x", "c++-header", str(RUNTIME / "tsfuser.h"), "-o", str(made)])
        user = Path(scratch) / "user.cpp"
        user.write_text('#include "tsfuser.h"\n')  # found in `scratch` alone
        _run([*command, "-fsyntax-only", "-iquote", scratch, str(user)])
        os.replace(made, folder / name)


def _run(command):
    subprocess.run(command, check=True, capture_output=True, timeout=120)
