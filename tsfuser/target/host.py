"""CPU tensors: the system's C++ compiler builds a kernel into a shared library.

In: kernel source. Out: the library, kept in the disk cache, then the address of its function
`void NAME(const void* args, int64_t grid, int64_t block_x, int64_t block_y, int64_t shared, int64_t begin,
int64_t end)`. Example:

    target = HostTarget(DiskCache(options.cache_dir()))
    function = target.load(target.compile(source, "fused_add"), "fused_add", "cpu")
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from . import shared_library
from .disk_cache import DiskCache, Stored
from .function import RUNTIME, Function, headers_digest
from ..errors import CompileError, Refusal

#: Numbers come out as eager's do: no fused multiply-add where the program has two ops. Neither errno nor
#: floating-point traps are read by anyone; without them sqrt is an instruction and comparisons vectorise.
#: NaN, infinities and the sign of zero keep their meaning, which rules out -ffast-math.
_NUMERICS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

#: Named one by one, without start files and the C++ library, linking takes 15 ms instead of 45.
_LIBRARIES = ("-lm", "-lc") if sys.platform == "linux" else ("-lm",)

#: g++ moves a function call into the one branch that needs its result, and then cannot vectorise the loop.
_GCC = ("-fno-tree-sink",)

_NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",), "arm64": ("-mcpu=native",)}


class HostTarget:
    """Compiles for this machine's CPU. `fibers`: the launch shape of the GPU, for tests. `opt_level` is the
    digit after -O."""

    def __init__(self, cache: DiskCache, opt_level: int = 3, fibers: bool = False):
        self.cache = cache
        self.name = "fibers" if fibers else "host"
        self._mode = "-DTSFUSER_FIBERS" if fibers else "-DTSFUSER_HOST"
        self._opt_level = opt_level
        self._functions: dict[tuple[Path, str], Function] = {}

    def flags(self) -> tuple[str, ...]:
        """Options of the compiler, the include path left out."""
        chosen = (self._mode, f"-O{self._opt_level}", *_NATIVE.get(platform.machine(), ()))
        linux = ("-Wl,--no-undefined", "-nostdlib") if sys.platform == "linux" else ()
        return (*chosen, "-std=c++17", "-w", "-pipe", *_NUMERICS, "-shared", "-fPIC", *linux)

    def compile(self, source: str, name: str) -> Stored:
        """The shared library of kernel `name`. Raises `Refusal` where there is no compiler, `CompileError`
        where it fails."""
        compiler = find_compiler()
        flags = self.flags()
        key = (self.name, source, headers_digest(), flags, _GCC, _identity(compiler), cpu_identity())
        return self.cache.get(key, ".so", lambda output: self._run(compiler, flags, source, name, output))

    def load(self, stored: Stored, name: str, device: str = "cpu") -> Function:
        """The function `name` of a library. Raises `CompileError` where it cannot be loaded (and drops the
        file)."""
        key = (stored.path, name)
        if key not in self._functions:
            try:
                library = shared_library.load(stored.content, name)
                handle = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            except (OSError, AttributeError) as error:
                self.cache.drop(stored)
                raise CompileError(f"cannot load kernel {name}: {error}") from error
            self._functions[key] = Function(handle, library)
        return self._functions[key]

    def _run(self, compiler: tuple, flags: tuple, source: str, name: str, output: Path) -> None:
        text = output.with_name(f"{name}.cpp")
        text.write_text(source)
        options = (*flags, *(_GCC if is_gcc(compiler) else ()), "-iquote", str(RUNTIME))
        command = [*compiler, *options, str(text), "-o", str(output), *_LIBRARIES]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done = subprocess.run(command, **pipes, text=True)
        if done.returncode:
            kept = self.cache.keep(f"failed-{name}.cpp", source)
            failure = f"{shlex.join(compiler)} failed on kernel {name} (source: {kept})"
            raise CompileError(f"{failure}:\n{done.stdout}")


@functools.lru_cache(maxsize=None)
def _find(chosen: str, search_path: str) -> tuple[str, ...]:
    if chosen:
        command = shlex.split(chosen)
        if command and shutil.which(command[0], path=search_path):
            return tuple(command)
        raise Refusal(f"CXX is set to {chosen!r}, which is not a program; set it to a C++17 compiler")
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name, path=search_path)
        if found:
            return (found,)
    raise Refusal("CPU tensors need a C++17 compiler: install g++ or clang++, or set CXX to one")


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: `$CXX` (may hold options), else c++, g++ or clang++ of the PATH.
    Raises `Refusal`."""
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@functools.lru_cache(maxsize=None)
def _identity(compiler: tuple[str, ...]) -> str:
    """What tells one installed compiler from another, without starting it (which takes longer than loading
    a kernel)."""
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns} {compiler[1:]}"


@functools.lru_cache(maxsize=None)
def is_gcc(compiler: tuple[str, ...]) -> bool:
    """Whether the compiler takes the options of GCC alone; clang calls itself g++ and c++, too."""
    version = subprocess.run([*compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
    return "Free Software Foundation" in version


@functools.lru_cache(maxsize=None)
def cpu_identity() -> str:
    """What `-march=native` depends on: the model and features of the first CPU where the system tells
    them."""
    try:
        with open("/proc/cpuinfo") as info:
            first = info.read(1 << 14).split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))
