"""What users read where the C++ compiler does not work: the variable that names it, and what to do. And
kernels that are on disk need no compiler."""

import shlex
import sys
from pathlib import Path

import pytest

from tsfuser.errors import CompileError, Refusal
from tsfuser.target import counters, cuda, cxx, driver
from tsfuser.target.cuda import CudaTarget
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.host import HostTarget

ONE = """#include "tsfuser.h"
struct Args { float* out; };
KERNEL(one, Args, 128) { args.out[0] = 1.0f; }"""


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def script(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def failure(cache, monkeypatch, command, **options):
    """What compiling and loading with this CXX says."""
    monkeypatch.setenv("CXX", command)
    target = HostTarget(cache, **options)
    with pytest.raises((Refusal, CompileError)) as error:
        target.load(target.compile(ONE, "one"), "one")
    return str(error.value)


@pytest.mark.parametrize(
    "command, words",
    [
        ("true", "ended without an error, but wrote no library"),
        ("echo", "ended without an error, but wrote no library"),
        ("false", "exit status 1"),
        ("cat", "does not know an option"),
        (sys.executable, "does not know an option"),
        ('g++ "-O2', "No closing quotation"),
        ("g++ 'x", "No closing quotation"),
        ("g++ \\", "No escaped character"),
        ("/nowhere/c++ -O2", "'/nowhere/c++' is not a program"),
        ("/", "'/' is not a program"),
        ("g++ -std=c++99x", "does not know an option"),
        ("g++ -B/nowhere -fuse-ld=nothing", ""),
    ],
)
def test_a_message_names_cxx_and_what_to_do(cache, monkeypatch, command, words):
    said = failure(cache, monkeypatch, command)
    assert words in said and f"CXX is set to {command!r}: set it to a C++17 compiler" in said
    assert "or unset it" in said


@pytest.mark.parametrize(
    "text, words",
    [
        (r"printf '\377\376 kaputt'; exit 3", "\\xff\\xfe kaputt"),
        (r"printf '\377\376'", "wrote no library"),
        ("kill -9 $$", "signal 9 (SIGKILL)"),
        ("echo ld: No space left on device; exit 1", "the disk is full"),
        ("echo cannot execute cc1plus; exit 1", "a part of the compiler is missing"),
        ('while [ "$1" ]; do [ "$1" = -o ] && : > "$2"; shift; done', "wrote no library"),
        ('while [ "$1" ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done', "cannot load kernel one"),
    ],
)
def test_compilers_that_fail_in_odd_ways(cache, monkeypatch, tmp_path, text, words):
    command = script(tmp_path, text)
    said = failure(cache, monkeypatch, command)
    assert words in said and f"CXX is set to {command!r}" in said


def test_a_file_that_is_no_program(cache, monkeypatch, tmp_path):
    path = tmp_path / "compiler"
    path.write_text("nonsense")
    path.chmod(0o755)
    assert "cannot be started" in failure(cache, monkeypatch, str(path))


@pytest.mark.parametrize("when", ["--version", "one.cpp"])
def test_a_compiler_that_hangs_is_given_up(cache, monkeypatch, tmp_path, when):
    command = script(tmp_path, f'case "$*" in *{when}*) exec sleep 600;; esac')
    said = failure(cache, monkeypatch, command, seconds=1)
    assert (
        "did not finish kernel one in 1 s" in said and "TSFUSER_COMPILE_TIMEOUT" in said and command in said
    )


def test_a_mistake_in_a_kernel_is_not_blamed_on_the_compiler(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match="exit status 1\n") as error:
        HostTarget(cache).compile(ONE + "nonsense", "one")
    assert "CXX" not in str(error.value)


# ---- what is on disk


@pytest.mark.parametrize("then", [None, "/nowhere/c++", 'g++ "'])
def test_a_kernel_on_disk_needs_no_compiler(cache, monkeypatch, then):
    HostTarget(cache).compile(ONE, "one")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    if then:
        monkeypatch.setenv("CXX", then)
    target = HostTarget(DiskCache(cache.directory))
    counters.reset()
    stored = target.find(ONE, "one")
    assert stored and target.load(stored, "one").handle
    assert target.find(ONE + " ", "one") is None
    assert counters.snapshot() == {"kernels_compiled": 0, "disk_hits": 1, "plans_read": 0, "graphs_read": 0}


def test_another_compiler_compiles_anew(cache, monkeypatch):
    """So that a fixed one is used."""
    HostTarget(cache).compile(ONE, "one")
    monkeypatch.setenv("CXX", f"{shlex.join(cxx.find_compiler())} -DOTHER")
    assert HostTarget(cache).find(ONE, "one") is None
    assert HostTarget(cache).compile(ONE, "one") and HostTarget(cache).find(ONE, "one")


def test_a_cuda_kernel_on_disk_needs_no_cupy(cache, monkeypatch):
    monkeypatch.setattr(cuda, "_compile", lambda *_, **__: (b"a cubin", ""))
    monkeypatch.setattr(cuda, "installation", lambda: "one")
    monkeypatch.setattr(driver, "capability", lambda index: 90)
    CudaTarget(cache).compile(ONE, "one")

    def absent():
        raise Refusal("CUDA tensors need CuPy")

    monkeypatch.setattr(cuda, "installation", absent)
    assert CudaTarget(cache).find(ONE, "one").content == b"a cubin"
    with pytest.raises(Refusal, match="need CuPy"):
        CudaTarget(cache).compile(ONE, "one")


def test_a_full_disk_is_no_mistake_of_ours(cache, monkeypatch):
    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CompileError, match="cannot write temporary files to .*No space left"):
        HostTarget(cache).compile(ONE, "one")
