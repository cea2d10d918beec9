"""C++ programs that link libtorch: the example, and with it a program of checks (libtorch/main.cpp), built by
the example's own script; and a small one, built with the printed flags (libtorch/start.cpp)."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit import cached_cxx, prefork, quick
from kit.support import ROOT
from tsfuser.__main__ import main
from tsfuser.frontends.libtorch import config, embedded

CHECKS = Path(__file__).parent / "libtorch"
VERSION = torch.__version__.partition("+")[0]
LIBTORCH = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
try:
    STATIC = embedded.libpython() and ""
except RuntimeError as error:
    STATIC = str(error)
embeds = pytest.mark.skipif(bool(STATIC), reason=STATIC)
#: What CMake reads: no optimisation, which takes a third of the compile.
QUICK = {"CXXFLAGS": "-O0", "CMAKE_BUILD_TYPE": "None"}
#: Of each thread of the example, which measures: more than a test needs.
REQUESTS = "constexpr int requests = 60;"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Model(torch.nn.Module):
    """One group in inference; [n, 32] in and out."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x):
        return torch.softmax(torch.tanh(self.norm(x) * self.scale) * 2.0, -1) + torch.relu(self.scale - x)


def execute(command, **environment):
    """Exit status, stdout and stderr of a command in which `python3` is this interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def _own_cpp_library():
    """Some compilers link their own C++ library into programs, beside which torch's would free what the other
    allocated. Then the program should do so where there is one."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or ""
    status, out, _ = execute([compiler, "-print-file-name=libstdc++.a"]) if compiler else (1, "", "")
    return "-static-libstdc++" if status == 0 and os.path.isabs(out.strip()) else ""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the program, of `model.pt`, which the example serves, and of `checks.pt`. The second
    command of the example's README builds it; the first one, which installs, is what other tests stand on."""
    folder = tmp_path_factory.mktemp("libtorch")
    shutil.copytree(ROOT / "examples" / "libtorch", folder / "example")
    server = (folder / "example" / "main.cpp").read_text()
    assert REQUESTS in server
    fewer = server.replace(REQUESTS, "constexpr int requests = 20;")
    (folder / "example" / "server.cpp").write_text(fewer)
    for name in ("main.cpp", "program.cpp"):
        shutil.copy(CHECKS / name, folder / "example")
    environment = {"LDFLAGS": _own_cpp_library(), "CXX": cached_cxx.of(quick.compiler()), **QUICK}
    status, out, err = execute([folder / "example" / "build", folder], PYTHON=sys.executable, **environment)
    assert status == 0, f"{out}\n{err}"
    (folder / "server").rename(folder / "program")
    torch.jit.script(Model().eval()).save(folder / "checks.pt")
    return folder


@embeds
@pytest.mark.parametrize("target", DEVICES)
def test_threads_run_fused_while_another_holds_python(target, built, tmp_path):
    """Two modules, one frozen, eight threads and new shapes, with Python's lock in other hands; signals are
    the program's; after the stop plans still serve, and other calls run unfused."""
    status, out, err = execute(
        [built / "program", "life", built / "checks.pt", tmp_path / "cache", target], CXX=quick.compiler()
    )
    assert status == 0 and out.endswith("end of main\n"), f"{out}\n{err}"
    counts = dict(re.findall(r"^(\w+): (\d+)$", out, re.M))
    assert int(counts["launches"]) == int(counts["exact_hits"]) + int(counts["class_hits"]) + int(
        counts["plans_built"]
    )
    assert counts["fallbacks"] == "0" and any((tmp_path / "cache").rglob("*"))
    assert "a process starts Python once" in out


