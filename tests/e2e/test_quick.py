"""How tests compile kernels in less time (kit/quick.py) takes place: all works without it, too."""

import subprocess

import pytest
import torch

from kit import cached_cxx, harness, quick
from tsfuser.errors import CompileError, Refusal
from tsfuser.planning import compilers
from tsfuser.target import cxx
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.function import RUNTIME
from tsfuser.target.host import _GCC, HostTarget


@pytest.fixture
def gcc(tmp_path):
    """The command of a g++ that reads a header which it has precompiled."""
    try:
        command = cxx.find_compiler()
    except Refusal:
        pytest.skip("no C++ compiler")
    header, user, folder = tmp_path / "one.h", tmp_path / "user.cpp", tmp_path / "precompiled"
    header.write_text("struct One {};\n")
    user.write_text('#include "one.h"\nOne one;\n')
    folder.mkdir()
    write = [*command, "-x", "c++-header", str(header), "-o", str(folder / "one.h.gch")]
    read = [*command, "-fsyntax-only", "-iquote", str(folder), str(user)]
    if not cxx.is_gcc(command) or not _passes(write):
        pytest.skip("not g++")
    header.unlink()
    return command if _passes(read) else pytest.skip("this g++ reads no precompiled header")


def _passes(command):
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("fibers", [False, True])
@pytest.mark.parametrize("level", [quick.QUICK, quick.USERS])
def test_headers_are_precompiled(gcc, monkeypatch, tmp_path, fibers, level):
    monkeypatch.setattr(quick, "HEADERS", tmp_path / "headers")
    monkeypatch.setattr(quick.precompiled, "compiler", gcc)
    monkeypatch.setattr(quick.QuickHost, "level", level)
    quick.precompiled.cache_clear()
    flags = quick.QuickHost(DiskCache(tmp_path / "cache"), fibers=fibers).flags()
    assert quick.precompiled(gcc, flags)[0] == "-iquote"
    quick.precompiled.cache_clear()


