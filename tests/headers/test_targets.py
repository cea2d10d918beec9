"""Targets: what is compiled when, and what they say when something is missing."""

import ctypes
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit import harness
from tsfuser.codegen.emit import WITHOUT_CONTRACTION
from tsfuser.errors import CompileError, Refusal
from tsfuser.target import counters, cuda, driver, job
from tsfuser.target.cuda import CudaTarget
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.host import HostTarget

ADD_RELU = """#include "tsfuser.h"
struct Args { const bfloat16_t* x; const float* y; float* sum; bfloat16_t* rounded; int64_t n; };
KERNEL(add_relu, Args, 128) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  const vec<bfloat16_t, 8> x = load_partial<8>(args.x + i, args.n - i);
  const vec<float, 8> y = load_partial<8>(args.y + i, args.n - i);
  vec<float, 8> sum;
  vec<bfloat16_t, 8> rounded;
#pragma unroll
  for (int lane = 0; lane < 8; ++lane) {
    const float total = convert<float>(x[lane]) + y[lane];
    sum[lane] = total < 0 ? 0 : total;
    rounded[lane] = convert<bfloat16_t>(sum[lane]);
  }
  store_partial(args.sum + i, sum, args.n - i);
  store_partial(args.rounded + i, rounded, args.n - i);
}"""


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def fresh_counters():
    counters.reset()


# ---- the host


def environment(**changed):
    """The environment of a subprocess that imports conftest, with no trace of a CUDA toolkit."""
    here = Path(__file__).parent
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TSFUSER_CACHE_DIR") if name in os.environ}
    paths = (here, *here.parents[:2])
    return {**kept, "PYTHONPATH": ":".join(map(str, paths)), **changed}


