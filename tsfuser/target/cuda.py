"""CUDA tensors: CuPy's NVRTC compiles a kernel to a cubin. The only file that imports CuPy.

In: kernel source. Out: the cubin, kept in the disk cache, then its function on a device. Compiling needs
neither GPU nor driver. Example:

    target = CudaTarget(DiskCache(options.cache_dir()))
    stored = target.compile_for(source, "fused_add", arch=90)
    function = target.load(stored, "fused_add", "cuda:0")
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import log
from ..codegen.emit import WITHOUT_CONTRACTION
from ..errors import CompileError, Refusal
from ..schedule.machine import Machine
from . import driver
from .disk_cache import DiskCache, Stored, remember, remembered
from .function import RUNTIME, Function, headers_digest, source_digest
from .job import Stop

#: The most kernels that a process loads: nobody knows which CUDA graphs hold one, so none is ever unloaded.
_MOST = 16384

_INSTALL = "pip install tsfuser[cuda12] or tsfuser[cuda13], the one that fits torch.version.cuda"


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers a thread, bytes of local memory, spilled bytes, bytes of
    static shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


class CudaTarget:
    """Compiles for one device of this machine, or for any architecture by `compile_for`. `fma`: contract
    `a * b + c`; `max_registers`: bound on the registers of a thread; `opt_level`:
    of ptxas, 0 to 4; `quick`, for tests: optimise little, in half the time, where NVRTC is 12.9 or later."""

    name = "cuda"

    def __init__(
        self,
        cache: DiskCache,
        fma: bool = True,
        max_registers: int | None = None,
        opt_level: int | None = None,
        quick: bool = False,
    ):
        self.cache = cache
        self._options: tuple[str, ...] = (
            "-std=c++17",
            "-default-device",
            "-minimal",
            f"--fmad={str(fma).lower()}",
        )
        if max_registers is not None:
            self._options += (f"--maxrregcount={max_registers}",)
        if opt_level is not None:
            self._options += (f"--ptxas-options=-O{opt_level}",)
        if quick and _nvrtc().getVersion() >= (12, 9):
            self._options += ("--Ofast-compile=max",)
        self._functions: dict[tuple[Path, str, int], Function] = {}
        self._start = threading.Lock()  # held from the first `start` on

    def compile(self, source: str, name: str, device: str = "cuda:0", stop: Stop | None = None) -> Stored:
        """The binary of kernel `name` for `device`. Raises `Refusal` without CuPy, NVRTC or a driver,
        `CompileError` where NVRTC does not take the source, `job.Stopped`: NVRTC itself cannot be stopped."""
        if stop is not None:
            stop.check()
        return self.compile_for(source, name, driver.capability(_index(device)))

    def compile_for(self, source: str, name: str, arch: int) -> Stored:
        """The same for compute capability `arch` (90 for 9.0): a cubin, or PTX where this NVRTC is older
        than the device."""
        found = installation()
        key = (source_digest(source), *self._identity(arch, found))
        stored = self.cache.get(key, ".cubin", lambda output: self._run(source, name, arch, output))
        remember(self.cache, self.name, found)
        return stored

    def find(self, source: str, name: str, device: str = "cuda:0") -> Stored | None:
        """The binary of a kernel if it is on disk. Needs no CuPy: without it, what the last one made is as
        good."""
        return self.find_made_of(source_digest(source), device)

    def find_made_of(self, digest: str, device: str = "cuda:0") -> Stored | None:
        """The same of a source with this digest."""
        made_by = self.identity(device)
        return self.cache.find((digest, *made_by), ".cubin") if made_by else None

    def identity(self, device: str = "cuda:0") -> tuple | None:
        """What its kernels for `device` depend on besides their sources; None where there is no CuPy, and was
        none. Raises `Refusal` without a driver."""
        found = remembered(self.cache, self.name, installation)
        return self._identity(driver.capability(_index(device)), found) if found else None

    def _identity(self, arch: int, found: str) -> tuple:
        return self.name, headers_digest(), self._options, arch, found

    def load(self, stored: Stored, name: str, device: str) -> Function:
        """Kernel `name` of a binary on `device`. Raises `CompileError` where the driver does not take it (and
        drops the file), `Refusal` where the process has loaded too many."""
        key = (stored.path, name, _index(device))
        if key not in self._functions:
            if len(self._functions) >= _MOST:
                raise Refusal(f"this process has loaded {_MOST} CUDA kernels, and loads no more")
            try:
                self._functions[key] = driver.load(stored.content, name, key[2])
            except driver.DriverError as error:
                self.cache.drop(stored)
                raise CompileError(f"cannot load kernel {name} on {device}: {error}") from error
        return self._functions[key]

    def resources(self, source: str, name: str, arch: int) -> Resources:
        """Registers, spills and shared memory of kernel `name` on `arch`; compiles it anew."""
        _, log = _compile(source, name, arch, (*self._options, "--ptxas-options=-v"))
        return _resources(log)

    def cubin(self, source: str, name: str, device: str = "cuda:0") -> bytes:
        """The machine code of kernel `name` for `device`, or its PTX where this NVRTC is older than that;
        compiles it anew."""
        return _compile(source, name, driver.capability(_index(device)), self._options)[0]

    def ptx(self, source: str, name: str, device: str = "cuda:0") -> bytes:
        """The PTX of kernel `name` for `device`; compiles it anew."""
        return self.ptx_for(source, name, driver.capability(_index(device)))

    def ptx_for(self, source: str, name: str, arch: int) -> bytes:
        """The same for compute capability `arch`, without a device."""
        return _compile(source, name, arch, self._options, virtual=True)[0]

    @staticmethod
    def machine(device: str = "cuda:0") -> Machine:
        """What schedulers know of `device`. Raises `Refusal` without a driver."""
        return driver.machine(_index(device))

    def start(self) -> None:
        """Has a thread start NVRTC, so that the first kernel does not wait for that; once, and not where the
        disk cache has been used by such an installation: then the kernels are likely there, and NVRTC is not
        needed. Returns at once. What is wrong shows when a kernel is compiled."""
        if not self._start.acquire(blocking=False):
            return
        # Not a daemon: a thread that Python stops in the midst of C++ can take the process down at its exit.
        thread = threading.Thread(target=self._prepare, name="tsfuser starts NVRTC", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is on its way out
            return

        def ended() -> None:
            if thread is not threading.current_thread():
                thread.join(5)

        os.register_at_fork(before=ended)  # else the child would have import locks that nobody holds

    def _prepare(self) -> None:
        try:
            key = (self.name, headers_digest(), self._options, installation())
            if "cupy" not in sys.modules and self.cache.first_time(key):
                with _loading:
                    _start_nvrtc()
        except Exception as error:  # without CuPy, say; a package may raise anything while imported
            log.write("kernel_cache", "NVRTC was not started ahead", error, log.UPDATE)

    def _run(self, source: str, name: str, arch: int, output: Path) -> None:
        try:
            binary, _ = _compile(source, name, arch, self._options)
        except CompileError as error:
            kept = self.cache.keep(f"failed-{name}.cu", source)
            raise CompileError(f"NVRTC failed on kernel {name} (source: {kept}):\n{error}") from None
        output.write_bytes(binary)


def _index(device: str) -> int:
    """`cuda:1` -> 1."""
    return int(device.partition(":")[2] or 0)


@functools.cache
def installation() -> str:
    """What tells one installed CuPy and NVRTC from another without importing them (0.1 s): where they are,
    their size and date. Raises `Refusal` where there is no CuPy."""
    try:
        cupy = importlib.util.find_spec("cupy")
        wheels = importlib.util.find_spec("nvidia")
    except ValueError:  # a None in sys.modules, put there to hide a package
        cupy = wheels = None
    if cupy is None or cupy.origin is None:
        raise Refusal(f"CUDA tensors need CuPy: {_INSTALL}")
    folders = list(wheels.submodule_search_locations or ()) if wheels else []
    libraries = [p for folder in folders for p in sorted(Path(folder).glob("*/lib/libnvrtc.so*"))]
    toolkit = Path(os.environ.get("CUDA_PATH") or "/usr/local/cuda") / "lib64" / "libnvrtc.so"
    places = [Path(cupy.origin), *libraries, Path(sys.prefix) / "lib" / "libnvrtc.so", toolkit]
    found = [(os.path.realpath(p), p.stat()) for p in places if p.exists()]
    return repr([(path, status.st_size, status.st_mtime_ns) for path, status in found])


#: NVRTC is loaded in steps, and a thread that compiles between them does not find NVRTC's other library.
_loading = threading.Lock()


def _start_nvrtc() -> None:
    """Loads NVRTC as CuPy is going to, and has it compile nothing: 150 of the 240 ms that the first kernel
    waits otherwise. CuPy itself is not imported: had the program's own thread just begun with a submodule of
    CuPy, it would get half a package."""
    from cuda.pathfinder import load_nvidia_dynamic_lib  # a dependency of CuPy

    nvrtc = ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), b"", b"nothing.cu", 0, None, None)
    nvrtc.nvrtcCompileProgram(program, 0, None)  # without the GIL
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc():
    """CuPy's bindings of NVRTC, with the library loaded; raises `Refusal` where one of them is not
    there."""
    with _loading:
        try:
            from cupy.cuda import nvrtc
        except ImportError as error:
            raise Refusal(f"CUDA tensors need CuPy ({error}): {_INSTALL}") from None
        try:
            nvrtc.getVersion()
        except Exception as error:  # CuPy raises what the loader raised: RuntimeError, OSError, its own
            raise Refusal(f"CuPy does not find the NVRTC library ({error}): {_INSTALL}") from None
        return nvrtc


def nvrtc_version() -> str:
    """As "12.9". Raises `Refusal`."""
    return ".".join(map(str, _nvrtc().getVersion()))


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Compute capabilities that this NVRTC compiles for, ascending."""
    return tuple(sorted(_nvrtc().getSupportedArchs()))


