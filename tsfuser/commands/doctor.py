"""`python -m tsfuser doctor`: what works here, what does not, and what to do.

In: this machine. Out: a line for each thing: `ok`, `--` where it is not there and not needed, or `no` with
the remedy; status 1 where something needed does not work. A kernel is compiled and run for each kind of
tensors. Example:

    ok  torch 2.13.0+cpu, for which the extension is built
    no  kernels for CPU tensors: CPU tensors need a C++17 compiler: install g++ or clang++, or set CXX to one
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import knobs, options
from ..debug import report
from ..errors import Refusal
from ..planning import compile as pipeline
from ..target import cuda, cxx, driver
from ..target.disk_cache import DiskCache
from ..version import __version__
from .cache import summary

SUMMARY = "say whether torch, compilers, driver, cache and options work here, and what to do where not"

OK, ABSENT, NO = "ok", "--", "no"


@dataclass(frozen=True)
class Finding:
    """`state`: OK, ABSENT or NO; `text`: what, and the remedy."""

    state: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def command(chosen: argparse.Namespace) -> int:
    """1 where something needed does not work."""
    print(f"tsfuser {__version__}, in {Path(__file__).parents[1]}", flush=True)
    needed = True
    for finding in findings():
        print(f"{finding.state}  {finding.text}", flush=True)
        needed &= finding.state != NO
    print("All that is needed works." if needed else "What is marked `no` does not work.")
    return 0 if needed else 1


def findings() -> Iterator[Finding]:
    """In the order in which one needs them."""
    yield Finding(OK, f"Python {platform.python_version()}, in {sys.prefix}")
    yield Finding(OK, f"torch {torch.__version__}, for which the extension is built")
    yield (compiler := _compiler())
    if compiler.state == OK:
        yield _kernel("cpu")
    yield from _cuda()
    yield _cache()
    yield from _options()


def _compiler() -> Finding:
    """Where there is a GPU, a program may have CUDA tensors only."""
    missing = ABSENT if torch.cuda.is_available() else NO
    try:
        command = cxx.find_compiler()
    except Refusal as error:
        return Finding(missing, f"C++ compiler: {error}")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace")
    lines = done.stdout.strip().splitlines()
    chosen = ", which CXX names" if os.environ.get("CXX", "").strip() else ""
    if done.returncode or not lines:
        return Finding(
            missing, f"C++ compiler: `{' '.join(command)} --version` fails{chosen}. {cxx.advice()}"
        )
    return Finding(OK, f"C++ compiler: {' '.join(command)}{chosen} ({lines[0]})")


def _program(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 0.5 + 1.0)


def _kernel(device: str) -> Finding:
    """Whether a kernel is compiled anew, and gives eager's result."""
    what = f"kernels for {'CPU' if device == 'cpu' else 'CUDA'} tensors"
    start = time.perf_counter()
    x = torch.linspace(-4, 4, 1000, device=device)
    with _empty_cache(), warnings.catch_warnings(), knobs.fuser(), torch.no_grad():
        warnings.simplefilter("ignore")
        report.reset()
        scripted = torch.jit.script(_program)
        scripted._debug_flush_compilation_cache()
        results = [scripted(x) for _ in range(3)]
    seconds, found = time.perf_counter() - start, report.stats()
    if found["fallbacks"] or not found["launches"]:
        reason = next(iter(found["fallbacks"]), "no group was made; please report it")
        return Finding(NO, f"{what}: {reason.splitlines()[0]}")
    if not all(torch.equal(result, _program(x)) for result in results):
        return Finding(NO, f"{what}: the result of one is wrong; please report it")
    return Finding(OK, f"{what}: one was compiled and run in {seconds:.1f} s")


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Nothing that was compiled before is used."""
    with tempfile.TemporaryDirectory(prefix="tsfuser-") as folder:
        with options.override(cache_dir=Path(folder), stored_plans=False):
            pipeline._target.cache_clear()
            yield
    pipeline._target.cache_clear()


def _cuda() -> Iterator[Finding]:
    if not torch.version.cuda:
        yield Finding(ABSENT, f"CUDA: torch {torch.__version__} is built without it, so CPU tensors only")
        return
    yield (driver_works := _driver())
    needed = driver_works.state == OK
    yield (compiler_works := _nvrtc(needed))
    if needed and compiler_works.state == OK:
        yield _kernel("cuda")


def _driver() -> Finding:
    """Without a device, CUDA is not needed."""
    try:
        arch = driver.capability(0)
    except Refusal as error:
        return Finding(ABSENT, f"CUDA driver: {error}")
    except driver.DriverError as error:
        return Finding(NO, f"CUDA driver: {error}; update it, or hide the GPU by CUDA_VISIBLE_DEVICES=''")
    if not torch.cuda.is_available():
        return Finding(NO, "CUDA driver: it works, but torch does not take it: torch.cuda.init() says why")
    names = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
    return Finding(OK, f"CUDA driver: {names}, compute capability {arch / 10}")


def _nvrtc(needed: bool) -> Finding:
    try:
        newest = cuda.supported_archs()[-1]
    except Refusal as error:
        return Finding(NO if needed else ABSENT, f"CuPy and NVRTC: {error}")
    found = importlib.metadata.packages_distributions().get("cupy", ())
    cupy = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)
    nvrtc = f"NVRTC {cuda.nvrtc_version()}, for compute capabilities up to {newest / 10}"
    return Finding(OK, f"CuPy and NVRTC: {cupy or 'CuPy'}, {nvrtc}")


def _cache() -> Finding:
    folder = options.cache_dir()
    cache = DiskCache(folder, options.get("cache_limit"))
    if reason := cache.hindrance():
        return Finding(NO, f"cache: {reason}")
    return Finding(OK, f"cache: {folder}, {summary(cache)}")


def _options() -> Iterator[Finding]:
    """Those that are set, and what is wrong with them; a wrong value of others ends the import."""
    known = {row.variable for row in options.TABLE}
    mistakes = [*options.read_late(os.environ)[1]]
    for prefix in ("TSFUSER_", "PYTORCH_NVFUSER_"):
        mistakes += options.unknown(os.environ, prefix)
    for text in mistakes:
        yield Finding(NO, f"options: {text}")
    chosen = [f"{name}={os.environ[name]}" for name in sorted(known & os.environ.keys()) if os.environ[name]]
    yield Finding(OK, f"options: {', '.join(chosen) or 'none is set'}")
