"""Kernels that are compiled beside the program, which runs unfused until they are there."""

import contextlib
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit import other_fusers
from kit.support import assert_matches, run_python, script
from tsfuser import options
from tsfuser.errors import Refusal
from tsfuser.planning import background, compile, compilers, planner

pytestmark = [pytest.mark.usefixtures("forgotten"), pytest.mark.graphs]
REASON = "its kernels are being compiled in the background"


@pytest.fixture(autouse=True)
def store(tmp_path):
    """An empty disk cache: all kernels are compiled."""
    compile.cache_in.cache_clear()
    compile._target.cache_clear()  # they hold the cache
    with options.override(cache_dir=tmp_path / "cache"):
        yield
    tsfuser.wait()
    tsfuser.reset()
    compile._target.cache_clear()


@pytest.fixture
def held(monkeypatch):
    """A compiler that waits for `set()`."""
    go, run = threading.Event(), compilers._Job.run

    def wait_and_run(job):
        assert go.wait(60)
        run(job)

    monkeypatch.setattr(compilers._Job, "run", wait_and_run)
    yield go
    go.set()


def unfused():
    return tsfuser.stats()["fallbacks"].get(REASON, 0)


def first(x, y):
    return torch.softmax(x * y + 1, -1).sum(0)


def test_scripted_calls_wait_for_nothing(device, held):
    scripted = script("def f(x: Tensor, y: Tensor):\n    return torch.softmax(x * y + 1, -1).sum(0)\n")
    x, y = torch.randn(33, 17, device=device), torch.randn(17, device=device)
    with tsfuser.fuser(background=True), torch.no_grad():
        for _ in range(4):
            assert_matches(scripted(x, y), first(x, y), ops=50)
        assert unfused() > 0 and tsfuser.stats()["launches"] == 0
        assert not tsfuser.wait(timeout=0.01)
        held.set()
        assert tsfuser.wait(timeout=60)
        before = unfused()
        assert_matches(scripted(x, y), first(x, y), ops=50)
    assert unfused() == before and tsfuser.stats()["launches"] > 0
    assert set(tsfuser.stats()["fallbacks"]) == {REASON}


@contextlib.contextmanager
def enabled():
    with other_fusers.kept():
        tsfuser.enable(background=True)
        try:
            yield
        finally:
            tsfuser.enable(background=False)
            tsfuser.disable()
            options.state.background = options.state.enabled = None


@pytest.mark.parametrize("how", ["options", "fuser", "enable", "variable"])
def test_compiled_calls_wait_for_nothing(device, held, how):
    x, y = torch.randn(33, 17, device=device, requires_grad=True), torch.randn(17, device=device)
    choices = {"options": {"background": True}} if how == "options" else {}
    around = {
        "fuser": lambda: tsfuser.fuser(background=True),
        "variable": lambda: options.override(compile="background"),
        "enable": enabled,
    }.get(how, contextlib.nullcontext)
    with around():
        compiled = torch.compile(first, backend="tsfuser", **choices)
        (expected,) = torch.autograd.grad(first(x, y).square().sum(), x)
        for ready in (False, True):
            for _ in range(2):
                result = compiled(x, y)
                (grad,) = torch.autograd.grad(result.square().sum(), x)
                assert_matches(result.detach(), first(x, y).detach(), ops=50)
                assert_matches(grad, expected, ops=200)
            assert (tsfuser.stats()["launches"] > 0) == ready
            held.set()
            assert tsfuser.wait(60)
    assert set(tsfuser.stats()["fallbacks"]) == {REASON}


def test_other_programs_wait_as_always(device):
    x, y = torch.randn(33, 17, device=device), torch.randn(17, device=device)
    compiled = torch.compile(first, backend="tsfuser")
    assert_matches(compiled(x, y), first(x, y), ops=50)
    assert unfused() == 0 and tsfuser.stats()["launches"] > 0


def test_each_class_has_a_plan_of_its_own(device, held):
    """Calls of classes that are not told apart yet wait for the first one's plan."""
    compiled = torch.compile(first, backend="tsfuser", dynamic=True, options={"background": True})
    inputs = [
        (torch.randn(n, m, device=device), torch.randn(m, device=device))
        for n, m in ((5, 8), (6, 7), (7, 1024))
    ]
    held.set()
    for _ in range(6):
        for x, y in inputs:
            assert_matches(compiled(x, y), first(x, y), ops=1 << 11)
        assert tsfuser.wait(60)
    before, launches = unfused(), tsfuser.stats()["launches"]
    for x, y in inputs:
        assert_matches(compiled(x, y), first(x, y), ops=1 << 11)
    assert unfused() == before and tsfuser.stats()["launches"] > launches


