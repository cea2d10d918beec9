"""The kernels of a plan in one translation unit, for tests: g++ starts, and reads the runtime headers, once.

In: kernels that a QuickHost (quick.py) is asked for at the same time. Out: a library of each in the disk
cache, as if it had been compiled by itself; all hold all kernels. What does not compile so is compiled as
users have it, and what is wrong with it is said of the kernel. Example:

    joined.install()   # from now on, in this process
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from tsfuser.errors import CompileError, Refusal
from tsfuser.planning import compilers
from tsfuser.target.cxx import find_compiler
from tsfuser.target.host import HostTarget

_INCLUDE = '#include "tsfuser.h"\n'
_METHODS = HostTarget.compile, HostTarget._run
_by_itself = compilers._compile


def install():
    compilers._compile = _compile


def _compile(target, kernels, device, ahead):
    if not ahead and _can_be_joined(target, kernels):
        try:
            return _together(target, kernels)
        except (CompileError, Refusal, OSError):
            pass
    return _by_itself(target, kernels, device, ahead)


def _can_be_joined(target, kernels):
    """Tests that put something in the place of a method want it called."""
    methods = HostTarget.compile, HostTarget._run
    names = {name for _, name in kernels}
    return getattr(target, "joins", False) and methods == _METHODS and len(names) == len(kernels) > 1


def _together(target, kernels):
    sources = [source.replace(_INCLUDE, "") for source, _ in kernels]
    parts = [f"namespace part_{k} {{\n{source}\n}}\n" for k, source in enumerate(sources)]
    with TemporaryDirectory(prefix="tsfuser-joined-") as folder:
        made = Path(folder) / "joined.so"
        target._run(find_compiler(), _INCLUDE + "".join(parts), "joined", made, None)
        content = made.read_bytes()
    return {kernel: target.keep(kernel[0], content) for kernel in kernels}