@pytest.mark.parametrize("n", [1, 7, 8, 1000])
@pytest.mark.parametrize("mode", harness.HERE)
def test_add_relu(n, mode):
    x = torch.randn(n).bfloat16().to(harness.device(mode))
    y = torch.randn(n).to(x.device)
    total, rounded = torch.empty_like(y), torch.empty_like(x)
    block = 1 if mode == "host" else 32
    kernel = harness.Kernel(ADD_RELU, "add_relu", mode)
    kernel(x, y, total, rounded, n, grid=-(-n // (8 * block)), block=(block, 1))
    assert torch.equal(total, torch.relu(x + y))
    assert torch.equal(rounded, torch.relu(x + y).bfloat16())


def test_no_compiler_is_refused_with_what_to_install(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache.directory))
    with pytest.raises(Refusal, match=r"install g\+\+ or clang\+\+, or set CXX"):
        HostTarget(cache).compile(ADD_RELU, "add_relu")


def test_cxx_that_does_not_exist_is_refused(cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(Refusal, match="/nowhere/c\\+\\+"):
        HostTarget(cache).compile(ADD_RELU, "add_relu")


def test_cxx_may_hold_options(cache, monkeypatch):
    monkeypatch.setenv("CXX", f"{harness.compiler()} -DEXTRA=1")
    source = ADD_RELU + "\nstatic_assert(EXTRA == 1);"
    HostTarget(cache).compile(source, "add_relu")


def test_a_compile_error_says_where_the_source_is(cache):
    with pytest.raises(CompileError, match="nonsense") as error:
        HostTarget(cache).compile(ADD_RELU + "nonsense", "add_relu")
    kept = cache.directory / "failed-add_relu.cpp"
    assert str(kept) in str(error.value) and kept.read_text().endswith("nonsense")


def test_a_call_of_a_missing_function_is_a_compile_error(cache):
    """Not a failure at the first call, inside the process."""
    source = 'extern "C" double missing(double);\n' + ADD_RELU.replace("total < 0", "missing(total) < 0")
    with pytest.raises(CompileError, match="missing"):
        HostTarget(cache).compile(source, "add_relu")


def test_a_library_that_does_not_load_is_dropped(cache):
    target = HostTarget(cache)
    stored = target.compile(ADD_RELU, "add_relu")
    with pytest.raises(CompileError, match="cannot load kernel add_relu"):
        target.load(replace(stored, content=b"not a library"), "add_relu")
    assert not stored.path.exists()
    assert target.load(target.compile(ADD_RELU, "add_relu"), "add_relu").handle


@pytest.mark.parametrize("from_memory", [True, False])
def test_many_libraries_of_one_function_name_are_told_apart(cache, monkeypatch, from_memory):
    """Neither the path nor the number of a file is a library's identity: both come again."""
    if not from_memory:
        monkeypatch.delattr(os, "memfd_create")
    functions = []
    for k in range(12):
        source = f'extern "C" int number() {{ return {k}; }}'
        functions.append(HostTarget(cache).load(HostTarget(cache).compile(source, "number"), "number"))
    assert list(map(called, functions)) == list(range(12))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_library_is_unloaded_when_nobody_holds_its_function(cache):
    stored = HostTarget(cache).compile('extern "C" int only_here() { return 7; }', "only_here")
    function = HostTarget(cache).load(stored, "only_here")
    assert "only_here" in Path("/proc/self/maps").read_text() and called(function) == 7
    del function
    assert "only_here" not in Path("/proc/self/maps").read_text()


def called(function):
    """What a function without arguments returns."""
    return ctypes.CFUNCTYPE(ctypes.c_int)(function.handle)()


def test_a_loaded_kernel_does_not_mind_what_becomes_of_its_file(cache):
    """Cut in place, a mapped file would end the process with SIGBUS."""
    stored = HostTarget(cache).compile('extern "C" int number() { return 7; }', "number")
    function = HostTarget(cache).load(stored, "number")
    os.truncate(stored.path, 0)
    assert called(function) == 7


def test_options_and_modes_are_other_binaries(cache):
    options = [{}, {"opt_level": 1}, {"opt_level": 1, "fibers": True}]
    targets = [HostTarget(cache, **chosen) for chosen in options]
    assert len({target.compile(ADD_RELU, "add_relu") for target in targets}) == 3
    assert counters.snapshot()["kernels_compiled"] == 3


def test_a_hit_starts_no_compiler(cache, monkeypatch):
    HostTarget(cache).compile(ADD_RELU, "add_relu")
    monkeypatch.setattr(job.subprocess, "Popen", None)
    HostTarget(cache).compile(ADD_RELU, "add_relu")


# ---- CUDA

needs_cupy = pytest.mark.skipif(not harness.HAS_CUPY, reason="CuPy is not installed")


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_add_relu_compiles_for(arch):
    harness.compile_for(ADD_RELU, "add_relu", arch)


@needs_cupy
def test_a_cubin_for_known_devices_ptx_for_later_ones(cache):
    target = CudaTarget(cache)
    assert target.compile_for(ADD_RELU, "add_relu", 90).content[:4] == b"\x7fELF"
    assert b".target sm_" in target.compile_for(ADD_RELU, "add_relu", 999).content


@needs_cupy
def test_a_source_says_that_nothing_is_contracted(cache):
    """`a * b + c` is one instruction, or two that round twice."""
    source = """#include "tsfuser.h"
struct Args { float* x; };
KERNEL(scale, Args, 128) { args.x[threadIdx.x] = args.x[threadIdx.x] * args.x[1] + args.x[2]; }
"""
    target = CudaTarget(cache)
    assert b"fma.rn.f32" in target.ptx_for(source, "scale", 90)
    assert b"fma.rn.f32" not in target.ptx_for(WITHOUT_CONTRACTION + source, "scale", 90)


@needs_cupy
def test_a_cubin_is_a_whole_elf_file(cache):
    cubin = CudaTarget(cache).compile_for(ADD_RELU, "add_relu", 90).content
    programs, sections = struct.unpack_from("<QQ", cubin, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", cubin, 54)
    assert programs + program_size * program_count <= len(cubin)
    assert sections + section_size * section_count <= len(cubin)


@needs_cupy
def test_a_device_that_nvrtc_gave_up_is_refused(cache):
    with pytest.raises(Refusal, match="starts at compute capability .*, the device has 3.5"):
        CudaTarget(cache).compile_for(ADD_RELU, "add_relu", 35)


@needs_cupy
def test_nvrtc_errors_carry_the_log(cache):
    with pytest.raises(CompileError, match="nonsense") as error:
        CudaTarget(cache).compile_for(ADD_RELU + "nonsense", "add_relu", 90)
    assert str(cache.directory / "failed-add_relu.cu") in str(error.value)


@needs_cupy
def test_options_are_other_binaries(cache):
    targets = [CudaTarget(cache), CudaTarget(cache, fma=False), CudaTarget(cache, max_registers=32)]
    assert len({target.compile_for(ADD_RELU, "add_relu", 90) for target in targets}) == 3


@needs_cupy
def test_fma_contracts_or_not(cache):
    source = """#include "tsfuser.h"
struct Args { float* x; };
KERNEL(scale, Args, 1) { args.x[0] = args.x[0] * args.x[1] + args.x[2]; }"""
    ptx = [CudaTarget(cache, fma=fma).compile_for(source, "scale", 999).content for fma in (True, False)]
    assert b"fma.rn.f32" in ptx[0] and b"fma.rn.f32" not in ptx[1]


@needs_cupy
def test_resources(cache):
    used = CudaTarget(cache).resources(ADD_RELU, "add_relu", 90)
    assert 8 <= used.registers <= 255 and used.spill_stores == used.spill_loads == used.stack == 0


@needs_cupy
def test_nvrtc_is_found_without_a_toolkit():
    program = (
        "import conftest, tempfile\n"
        "from test_targets import *\n"
        "cubin = CudaTarget(DiskCache(tempfile.mkdtemp())).compile_for(ADD_RELU, 'add_relu', 80)\n"
        "print(len(cubin.content))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", program], env=environment(), text=True)) > 1000


@needs_cupy
def test_a_hit_does_not_import_cupy(cache):
    CudaTarget(cache).compile_for(ADD_RELU, "add_relu", 90)
    program = (
        "import conftest\n"
        "from test_targets import *\n"
        "CudaTarget(DiskCache(sys.argv[1])).compile_for(ADD_RELU, 'add_relu', 90)\n"
        "assert counters.snapshot()['disk_hits'] == 1 and 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(cache.directory)], env=environment(), check=True)


@pytest.fixture
def forget():
    """Lets the module ask again for what it found out once."""
    for function in (cuda.installation, cuda._nvrtc, cuda.supported_archs):
        function.cache_clear()
    yield
    for function in (cuda.installation, cuda._nvrtc, cuda.supported_archs):
        function.cache_clear()


def test_without_cupy_it_says_what_to_install(cache, monkeypatch, forget):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Refusal, match=r"need CuPy: pip install tsfuser\[cuda12\] or tsfuser\[cuda13\]"):
        CudaTarget(cache).compile_for(ADD_RELU, "add_relu", 90)


@needs_cupy
def test_without_the_nvrtc_library_it_says_what_to_install(cache, monkeypatch, forget):
    from cupy.cuda import nvrtc

    def missing():
        raise RuntimeError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(Refusal, match=r"NVRTC library \(libnvrtc.so.*pip install tsfuser\[cuda12\]"):
        CudaTarget(cache).compile_for(ADD_RELU, "add_relu", 90)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_driver_it_says_so():
    with pytest.raises(Refusal, match="CUDA tensors need"):
        driver.capability(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_loads_while_a_stream_is_captured(cache):
    target = CudaTarget(cache)
    path = target.compile(ADD_RELU, "add_relu", "cuda:0")
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        assert target.load(path, "add_relu", "cuda:0").registers > 0
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 8