@embeds
def test_errors_say_what_to_do_and_a_start_may_follow(built, tmp_path):
    """And a process that does not call stop() exits as any other."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    status, out, err = execute(
        [built / "program", "errors", built / "checks.pt", "/no/python", shutil.which("true"), bare]
    )
    assert status == 0, f"{out}\n{err}"
    missing, silent, empty, old, option, end = out.splitlines()
    assert '"/no/python" does not run (No such file or directory); Options::python names' in missing
    assert "is no Python that runs" in silent
    assert "has no tsfuser: run `pip install" in empty
    assert f"compiled with torch 2.9.0, but {sys.executable} has torch {VERSION}" in old
    assert "-m tsfuser config`" in old
    assert "'TSFUSER_CACHE_DIRECTORY'; did you mean 'TSFUSER_CACHE_DIR'?" in option
    assert end == "end of main" and err.count("Error") == 0


@embeds
def test_a_python_of_the_program_is_used_and_left_running(built):
    status, out, err = execute([built / "program", "own", built / "checks.pt", embedded.libpython()])
    assert status == 0 and out == "end of main\n", f"{out}\n{err}"


@embeds
def test_an_extension_of_another_torch_is_an_error(tmp_path):
    """Of a program that is built with the printed flags. It finds a package whose extension does not load;
    that raises before torch is imported, which takes seconds."""
    kinds = ["-m", "tsfuser", "config", "--cflags", "--libs"]
    printed = prefork.run(kinds, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
    words = [compiler, "-O0", CHECKS / "start.cpp", *printed.stdout.split(), "-o", tmp_path / "start"]
    status, _, err = execute(words)
    assert status == 0, err
    folder = tmp_path / "tsfuser" / "frontends" / "libtorch"
    folder.mkdir(parents=True)
    shutil.copy(embedded.__file__, folder)
    text = (ROOT / "tsfuser" / "__init__.py").read_text()
    text = text.replace("import torch\n", "class torch:\n    __version__ = 'other'\n")
    (tmp_path / "tsfuser" / "__init__.py").write_text(text)
    for name in ("version.py", "interface.py"):
        shutil.copy(ROOT / "tsfuser" / name, tmp_path / "tsfuser")
    (tmp_path / "tsfuser" / "_C.abi3.so").write_bytes(b"")
    status, out, err = execute([tmp_path / "start"], PYTHONPATH=str(tmp_path))
    assert status == 0, err
    assert "tsfuser's extension does not load with torch other" in out and out.endswith("end of main\n")


def test_another_libtorch_is_an_error(tmp_path):
    other = tmp_path / "libtorch_cpu.so"
    other.write_bytes(b"")
    with pytest.raises(RuntimeError, match="the two differ: build the program with"):
        embedded.check(VERSION, str(other))
    with pytest.raises(RuntimeError, match="has not loaded libtorch_cpu.so"):
        embedded.check(VERSION, "")
    with pytest.raises(RuntimeError, match="compiled with torch 2.9.0"):
        embedded.check("2.9.0", LIBTORCH)
    embedded.check(VERSION, LIBTORCH)


def test_a_static_python_is_an_error(monkeypatch, tmp_path):
    values = {"LDLIBRARY": "libpython3.11.a", "LIBDIR": str(tmp_path), "LDVERSION": "3.11"}
    monkeypatch.setattr(embedded.sysconfig, "get_config_var", values.get)
    monkeypatch.setattr(embedded.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(embedded, "_mapped", list)
    with pytest.raises(RuntimeError, match="has no shared library.*built with --enable-shared"):
        embedded.libpython()
    (tmp_path / "libpython3.11.so.1.0").write_bytes(b"")
    assert embedded.libpython() == str((tmp_path / "libpython3.11.so.1.0").resolve())


def printed(capsys, *kinds):
    assert main(["config", *kinds]) == 0
    return capsys.readouterr().out


def test_shells_and_build_tools_split_the_flags_alike(capsys, tmp_path):
    """At spaces. Each tool has rules of its own for quotes and backslashes."""
    text = printed(capsys, "--cflags", "--libs")
    words = text.split()
    ways = {"shlex": shlex.split(text), "sh": lines_of(["sh", "-c", f"printf '%s\\n' {text}"])}
    ways["xargs"] = lines_of(["xargs", "-n1", "printf", "%s\\n"], input=text)
    if shutil.which("make"):
        flags = f"FLAGS := $(shell cat {tmp_path}/flags)\nall:\n\t@printf '%s\\n' $(FLAGS)\n"
        (tmp_path / "Makefile").write_text(flags)
        (tmp_path / "flags").write_text(text)
        ways["make"] = lines_of(["make", "-s", "-C", tmp_path])
    assert ways == dict.fromkeys(ways, words)


def lines_of(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, **options)
    return done.stdout.splitlines()


def test_a_path_with_a_space_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(config, "FOLDER", Path("/my packages/tsfuser"))
    for kind in ("--cflags", "--libs"):
        assert main(["config", kind]) == 1
        assert "my packages" in capsys.readouterr().err


def test_config_wants_to_know_what(capsys):
    assert main(["config"]) == 2 and "--cmake" in capsys.readouterr().err


@embeds
@pytest.mark.parametrize("target", DEVICES)
def test_the_example(target, built, tmp_path):
    status, out, err = execute(
        [built / "program", "serve", built / "model.pt", target],
        TSFUSER_CACHE_DIR=str(tmp_path / "cache"),
        CXX=quick.compiler(),
    )
    assert status == 0, f"{out}\n{err}"
    assert re.search(
        r"^unfused: \d+ requests a second\nfused: \d+ requests a second\nlargest difference", out
    )
    counts = dict(re.findall(r"^(\w+): (\d+)$", out, re.M))
    assert int(counts["launches"]) > 0 and counts["fallbacks"] == "0"
