"""CUDA launches of a thread that has no context, against a driver that only counts: no device is needed."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from kit import cached_cxx, quick
from kit.native_support import ROOT

DRIVER = r"""
#include <cstddef>
#include <cstdio>
#define CALL(name, ...) extern "C" int name(__VA_ARGS__)
#define GRID unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
static thread_local void* context = nullptr;
static int told(const char* what) {
  std::printf("%s%s ", what, context ? "" : "!");
  return context ? 0 : 201;  // CUDA_ERROR_INVALID_CONTEXT
}
CALL(cuLaunchKernel, void*, GRID, void*, void**, void**) { return told("launch"); }
CALL(cuLaunchCooperativeKernel, void*, GRID, void*, void**) { return told("cooperative"); }
CALL(cuLaunchKernelEx, const void*, void*, void**, void**) { return told("overlapped"); }
CALL(cuMemsetD8Async, unsigned long long, unsigned char, size_t count, void*) {
  return count ? told("clear") : 1;
}
CALL(cuFuncSetAttribute, void*, int, int) { return told("raise"); }
CALL(cuFuncGetAttribute, int* value, int, void*) { *value = 0; return 0; }
CALL(cuDeviceGetAttribute, int* value, int, int) { *value = 1 << 17; return 0; }
CALL(cuDriverGetVersion, int* version) { *version = 12040; return 0; }
CALL(cuDeviceGet, int* device, int ordinal) { *device = ordinal; return 0; }
CALL(cuCtxGetCurrent, void** current) { *current = context; return 0; }
CALL(cuCtxSetCurrent, void* wanted) { context = wanted; return 0; }
CALL(cuDevicePrimaryCtxRetain, void** primary, int) { *primary = &context; return 0; }
CALL(cuThreadExchangeStreamCaptureMode, int*) { return 0; }
CALL(cuStreamIsCapturing, void*, int* status) { *status = 0; return told("ask"); }
CALL(cuGetErrorName, int, const char** name) { *name = "CUDA_ERROR_INVALID_VALUE"; return 0; }
CALL(cuGetErrorString, int, const char** text) { *text = "invalid argument"; return 0; }
"""

PROGRAM = r"""
#include "call/launch_cuda.cpp"  // in one unit: the headers take nearly all of the compile
#include <cstdio>
#include <thread>
using namespace tsfuser;
int main() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto set_context = reinterpret_cast<int (*)(void*)>(dlsym(driver, "cuCtxSetCurrent"));
  std::thread([&] {
    char memory[8];
    Launch plain, team, overlapped;
    plain.cuda = team.cuda = overlapped.cuda = overlapped.overlaps = true;
    team.cleared = 0;
    const auto launch = [&](const Launch& kernel, int64_t shared) {
      set_context(nullptr);
      launch_cuda({&kernel, 1, 1, 1, shared, 1, 0}, memory, nullptr, 0);
    };
    if (captures(nullptr, 0)) {  // the first call of the thread
      std::puts("a thread without a context captures");
    }
    set_context(nullptr);
    clear_cuda(memory, 8, nullptr, 0);
    set_context(nullptr);
    clear_cuda(memory, 8, nullptr, 0);
    launch(plain, 0);
    launch(team, 0);
    launch(overlapped, 0);
    launch(plain, 96 << 10);
    try {
      clear_cuda(memory, 0, nullptr, 0);
    } catch (const LaunchError& error) {
      std::puts(error.what());
    }
  }).join();
}
"""


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="this torch brings the real driver along; test_cuda_launch asks that",
)
def test_a_thread_that_loses_its_context_takes_the_primary_one(tmp_path):
    """A `!` follows each call of the driver that found none."""
    torch_lib = Path(torch.__file__).parent / "lib"
    (tmp_path / "driver.cpp").write_text(DRIVER)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    compiler = (os.environ.get("CXX") or "g++").split()
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "driver.cpp", "-o", "libcuda.so.1"], cwd=tmp_path, check=True
    )
    includes = [f"-I{path}" for path in (ROOT / "csrc_stubs", *include_paths())]
    libraries = [f"-L{torch_lib}", "-Wl,--allow-shlib-undefined", "-lc10", "-ltorch_cpu", "-ldl", "-pthread"]
    kept = cached_cxx.of(quick.script(compiler))
    subprocess.run(
        [kept, "-std=c++20", *includes, "-c", "main.cpp", "-o", "main.o"], cwd=tmp_path, check=True
    )
    subprocess.run([*compiler, "main.o", "-o", "main", *libraries], cwd=tmp_path, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}:{torch_lib}"}
    said = subprocess.run(
        [tmp_path / "main"], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert said.splitlines() == [
        "ask! ask clear clear! clear launch! launch cooperative! cooperative overlapped! overlapped "
        "raise launch cuMemsetD8Async failed for kernel memset: CUDA_ERROR_INVALID_VALUE (invalid argument)"
    ]
