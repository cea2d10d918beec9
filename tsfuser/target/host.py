"""CPU tensors: the system's C++ compiler builds a kernel into a shared library.

In: kernel source. Out: the library, kept in the disk cache, then the address of its function
`void NAME(const void* args, int64_t grid, int64_t block_x, int64_t block_y, int64_t shared, int64_t begin,
int64_t end)`. Example:

    target = HostTarget(DiskCache(options.cache_dir()))
    function = target.load(target.compile(source, "fused_add"), "fused_add", "cpu")
"""

from __future__ import annotations

import functools
import platform
import sys
from pathlib import Path
from weakref import WeakValueDictionary

from ..errors import CompileError
from . import cxx, shared_library
from .cxx import find_compiler
from .disk_cache import DiskCache, Stored, remember, remembered
from .function import RUNTIME, Function, headers_digest, source_digest
from .job import Stop

#: Numbers come out as eager's do: no fused multiply-add where the program has two ops. Neither errno nor
#: floating-point traps are read by anyone; without them sqrt is an instruction and comparisons vectorise.
#: NaN, infinities and the sign of zero keep their meaning, which rules out -ffast-math.
_NUMERICS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

#: Named one by one, without start files and the C++ library, linking takes 15 ms instead of 45.
_LIBRARIES = ("-lm", "-lc") if sys.platform == "linux" else ("-lm",)

#: g++ moves a function call into the one branch that needs its result, and then cannot vectorise the loop.
_GCC = ("-fno-tree-sink",)

_NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",), "arm64": ("-mcpu=native",)}


#: Flags for fibers that check themselves: for races between the threads of a kernel
#: (codegen/runtime/fiber_races.h), or for accesses outside of all tensors and shared memory.
#: For that the process must have been started with g++'s libasan.so preloaded. Stacks are left out, since a
#: fiber leaves its own by longjmp.
CHECKS = {
    "": (),
    "races": ("-DTSFUSER_RACES", "-fsanitize=thread"),
    "memory": ("-fsanitize=address", "--param", "asan-stack=0", "--param", "asan-globals=0"),
}


class HostTarget:
    """Compiles for this machine's CPU. `fibers`: the launch shape of the GPU, for tests, with one of CHECKS.
    `opt_level` is the digit after -O, `seconds` what a kernel may take, `libraries` what kernels are linked
    to."""

    libraries: tuple[str, ...] = _LIBRARIES

    def __init__(
        self,
        cache: DiskCache,
        opt_level: int = 3,
        fibers: bool = False,
        seconds: float = 120,
        check: str = "",
    ):
        self.cache = cache
        self.name = "fibers" if fibers else "host"
        # Fortified, longjmp refuses to go to another stack.
        mode = ("-DTSFUSER_FIBERS", "-U_FORTIFY_SOURCE") if fibers else ("-DTSFUSER_HOST",)
        self._mode = (*mode, *CHECKS[check])
        self._is_whole = check != "memory"  # its functions are in a library of the process
        self._opt_level = opt_level
        self._seconds = seconds
        self._libraries: WeakValueDictionary[Path, shared_library.Library] = WeakValueDictionary()

    def flags(self) -> tuple[str, ...]:
        """Options of the compiler, the include path left out."""
        chosen = (*self._mode, f"-O{self._opt_level}", *_NATIVE.get(platform.machine(), ()))
        whole = ("-Wl,--no-undefined",) if self._is_whole else ()
        # without vector functions that the kernel does not call (codegen/runtime/host_simd.h), and without
        # the C++ library: some compilers ask for its part in exceptions, though kernels throw none
        linux = (*whole, "-Wl,--gc-sections", "-nostdlib") if sys.platform == "linux" else ()
        return (
            *chosen,
            "-std=c++17",
            "-fno-exceptions",
            "-w",
            "-pipe",
            *_NUMERICS,
            "-shared",
            "-fPIC",
            *linux,
        )

    def _include(self) -> tuple[str, ...]:
        """Where the runtime headers are; tests have them precompiled, too."""
        return "-iquote", str(RUNTIME)

    def find(self, source: str, name: str, device: str = "cpu") -> Stored | None:
        """The shared library of a kernel if it is on disk. Needs no compiler: where there is none, what the
        last one has made is as good."""
        return self.find_made_of(source_digest(source), device)

    def find_made_of(self, digest: str, device: str = "cpu") -> Stored | None:
        """The same of a source with this digest."""
        made_by = self.identity(device)
        return self.cache.find((digest, *made_by), ".so") if made_by else None

    def identity(self, device: str = "cpu") -> tuple | None:
        """What its kernels depend on besides their sources; None where there is no compiler, and was none."""
        compiler = remembered(self.cache, self.name, lambda: cxx.identity(find_compiler()))
        return self._identity(compiler) if compiler else None

    def compile(self, source: str, name: str, device: str = "cpu", stop: Stop | None = None) -> Stored:
        """The same, made if it is not there. Raises `Refusal` where there is no compiler, `CompileError`
        where it fails, `job.Stopped`."""
        compiler = find_compiler()
        identity = cxx.identity(compiler)
        key = (source_digest(source), *self._identity(identity))
        stored = self.cache.get(key, ".so", lambda output: self._run(compiler, source, name, output, stop))
        remember(self.cache, self.name, identity)
        return stored

    def load(self, stored: Stored, name: str, device: str = "cpu") -> Function:
        """The function `name` of a library, which is unloaded when nobody holds one of its functions any
        more. Raises `CompileError` where it cannot be loaded (and drops the file)."""
        library = self._libraries.get(stored.path)
        try:
            library = library or shared_library.load(stored.content, name)
            handle = shared_library.address(library, name)
        except OSError as error:
            self.cache.drop(stored)
            raise CompileError(f"cannot load kernel {name}: {error}. {cxx.advice()}") from error
        self._libraries[stored.path] = library
        return Function(handle, library)

    def _identity(self, compiler: str) -> tuple:
        return self.name, headers_digest(), self.flags(), _GCC, compiler, cpu_identity()

    def _run(self, compiler: tuple, source: str, name: str, output: Path, stop: Stop | None) -> None:
        text = output.with_name(f"{name}.cpp")
        try:
            text.write_text(source)
        except OSError as error:
            raise CompileError(f"cannot write temporary files to {text.parent} ({error.strerror})") from None
        options = (*self.flags(), *self._include(), str(text), *self.libraries)
        try:
            cxx.run(compiler, options, _GCC, name, output, self._seconds, stop)
        except CompileError as error:
            kept = self.cache.keep(f"failed-{name}.cpp", source)
            raise CompileError(f"{error}\nThe source is {kept}") from None


@functools.cache
def cpu_identity() -> str:
    """What `-march=native` depends on: the model and features of the first CPU where the system tells
    them."""
    try:
        with open("/proc/cpuinfo") as info:
            first = info.read(1 << 14).split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))
