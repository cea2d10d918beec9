"""The time before the first kernel: NVRTC starts in a thread, kernels of one plan are compiled at once."""

import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from kit import prefork
from tsfuser import options
from tsfuser.errors import CompileError, Refusal
from tsfuser.planning import compilers
from tsfuser.target import cuda
from tsfuser.target.cuda import CudaTarget
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.job import Stopped

NAME = "tsfuser starts NVRTC"
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")

ONE = """#include "tsfuser.h"
struct Args { float* out; };
KERNEL(one, Args, 128) { args.out[threadIdx.x] = 1.0f; }"""


STARTED = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
sys.path.insert(0, {root!r})
import torch, tsfuser
from tsfuser.target.cuda import CudaTarget
from tsfuser.target.disk_cache import DiskCache
target = CudaTarget(DiskCache({cache!r}))
target.start()
threads = [t for t in threading.enumerate() if t.name == "tsfuser starts NVRTC"]
"""


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def wait():
    """Until no thread starts NVRTC any more."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join()


def started(tmp_path, rest, cache="cache"):
    """What a process prints that starts NVRTC and goes on with `rest`; it ends well and says nothing else."""
    source = STARTED.format(root=str(Path(__file__).parents[2]), cache=str(tmp_path / cache)) + rest
    done = prefork.run(["-c", source])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@needs_cupy
def test_nvrtc_starts_in_a_thread_where_no_process_has_started_it_before(tmp_path):
    loaded = "import torch; print('libnvrtc.so' in open('/proc/self/maps').read())"
    if prefork.run(["-c", loaded]).stdout.strip() == "True":
        pytest.skip("this torch loads NVRTC itself")
    begin = """
[t.join() for t in threads]
print("libnvrtc.so" in open("/proc/self/maps").read(), "cupy" in sys.modules)
"""
    assert started(tmp_path, begin) == "True False"
    assert started(tmp_path, begin) == "False False"
    assert started(tmp_path, begin, "emptied") == "True False"


