"""Kernels touch no memory but their tensors'. Inputs end where a page ends and the next page may not be
touched; outputs come from a heap that checks its blocks when they are freed. In processes of their own,
since a mistake kills them. (On a GPU: compute-sanitizer.)"""

import ctypes
import shlex

import pytest

from kit.support import run_python
from tsfuser.target.cxx import find_compiler

PROGRAM = """
import ctypes, mmap
import torch, tsfuser

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)

def at_the_end(shape, dtype):
    '''A random tensor whose last byte is the last one before a forbidden page.'''
    size = torch.Size(shape).numel() * dtype.itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if libc.mprotect(ctypes.c_void_p(start + pages * PAGE), PAGE, mmap.PROT_READ * 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    x = torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=pages * PAGE - size)
    kept.append(memory)
    return x.view(shape).copy_(torch.randn(shape))

def chain(x, y):
    return ((x + y) * 2.0).relu(), x * y

def transposed(x, y):
    return (x.t() + y) * 2.0

kept = []
tsfuser.enable()
for dtype in (torch.float32, torch.float16, torch.float64):
    for shape in ((1,), (3,), (516,), (1021,), (4104,), (7, 64), (3, 1000), (65, 33), (64, 100)):
        scripted = torch.jit.CompilationUnit('''
def f(x, y):
    return ((x + y) * 2.0).relu(), x * y
''').f
        for other in (shape, shape[-1:], (*shape[:-1], 1)):
            x, y = at_the_end(shape, dtype), at_the_end(other, dtype)
            for _ in range(3):
                out = scripted(x, y)
            assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(out, chain(x, y)))
            del out
        if len(shape) == 2:
            scripted = torch.jit.CompilationUnit('''
def f(x, y):
    return (x.t() + y) * 2.0
''').f
            x, y = at_the_end(shape, dtype), at_the_end(shape[::-1], dtype)
            for _ in range(3):
                out = scripted(x, y)
            assert torch.allclose(out, transposed(x, y), rtol=1e-2, atol=1e-2)
assert tsfuser.stats()["fallbacks"] == {} and tsfuser.stats()["launches"] > 150, tsfuser.stats()
"""


def checking_heap():
    """Variables that make glibc's heap check its blocks, where it can."""
    try:
        ctypes.CDLL("libc_malloc_debug.so.0")
    except OSError:
        return {}
    return {
        "LD_PRELOAD": "libc_malloc_debug.so.0",
        "MALLOC_CHECK_": "3",
        "GLIBC_TUNABLES": "glibc.malloc.check=3",
    }


@pytest.mark.parametrize("launch", ["block", "fibers"])
def test_no_byte_beyond_the_tensors_is_touched(tmp_path, launch):
    heap = checking_heap()
    unchecked = shlex.join(["env", *(f"--unset={name}" for name in heap), *find_compiler()])  # its own heap
    status, _, err = run_python(tmp_path, PROGRAM, TSFUSER_HOST_LAUNCH=launch, CXX=unchecked, **heap)
    assert status == 0, f"status {status}: {err[-2000:]}"