def raw_kernel(source: str, name: str, shared: int, fma: bool, max_registers: int | None) -> Any:
    """A `cupy.RawKernel` of a source without includes, with `shared` bytes of dynamic shared memory.
    CuPy flushes denormal numbers to 0, which our own kernels do not. Raises `Refusal` without CuPy."""
    _nvrtc()
    import cupy

    options: tuple[str, ...] = ("-std=c++17", f"--fmad={str(fma).lower()}")
    if max_registers is not None:
        options += (f"--maxrregcount={max_registers}",)
    kernel = cupy.RawKernel(source, name, options)
    if shared > 48 * 1024:  # more than a block gets without being asked for
        kernel.max_dynamic_shared_size_bytes = shared
    return kernel


def _compile(
    source: str, name: str, arch: int, options: tuple[str, ...], virtual: bool = False
) -> tuple[bytes, str]:
    """A cubin for `arch`, or PTX where `virtual`, or where NVRTC does not know it yet, and NVRTC's log;
    raises `CompileError` with the log."""
    nvrtc = _nvrtc()
    known = supported_archs()
    if arch < known[0]:
        oldest, own = known[0] / 10, arch / 10
        raise Refusal(f"NVRTC {nvrtc_version()} starts at compute capability {oldest}, the device has {own}")
    virtual = virtual or arch not in known
    target = f"compute_{max(a for a in known if a <= arch)}" if virtual else f"sm_{arch}"
    if source.startswith(WITHOUT_CONTRACTION):
        options = tuple("--fmad=false" if option == "--fmad=true" else option for option in options)
    program = nvrtc.createProgram(source, f"{name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"--gpu-architecture={target}", *options, f"-I{RUNTIME}"])
        # CuPy strips the last byte, as if both were texts with a NUL at the end; a cubin without it is an
        # invalid ELF file.
        binary = nvrtc.getPTX(program) if virtual else nvrtc.getCUBIN(program) + b"\0"
        return binary.encode() if isinstance(binary, str) else binary, nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program) or str(error)) from None
    finally:
        nvrtc.destroyProgram(program)


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(rf"(\d+) {pattern}", log)
        return int(found.group(1)) if found else 0

    labels = ("registers", "bytes stack", "bytes spill stores", "bytes spill loads", "bytes smem")
    return Resources(*map(number, labels))