def test_a_quick_kernel_calls_the_math_library(monkeypatch, tmp_path):
    """Which it is not linked to: the loader finds its functions."""
    source = """#include "tsfuser.h"
struct Args { const double* x; double* out; };
KERNEL(gamma_of, Args, 128) { args.out[0] = lgamma(args.x[0]); }"""
    monkeypatch.setattr(quick.QuickHost, "level", quick.QUICK)
    target = quick.QuickHost(DiskCache(tmp_path / "cache"))
    function = target.load(target.compile(source, "gamma_of"), "gamma_of")
    kernel = harness.Kernel.__new__(harness.Kernel)  # how a kernel is launched
    kernel.target, kernel.function = "host", function
    x, out = torch.tensor([4.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    kernel(x, out, grid=1)
    assert torch.allclose(out, torch.lgamma(x))


def test_a_quick_kernel_of_fibers_calls_their_scheduler(gcc, monkeypatch, tmp_path):
    """Which is compiled once, with what it says of kernels that hang."""
    source = """#include "tsfuser.h"
struct Args { float* out; };
KERNEL(turned, Args, 64) {
  SHARED_MEMORY(memory);
  memory[threadIdx.x] = threadIdx.x;
  __syncthreads();
  args.out[threadIdx.x] = memory[63 - threadIdx.x];
}"""
    monkeypatch.setattr(quick, "HEADERS", tmp_path / "headers")
    monkeypatch.setattr(quick.precompiled, "compiler", gcc)
    quick.fiber_library.cache_clear()
    says = []
    for level in (quick.USERS, quick.QUICK):
        monkeypatch.setattr(quick.QuickHost, "level", level)
        target = quick.QuickHost(DiskCache(tmp_path / "cache"), fibers=True, opt_level=0)
        stored = target.compile(source, "turned")
        says.append(b"returned while others wait" in stored.content)
        kernel = harness.Kernel.__new__(harness.Kernel)
        kernel.target, kernel.function = "fibers", target.load(stored, "turned")
        out = torch.zeros(64)
        kernel(out, grid=1, block=(64, 1), shared=64)
        assert out.tolist() == list(range(63, -1, -1))
    assert says == [True, False]
    quick.fiber_library.cache_clear()


FILL = """#include "tsfuser.h"
struct Args {{ float* out; }};
KERNEL({0}, Args, 1) {{ args.out[0] = {1}; }}"""


def test_kernels_that_are_asked_for_together_are_compiled_together(monkeypatch, tmp_path):
    monkeypatch.setattr(quick.QuickHost, "level", quick.QUICK)
    run, runs = cxx.run, []
    monkeypatch.setattr(cxx, "run", lambda *words: (runs.append(words[3]), run(*words)))
    target = quick.QuickHost(DiskCache(tmp_path / "cache"))
    kernels = [(FILL.format(name, value), name) for name, value in (("one", 1.0), ("two", 2.0))]
    for (_, name), stored, value in zip(kernels, compilers.binaries(target, kernels, "cpu"), (1.0, 2.0)):
        kernel = harness.Kernel.__new__(harness.Kernel)
        kernel.target, kernel.function = "host", target.load(stored, name)
        out = torch.zeros(1)
        kernel(out, grid=1)
        assert out.item() == value
    assert runs == ["joined"] and all(target.find(*kernel) for kernel in kernels)
    wrong = [(FILL.format(name, value), name) for name, value in (("three", "3.0"), ("four", "none"))]
    with pytest.raises(CompileError, match="failed on kernel four"):
        compilers.binaries(target, wrong, "cpu")


def test_the_compiler_of_programs_does_not_optimise(gcc, tmp_path):
    (tmp_path / "empty.cpp").write_text("")
    macros = [
        subprocess.run(
            [*command, "-O3", "-dM", "-E", tmp_path / "empty.cpp"], capture_output=True, check=True
        )
        for command in (gcc, [quick.compiler()])
    ]
    assert [b"__OPTIMIZE__" in each.stdout for each in macros] == [True, False]


@pytest.mark.parametrize("fibers", [False, True])
def test_the_compiler_of_programs_reads_precompiled_headers(gcc, tmp_path, fibers):
    """Of kernels; of another folder's headers it knows nothing."""
    (tmp_path / "tsfuser.h").write_text("struct Other {};\n")
    user, target = tmp_path / "user.cpp", HostTarget(None, 0 if fibers else 3, fibers)
    user.write_text('#include "tsfuser.h"\n')
    (tmp_path / "source").mkdir()
    user.rename(tmp_path / "source" / user.name)
    for folder, taken in ((RUNTIME, True), (tmp_path, False)):
        words = [
            *_GCC,
            *target.flags(),
            "-H",
            "-fsyntax-only",
            "-iquote",
            folder,
            tmp_path / "source" / user.name,
        ]
        done = subprocess.run([quick.compiler(), *words], capture_output=True, text=True, check=True)
        assert (f"! {quick.precompiled_for_programs(gcc)}/" in done.stderr) == taken, done.stderr


def test_an_object_of_the_same_text_and_options_is_made_once(gcc, monkeypatch, tmp_path):
    """By the compiler of C++ programs that tests build; wherever the source and the object lie."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {gcc[0]} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setattr(quick, "HEADERS", tmp_path / "headers")
    program = cached_cxx.of(str(compiler))

    def build(folder, source, *options):
        """How often the compiler was started for an object."""
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "one.h").write_text("constexpr int one = 1;\n")
        path = tmp_path / folder / "user.cpp"
        path.write_text(source)
        log.write_text("")
        words = [program, *options, "-o", path.with_suffix(".o"), "-c", path]
        status = subprocess.run(words, capture_output=True).returncode
        assert status or _passes([gcc[0], path.with_suffix(".o"), "-o", path.with_suffix("")])
        return status, sum(" -c " in line for line in log.read_text().splitlines())

    source = '#include "one.h"\nint main() { return one - 1; }\n'
    assert build("a", source) == (0, 1)
    assert build("a", source) == build("b", source) == build("b", source, "-I", tmp_path) == (0, 0)
    assert build("b", source, "-O1") == build("b", source.replace("one - 1", "1 - one")) == (0, 1)
    assert build("b", "wrong") == (1, 1) and build("b", '#include "none.h"') == (1, 0)