def test_a_target_starts_once(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(CudaTarget, "_prepare", lambda self: calls.append(threading.current_thread().name))
    target = CudaTarget(cache)
    for _ in range(3):
        target.start()
    wait()
    assert calls == [NAME]


@needs_cupy
def test_a_kernel_that_comes_while_nvrtc_starts_waits_for_it(tmp_path):
    compiled = f"source = {ONE!r}\nprint(target.compile_for(source, 'one', 90).content != b'')"
    assert started(tmp_path, compiled) == "True"


@needs_cupy
@pytest.mark.parametrize("way", ["pass", "sys.exit(0)"])
def test_a_process_may_end_while_nvrtc_starts(tmp_path, way):
    assert started(tmp_path, way) == ""


@needs_cupy
@pytest.mark.parametrize("what", ["cupy", "cupy.cuda", "cupyx.scipy.sparse"])
def test_a_program_may_import_cupy_while_nvrtc_starts(tmp_path, what):
    """Any part of it first: did the thread import CuPy, this would fail."""
    assert started(tmp_path, f"import {what}") == ""


@needs_cupy
def test_a_child_forked_while_nvrtc_starts_can_import_cupy(tmp_path):
    forked = """
child = os.fork()
if child == 0:
    import cupy
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert started(tmp_path, forked) == "7"


def test_start_says_nothing_where_there_is_no_cupy(cache, monkeypatch, capfd):
    cuda.installation.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    target = CudaTarget(cache)
    target.start()
    wait()
    with pytest.raises(Refusal, match="need CuPy"):
        target.compile_for(ONE, "one", 90)
    assert capfd.readouterr() == ("", "")
    cuda.installation.cache_clear()


# ---- the kernels of one plan


class Target:
    """Kernels are their names; `make(name)` stands for the compiler."""

    def __init__(self, make, disk=()):
        self.make, self.disk, self.compiled = make, disk, []
        self.cache = self
        self.directory = "nowhere"

    def find(self, source, name, device):
        return name if name in self.disk else None

    def compile(self, source, name, device, stop):
        self.stop = stop
        self.compiled.append(name)
        self.make(name)
        return name


def test_kernels_of_a_plan_are_compiled_at_the_same_time(monkeypatch):
    """Each waits until the other has begun; the order stays."""
    meeting = threading.Barrier(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    target = Target(lambda name: meeting.wait(60))
    assert compilers.binaries(target, [("a", "first"), ("b", "second")], "cpu") == ["first", "second"]


def test_the_failure_of_one_kernel_is_that_of_the_plan_and_ends_the_others():
    stopped = []

    def make(name):
        if name == "second":
            raise CompileError("the second one")
        while True:
            time.sleep(0.01)
            try:
                target.stop.check()
            except Stopped:
                stopped.append(name)
                raise

    target = Target(make)
    with pytest.raises(CompileError, match="the second one"):
        compilers.binaries(target, [("source", name) for name in ("first", "second")], "cpu")
    assert stopped == ["first"]


def test_what_is_on_disk_is_not_compiled():
    target = Target(lambda name: None, disk={"first"})
    assert compilers.binaries(target, [("a", "first"), ("b", "second"), ("a", "first")], "cpu") == [
        "first",
        "second",
        "first",
    ]
    assert target.compiled == ["second"]


def test_a_compiler_in_this_process_that_hangs_is_given_up(monkeypatch):
    """NVRTC cannot be ended."""
    over = threading.Event()
    monkeypatch.setattr(compilers, "_MARGIN", -1)
    try:
        with (
            options.override(compile_timeout=2),
            pytest.raises(CompileError, match="did not finish kernel slow in 2 s"),
        ):
            compilers.binaries(Target(lambda name: over.wait(60)), [("source", "slow")], "cpu")
    finally:
        over.set()


def test_without_threads_kernels_are_compiled_one_by_one(monkeypatch):
    """As at the exit of the interpreter."""

    def submit(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compilers.ThreadPoolExecutor, "submit", submit)
    assert compilers.binaries(Target(lambda name: None), [("a", "first"), ("b", "second")], "cpu") == [
        "first",
        "second",
    ]


def test_what_was_started_ahead_is_compiled_once(monkeypatch):
    monkeypatch.setattr(compilers, "_ahead", compilers._Ahead())
    meeting = threading.Barrier(2)
    target = Target(lambda name: name == "first" and meeting.wait(60))
    compilers.start(target, [("a", "first"), ("a", "first")], "cpu")
    meeting.wait(60)  # it is being compiled while nobody waits
    assert compilers.binaries(target, [("a", "first"), ("b", "second")], "cpu") == ["first", "second"]
    assert sorted(target.compiled) == ["first", "second"]
    assert compilers._ahead.jobs == {}


def test_a_failure_ahead_is_that_of_the_plan(monkeypatch):
    monkeypatch.setattr(compilers, "_ahead", compilers._Ahead())

    def make(name):
        raise CompileError("as every time")

    target = Target(make)
    compilers.start(target, [("a", "first")], "cpu")
    with pytest.raises(CompileError, match="as every time"):
        compilers.binaries(target, [("a", "first")], "cpu")


def test_what_nobody_asked_for_is_dropped(monkeypatch):
    monkeypatch.setattr(compilers, "_ahead", compilers._Ahead())
    monkeypatch.setattr(compilers, "_MOST", 2)
    target = Target(lambda name: None)
    compilers.start(target, [("a", "first"), ("b", "second"), ("c", "third")], "cpu")
    assert [kernel[1] for _, kernel, _ in compilers._ahead.jobs] == ["second", "third"]
    compilers.forget()
    assert compilers._ahead.jobs == {}


_STARTS = """
import os, threading, time
from tsfuser.planning import compilers
os.sched_getaffinity = lambda process: {0, 1}
begun = threading.Event()
class Target:
    def find(self, *kernel): return None
    def compile(self, source, name, device, stop):
        print("compiles", name, flush=True)
        begun.set()
        time.sleep(0.2)
compilers.start(Target(), [("", str(k)) for k in range(200)], "cpu")
begun.wait(60)
"""


def test_the_process_ends_without_what_has_not_begun():
    root = Path(compilers.__file__).parents[2]
    done = prefork.run(["-c", _STARTS], cwd=root)
    assert done.returncode == 0, done.stderr
    assert 0 < done.stdout.count("compiles") < 100
