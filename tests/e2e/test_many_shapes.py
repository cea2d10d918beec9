"""Memory and caches after many shapes: what a process keeps does not grow with them."""

import pytest

from kit.support import run_python

SOURCE = """
import ctypes, gc, sys
import torch, tsfuser
from tsfuser import _C

def program(x, y):
    z = torch.nn.functional.gelu(x + y)
    return torch.softmax(z, -1) * 2.0, z.sum(0)

def scripted():
    tsfuser.enable()
    return torch.jit.script(program)

def compiled():
    return torch.compile(program, backend="tsfuser", dynamic=True)

def training():
    inner = compiled()
    def step(x, y):
        x.requires_grad_()
        out = inner(x, y)
        out[0].sum().backward()
        return out
    return step

function = MAKE()

def drive(numbers):
    # each number is a shape of its own, in no order
    for k in numbers:
        at = k * 7919 % (199 * 199)
        shape = at // 199 + 1, at % 199 + 1
        x, y = torch.rand(shape), torch.rand(shape[1])
        for _ in range(5 if k < 2 else 1):
            out = function(x, y)
        if k % 100 == 0:
            torch.testing.assert_close(out[0], program(x, y)[0])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what malloc keeps free counts, too
    stats = tsfuser.stats()
    plans = sum(len(_C.group_plans(g)) for g in range(stats["groups"]))
    memory = int(open("/proc/self/statm").read().split()[1]) * 4096
    kernels = stats["kernels_compiled"] + stats["disk_hits"]
    return memory, sys.getallocatedblocks(), plans, stats["groups"], kernels

first, last = drive(range(FIRST)), drive(range(FIRST, LAST))
print(first, last, file=sys.stderr)
assert tsfuser.stats()["launches"] > LAST // 2, "few calls were fused"
assert not tsfuser.stats()["fallbacks"], tsfuser.stats()["fallbacks"]
assert last[0] - first[0] < 4 << 20, "memory"
assert last[1] - first[1] < 1000, "Python objects"
assert last[2] - first[2] <= MORE, "plans"
assert last[3] == first[3], "groups"
assert last[4] - first[4] <= MORE, "kernels"
"""


@pytest.mark.parametrize("make", ["scripted", "compiled", "training"])
@pytest.mark.parametrize(
    "first, last", [(700, 1700), pytest.param(3000, 20000, marks=pytest.mark.long)], ids=["1700", "20000"]
)
def test_memory_does_not_grow_with_shapes(tmp_path, make, first, last):
    """All classes of sizes have been met by the first count, but for a rare one."""
    words = {"MAKE": make, "FIRST": str(first), "LAST": str(last), "MORE": "2"}
    source = SOURCE
    for word, value in words.items():
        source = source.replace(word, value)
    status, _, err = run_python(tmp_path, source)
    assert status == 0, err
    print(err)
