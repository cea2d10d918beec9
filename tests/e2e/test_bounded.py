"""Over days of ever-new dtypes, ranks and layouts, what a process keeps is bounded and results are right."""

import random
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fuse, run_python
from tsfuser import _C
from tsfuser.ir import size as sz
from tsfuser.planning import compile as pipeline


def program(x, y):
    return (x + y).sigmoid() * x


@pytest.fixture
def small(monkeypatch):
    """Room for so little that it is soon full."""
    tsfuser.reset()
    before = _C.set_plan_limits(1000, 4)
    monkeypatch.setattr(pipeline._functions, "most", 2)
    monkeypatch.setattr(sz, "_recent", type(sz._recent)(maxlen=16))
    pipeline._functions.clear()
    yield
    _C.set_plan_limits(*before)
    tsfuser.reset()


@pytest.fixture
def unguarded():
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    yield
    torch._C._jit_set_nvfuser_guard_mode(before)


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def check(scripted, device, seed, calls):
    """Two classes at a time, of 18."""
    rng = random.Random(seed)
    for k in range(calls):
        phase = k // 40 + seed
        sizes, dtype = [2, 3, 4][: 1 + phase // 3 % 3], DTYPES[phase % 3]
        x, y = (torch.randn(sizes, device=device).to(dtype) for _ in range(2))
        y = y[:1] if rng.random() < 0.5 else y
        assert_matches(scripted(x, y), program(x, y), ops=4, strides=False)


def test_results_stay_right_while_plans_and_kernels_come_and_go(device, small, unguarded):
    x = torch.randn(4, 4, device=device)
    scripted = fuse(program, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tsfuser.TsfuserWarning)
        check(scripted, device, 0, 600)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: check(scripted, device, seed, 400), range(4)))
    assert tsfuser.stats()["plans_built"] > 20
    assert len(pipeline._functions) <= 2


SOURCE = """
import gc, random, sys, warnings, weakref
import torch, tsfuser
from tsfuser import _C
from tsfuser.ir import size as sz
from tsfuser.planning import compile as pipeline
from tsfuser.target.host import HostTarget

warnings.simplefilter("ignore")
target = pipeline._target("cpu", "block")
load = target.load
NOTHING = 'extern "C" void nothing(const void*, long, long, long, long, long, long) {}'
stored = target.compile(NOTHING, "nothing")
target.find = lambda *kernel: stored  # one kernel for all: compilers take their time
target.load = lambda stored, name, device="cpu": load(stored, "nothing")
_C.set_plan_limits(256, 64)
pipeline._functions.most = 64
sz._recent = type(sz._recent)(maxlen=256)

def program(x, y):
    return (x + y).sigmoid() * x

scripted = torch.jit.script(program)
tsfuser.enable()
x = torch.randn(4, 5)
for _ in range(3):
    scripted(x, x)
torch._C._jit_set_nvfuser_guard_mode(GUARD)
rng = random.Random(0)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

def operand(sizes):
    order = list(range(len(sizes)))
    rng.shuffle(order)
    base = torch.zeros([sizes[d] for d in order], dtype=rng.choice(DTYPES))
    return base.permute([order.index(d) for d in range(len(sizes))])

def drive(calls):
    for _ in range(calls):
        sizes = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randrange(1, 7))]
        scripted(operand(sizes), operand([rng.choice([s, 1]) for s in sizes]))
    gc.collect()
    plans = sum(len(_C.group_plans(g)) for g in range(tsfuser.stats()["groups"]))
    memory = int(open("/proc/self/statm").read().split()[1]) * 4096
    kept = plans, len(sz._interned), len(pipeline._functions), sys.getallocatedblocks(), memory
    return tsfuser.stats()["plans_built"], *kept

first, last = drive(2000), drive(2500)
print(first, last, file=sys.stderr)
assert last[0] - first[0] > 400, "few plans were made"
assert last[1] <= 256, "plans"
assert last[2] < 4000, "sizes"
assert last[3] <= 64, "kernels"
assert tsfuser.stats()["groups"] <= 16, "groups"
assert last[4] - first[4] < 4000, "Python objects"
assert last[5] - first[5] < 2 << 20, "memory"
"""


@pytest.mark.parametrize("guard", [False, True])
def test_ever_new_dtypes_ranks_and_layouts_leave_nothing_behind(tmp_path, guard):
    status, _, err = run_python(tmp_path, SOURCE.replace("GUARD", str(guard)))
    assert status == 0, err


def test_a_size_lives_as_long_as_somebody_holds_it(monkeypatch):
    monkeypatch.setattr(sz, "_recent", type(sz._recent)(maxlen=0))
    a = sz.leaf(123456, "a") * 7 + 8
    assert a is sz.leaf(123456, "a") * 7 + 8
    held = weakref.ref(a)
    del a
    assert held() is None


def test_a_value_is_that_of_its_size_also_where_sizes_come_and_go(monkeypatch):
    """A size that is dropped makes room in memory for another one, which is not it."""
    from tsfuser.ir.call import Call, ScalarArg

    monkeypatch.setattr(sz, "_recent", type(sz._recent)(maxlen=0))
    call = Call((ScalarArg("int", 5),))
    for k in range(2, 2000):
        assert call.value(call.item(0) * k) == 5 * k