def test_plans_that_nobody_takes_are_dropped(monkeypatch):
    """Of calls that were expected, and have not come."""
    workers, made = background._Workers(), []
    monkeypatch.setattr(background._Job, "may_serve", lambda job, call: False)
    monkeypatch.setattr(background._Job, "run", lambda job: job._planned.set())
    for _ in range(3 * background._MOST):
        job = workers.job_for(0, background.Call(()), lambda: None)
        assert job is not None and job.wait(60)
        made.append(job)
    assert workers.jobs[0] == made[-background._MOST :]


def test_random_numbers_are_drawn_in_order(held):
    def noisy(x):
        return F.dropout(x * 2, 0.5) + torch.rand_like(x)

    compiled = torch.compile(noisy, backend="tsfuser", options={"background": True})
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    a, b = compiled(x), compiled(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), a) and torch.equal(compiled(x), b) and not torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:a fusion group")
@pytest.mark.parametrize("error", [Refusal("no reason"), RuntimeError("a mistake")])
def test_what_fails_runs_unfused_for_ever(monkeypatch, error):
    def fails(*given):
        raise error

    monkeypatch.setattr(planner, "lower_fusion", fails)
    x, y = torch.randn(33, 17), torch.randn(17)
    compiled = torch.compile(first, backend="tsfuser", options={"background": True})
    for _ in range(3):
        assert_matches(compiled(x, y), first(x, y), ops=50)
        assert tsfuser.wait(60)
    found = tsfuser.stats()["fallbacks"]
    assert any(str(error) in reason for reason in found) and tsfuser.stats()["launches"] == 0


def test_threads_share_the_plan(device, held):
    x, y = torch.randn(33, 17, device=device), torch.randn(17, device=device)
    compiled = torch.compile(first, backend="tsfuser", options={"background": True})
    compiled(x, y)
    mistakes, stop = [], threading.Event()

    def call():
        while not stop.is_set():
            try:
                assert_matches(compiled(x, y), first(x, y), ops=50)
            except Exception as error:
                mistakes.append(error)
                return

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    held.set()
    assert tsfuser.wait(60)
    end = time.monotonic() + 20
    while tsfuser.stats()["launches"] < 20 and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert mistakes == [] and tsfuser.stats()["launches"] >= 20
    assert tsfuser.stats()["plans_built"] <= 3


def test_who_looks_at_kernels_waits(device):
    x, y = torch.randn(33, 17, device=device), torch.randn(17, device=device)
    compiled = torch.compile(first, backend="tsfuser", options={"background": True})
    report = tsfuser.explain(compiled, x, y)
    assert len(report.kernels) > 0 and unfused() == 0
    tsfuser.check(compiled, x, y)


PROGRAM = """
import os, signal, sys, threading, time
import torch, tsfuser
from tsfuser.planning import compilers
run = compilers._Job.run
started = threading.Event()
def slow(job):
    started.set()
    time.sleep({seconds})
    run(job)
compilers._Job.run = slow
function = lambda x: torch.softmax(x * 2, -1).sum(0)
f = torch.compile(function, backend="tsfuser", options={{"background": True}})
torch.set_num_threads(1)  # libgomp hangs in a child of a process that has run several
x = torch.randn(30, 20)
f(x)
started.wait(30)
{what}
"""


@pytest.mark.parametrize(
    "what, seconds, expected",
    [
        ("print('ends')", 0.5, "ends"),
        ("sys.exit(0)", 0.5, ""),
        ("tsfuser.wait(); f(x); print(tsfuser.stats()['launches'] > 0)", 0.1, "True"),
        (
            "pid = os.fork()\nif pid == 0:\n    f(x); tsfuser.wait(); f(x)\n"
            "    print(tsfuser.stats()['launches'] > 0, flush=True); os._exit(0)\n"
            "os.waitpid(pid, 0)",
            0.3,
            "True",
        ),
        (
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs of shells ignore it
            "press = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
            "try:\n    threading.Timer(0.3, press).start(); tsfuser.wait()\n"
            "except KeyboardInterrupt:\n    print('interrupted')",
            8,  # more than a busy machine takes to press
            "interrupted",
        ),
    ],
)
def test_processes_end_as_always(tmp_path, what, seconds, expected):
    status, out, errors = run_python(tmp_path, PROGRAM.format(what=what, seconds=seconds), timeout=60)
    assert status == 0 and out.strip() == expected, errors
