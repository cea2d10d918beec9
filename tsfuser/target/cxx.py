"""The system's C++ compiler: which one it is, what tells it from others, and what to do where it fails.

In: `$CXX` and the PATH. Out: a command, and sentences. Example: with `CXX=true` in the environment,

    run(find_compiler(), options, "fused_add", source, output, 120)

raises CompileError("true ended without an error, but wrote no library ... CXX is set to 'true': set it to").
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import CompileError, Refusal
from . import job

_WANTED = "a C++17 compiler for this machine, such as g++ or clang++"

#: What compilers say, and what it means.
_DEFECTS = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: make room in the folder for temporary files, or set TMPDIR to another",
    ),
    (r"Cannot allocate memory|virtual memory exhausted|out of memory", "there is too little memory"),
    (
        r"cannot execute|cannot find 'ld'|cannot find -l|crt\w*\.o|file not found|No such file or directory"
        r"|installation problem",
        "a part of the compiler is missing: install g++ or clang++ with its linker and libraries",
    ),
    (
        r"(unrecogni[sz]ed|unknown|unsupported|invalid|illegal|bad).{0,30}\boption|unknown argument|bad value"
        r"|invalid value .* in '-|usage:",
        "it does not know an option that g++ 8 and clang++ 7 and later ones know",
    ),
)


def advice() -> str:
    """What the user can change, as a sentence."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return f"CXX is set to {chosen!r}: set it to {_WANTED}, or unset it"
    return f"Set CXX to {_WANTED}"


@functools.cache
def _find(chosen: str, search_path: str) -> tuple[str, ...]:
    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise Refusal(f"CXX cannot be read as a command ({error}). {advice()}") from None
        if command and shutil.which(command[0], path=search_path):
            return tuple(command)
        raise Refusal(f"{command[0] if command else chosen!r} is not a program. {advice()}")
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name, path=search_path)
        if found:
            return (found,)
    raise Refusal("CPU tensors need a C++17 compiler: install g++ or clang++, or set CXX to one")


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: `$CXX` (may hold options), else c++, g++ or clang++ of the PATH.
    Raises `Refusal`."""
    return _find(os.environ.get("CXX", "").strip(), os.environ.get("PATH", os.defpath))


@functools.cache
def identity(compiler: tuple[str, ...]) -> str:
    """What tells one installed compiler from another, without starting it (which takes longer than loading
    a kernel)."""
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns} {compiler[1:]}"


_versions: dict[tuple[str, ...], str] = {}  # cache: command -> what it says of its version


def is_gcc(compiler: Sequence[str], seconds: float = 120, stop: job.Stop | None = None) -> bool:
    """Whether the compiler takes the options of GCC alone; clang calls itself g++ and c++, too. Raises what
    `job.run` does."""
    command = tuple(compiler)
    if command not in _versions:
        with tempfile.TemporaryDirectory(prefix="tsfuser-") as folder:
            _versions[command] = job.run((*command, "--version"), Path(folder), seconds, stop)[1]
    return "Free Software Foundation" in _versions[command]


def run(
    compiler: Sequence[str], options: Sequence[str], gcc_options: Sequence[str], name: str, output: Path,
    seconds: float, stop: job.Stop | None = None,
) -> None:  # fmt: skip
    """Has the compiler write `output`, the library of kernel `name`. Raises `CompileError`, with the remedy,
    if the compiler fails, and `job.Stopped`."""
    who = shlex.join(compiler)
    try:
        own = gcc_options if is_gcc(compiler, seconds, stop) else ()
        status, said = job.run((*compiler, *own, *options, "-o", str(output)), output.parent, seconds, stop)
    except OSError as error:
        raise CompileError(f"{who} cannot be started ({error.strerror}). {advice()}") from None
    except job.TimedOut:
        late = f"{who} did not finish kernel {name} in {seconds:g} s and was ended"
        limit = "Where the machine is just busy, raise TSFUSER_COMPILE_TIMEOUT"
        raise CompileError(f"{late}. {limit}. {advice()}") from None
    if status == 0 and not _is_library(output):
        raise CompileError(f"{who} ended without an error, but wrote no library of kernel {name}. {advice()}")
    if status:
        raise CompileError(f"{who} failed on kernel {name}: {_meaning(status, said)}\n{said}".rstrip())


def _is_library(path: Path) -> bool:
    """Whether there is a file of some length at all; whether it can be loaded shows when it is."""
    return path.is_file() and path.stat().st_size > 0


def _meaning(status: int, said: str) -> str:
    """Why a compiler failed, and what can be done, as sentences."""
    if status < 0:
        ended = f"signal {-status} ({_signal_name(-status)}) ended it"
        return f"{ended}, which the system sends where memory is short. {advice()}"
    found = [meaning for pattern, meaning in _DEFECTS if re.search(pattern, said, re.IGNORECASE)]
    if not found and not os.environ.get("CXX"):
        return f"exit status {status}"  # not likely the compiler's fault
    return f"{found[0] if found else f'exit status {status}'}. {advice()}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
