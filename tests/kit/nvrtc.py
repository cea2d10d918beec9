"""NVRTC compiles the kernels that fibers run, which are those that a GPU would get.

In: the source of a kernel. Out: nothing, or `CompileError`. One source in six is compiled, once on this
disk, for one of two architectures; its text says whether and for which, so that each architecture gets as
many. With --long each source is compiled for all architectures. For one in eight of them, with --long for
each, NVRTC and ptxas make machine code, which takes three quarters of the time and looks at nothing but the
inline assembly of the runtime headers. Of the others NVRTC reads the C++. The headers are read once a process
and architecture (`--pch`). NVRTC optimises as little as it can: the tests ask whether it takes a kernel, not
how fast that is. Example:

    check(compiler(), source, "fused_add", every=False)
"""

import functools
import os
import zlib

from tsfuser.errors import CompileError, Refusal
from tsfuser.target import cuda
from tsfuser.target.cuda import CudaTarget, installation, supported_archs
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.function import RUNTIME, headers_digest

#: Compute capabilities for which NVRTC compiles kernels of the tests: all of them with --long. Those of every
#: run take both sides of each condition on `__CUDA_ARCH__` in the runtime headers.
ARCHITECTURES = (75, 80, 90, 100, 120)
ARCHITECTURES_OF_EVERY_RUN = (75, 90)
#: Those of a CudaTarget, to read alone.
_OPTIONS = ("-std=c++17", "-default-device", "-minimal", "--fdevice-syntax-only", f"-I{RUNTIME}")
#: What NVRTC has taken: texts of no content.
TAKEN = DiskCache(os.environ["TSFUSER_CACHE_DIR"] + "-nvrtc")


@functools.cache
def compiler():
    """A CudaTarget that compiles without a GPU, quickly; None where there is no NVRTC."""
    try:
        supported_archs()
    except Refusal:
        return None
    return CudaTarget(TAKEN, quick=True)


def taken(source, every):
    """Whether a kernel is compiled at all."""
    return every or zlib.crc32(source.encode()) // 16 % 6 == 0


def chosen(source, every):
    """The architectures for which a kernel is compiled."""
    if every:
        return ARCHITECTURES
    return (ARCHITECTURES_OF_EVERY_RUN[zlib.crc32(source.encode()) % 2],)


def assembled(source, every):
    """Whether a kernel is made into machine code."""
    return every or zlib.crc32(source.encode()) // 2 % 8 == 0


def check(target, source, name, every):
    """Has `target` compile a kernel for the chosen architectures; touches no counter. Raises
    `CompileError`."""
    whole = assembled(source, every)
    if not taken(source, every):
        return
    for architecture in chosen(source, every):
        key = ("taken by NVRTC", source, architecture, whole, headers_digest(), installation())
        if TAKEN.text(key) is None:
            (target.resources if whole else read)(source, name, architecture)
            TAKEN.put(key, ".txt", b"")


def read(source, name, architecture):
    """Has NVRTC read the C++ of a kernel; raises `CompileError`."""
    nvrtc = cuda._nvrtc()
    options = [f"--gpu-architecture=compute_{architecture}", *_OPTIONS]
    if nvrtc.getVersion() >= (12, 9):
        options += ["--pch", "--pch-messages=false"]
    program = nvrtc.createProgram(source, f"{name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program) or str(error)) from None
    finally:
        nvrtc.destroyProgram(program)
