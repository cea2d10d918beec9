"""Compiles kernels written by hand in the form of generated ones and launches them on torch tensors.
Example:

    kernel = Kernel(source, "copy", "host")
    kernel(x, y, x.numel(), grid=4, block=(32, 1))  # tensors and int64 numbers in the order of Args
"""

import ctypes
import importlib.util
import os
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch

from kit import nvrtc
from kit.launches import FIBERS
from tsfuser.ir.dtypes import DTYPES
from tsfuser.planning import targets
from tsfuser.target.cuda import CudaTarget
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.host import HostTarget, find_compiler

CACHE = DiskCache(os.environ.get("TSFUSER_CACHE_DIR") or Path(tempfile.gettempdir()) / "tsfuser-tests")
TARGETS = {
    "host": HostTarget(CACHE),
    "scalar": HostTarget(CACHE, opt_level=0),  # no vector functions
    "fibers": targets.chosen("cpu", FIBERS).compiler(CACHE),
    "fibers_races": targets.chosen("cpu", "fibers_races").compiler(CACHE),
    "cuda": CudaTarget(CACHE),
}
HERE = ["host", "fibers"] + (["cuda"] if torch.cuda.is_available() else [])
ARCHS = [
    arch if arch in nvrtc.ARCHITECTURES_OF_EVERY_RUN else pytest.param(arch, marks=pytest.mark.long)
    for arch in nvrtc.ARCHITECTURES
]
HAS_CUPY = importlib.util.find_spec("cupy") is not None

_HOST_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_char_p, *[ctypes.c_int64] * 6)


def device(target):
    """The torch device on which the kernels of `target` run."""
    return "cuda" if target == "cuda" else "cpu"


class Kernel:
    """Kernel `name` of `source`, compiled and loaded for `target`."""

    def __init__(self, source, name, target):
        self.target = target
        compiler = TARGETS[target]
        self.function = compiler.load(compiler.compile(source, name), name, device(target))

    def __call__(self, *args, grid, block=(1, 1), shared=0, begin=0):
        """Runs blocks [begin, grid); on the one-thread-a-block host the block shape does not matter."""
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        packed = struct.pack(f"{len(values)}q", *values)
        if self.target == "cuda":
            assert begin == 0
            _launch(self.function.handle, packed, grid, block, shared)
        else:
            _HOST_LAUNCH(self.function.handle)(packed, grid, *block, shared, begin, grid)


def _launch(handle, packed, grid, block, shared):
    buffer = ctypes.create_string_buffer(packed, len(packed))
    size = ctypes.c_size_t(len(packed))
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()
    status = driver.cuLaunchKernel(ctypes.c_void_p(handle), grid, 1, 1, *block, 1, shared, None, None, extra)
    assert status == 0, f"cuLaunchKernel: error {status}"
    torch.cuda.synchronize()


def compiler():
    """The path of the C++ compiler."""
    return shutil.which(find_compiler()[0])


def compile_for(source, name, arch, quick=True):
    """Compiles for a GPU that need not be there, with few optimisations where `quick`; skips the test where
    CuPy is not installed."""
    if not HAS_CUPY:
        pytest.skip("CuPy is not installed")
    return (nvrtc.compiler() if quick else TARGETS["cuda"]).compile_for(source, name, arch)


def conversions(pairs):
    """A kernel for each pair of dtype names."""
    kernels = [
        f"""KERNEL({x}_to_{y}, Args, 1) {{
  const {DTYPES[x].ctype}* x = static_cast<const {DTYPES[x].ctype}*>(args.x);
  {DTYPES[y].ctype}* y = static_cast<{DTYPES[y].ctype}*>(args.y);
  for (int64_t i = 0; i < args.n; ++i) y[i] = convert<{DTYPES[y].ctype}>(x[i]);
}}"""
        for x, y in pairs
    ]
    head = '#include "tsfuser.h"\nstruct Args { const void* x; void* y; int64_t n; };'
    return "\n".join([head, *kernels])
