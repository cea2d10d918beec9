"""The time before the first kernel: NVRTC starts in a thread, kernels of one plan are compiled at once."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tsfuser.errors import CompileError, Refusal
from tsfuser.runtime import compile as pipeline
from tsfuser.target import cuda
from tsfuser.target.cuda import CudaTarget
from tsfuser.target.disk_cache import DiskCache

NAME = "tsfuser starts NVRTC"
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")

ONE = """#include "tsfuser.h"
struct Args { float* out; };
KERNEL(one, Args, 128) { args.out[threadIdx.x] = 1.0f; }"""


STARTED = """
import os, sys, threading
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
    done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", source], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@needs_cupy
def test_nvrtc_starts_in_a_thread_where_no_process_has_started_it_before(tmp_path):
    loaded = "import torch; print('libnvrtc.so' in open('/proc/self/maps').read())"
    if subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout.strip() == "True":
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


def test_kernels_of_a_plan_are_compiled_at_the_same_time(monkeypatch):
    """Each waits until the other has begun; the order stays."""
    meeting = threading.Barrier(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(pipeline, "function", lambda source, name, device: (meeting.wait(60), name)[1])
    assert pipeline.functions([("source", "first"), ("source", "second")], "cpu") == ["first", "second"]


def test_the_failure_of_one_kernel_is_that_of_the_plan(monkeypatch):
    def function(source, name, device):
        if name == "second":
            raise CompileError("the second one")
        return name

    monkeypatch.setattr(pipeline, "function", function)
    with pytest.raises(CompileError, match="the second one"):
        pipeline.functions([("source", name) for name in ("first", "second", "third")], "cpu")
