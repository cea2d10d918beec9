"""Ctrl-C at random moments of planning and compiling: KeyboardInterrupt reaches the caller each time, the
next call runs fused, no compiler is left. And compilers that hang or are slow, from the user's side."""

import json
import re

import pytest

import tsfuser
from kit import quick
from kit.support import run_python

TRIES = """
import faulthandler, importlib.util, json, os, random, signal, subprocess, sys, threading, time, warnings
import torch, tsfuser

faulthandler.enable()
warnings.simplefilter("error", tsfuser.TsfuserWarning)
signal.signal(signal.SIGINT, signal.default_int_handler)
random.seed({seed})
TEXT = '''
import torch
from torch import Tensor
def program(x: Tensor, y: Tensor):
    a = torch.softmax((x + y).sigmoid() * x, 1)
    b = (a - a.mean(1, keepdim=True)).relu()
    return b * 2.0 + NUMBER, torch.mm((a * NUMBER).tanh(), b.t()).exp()
'''

def function(number):  # kernels of its own: numbers are literals in them
    path = os.path.join(os.path.dirname(__file__), f"program{{number}}.py")
    with open(path, "w") as file:
        file.write(TEXT.replace("NUMBER", f"{{number}}.25"))
    spec = importlib.util.spec_from_file_location(f"program{{number}}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return torch.jit.script(module.program), module.program

def children():
    own = str(os.getpid())
    table = subprocess.run(["ps", "-e", "-o", "ppid=,stat=,comm="], capture_output=True, text=True).stdout
    rows = [row.split(None, 2) for row in table.splitlines()]
    return [name for parent, state, name in rows if parent == own and name != "ps"]

def call(scripted, moment):
    main = threading.get_ident()
    presser = threading.Timer(moment, lambda: signal.pthread_kill(main, signal.SIGINT))
    presser.start()
    end = time.monotonic() + moment
    try:
        while time.monotonic() < end + 30:
            step(scripted)
    except KeyboardInterrupt:
        return time.monotonic() - end
    finally:
        presser.join()

def step(function):
    # the results, and in training the gradient
    results = function(x, y)
    if not x.requires_grad:
        return results
    return *results, *torch.autograd.grad(results[0].sum() + results[1].sum(), x)

x = torch.randn(64, 128, device="{device}", requires_grad={training})
y = torch.randn(128, device="{device}")
found = dict(raised=0, fused=0, equal=0, left=[], slowest=0.0)
with tsfuser.fuser():
    span = 1.0
    for number in range({tries} + 1):
        scripted, plain = function(number)
        step(scripted)
        if number == 0:  # how long planning takes on this machine
            begin = time.monotonic()
            step(scripted), step(scripted), step(scripted)
            span = time.monotonic() - begin
            continue
        late = call(scripted, random.uniform(0, span))
        found["raised"] += late is not None
        found["slowest"] = max(found["slowest"], late or 0)
        found["left"] += children()
        step(scripted), step(scripted), step(scripted)
        before = tsfuser.stats()["launches"]
        results = step(scripted)
        found["fused"] += tsfuser.stats()["launches"] > before
        found["equal"] += all(torch.allclose(a, b, 1e-3, 1e-4) for a, b in zip(results, step(plain)))
found["fallbacks"] = tsfuser.stats()["fallbacks"]
if x.requires_grad:
    # On a GPU a thread of autograd drops the gradients that `grad` gave out a moment after it gave them out.
    # If Python ends in this moment the process aborts, with torch alone, too. `backward` gives none out, and
    # the thread does one after the other.
    (x * 2).sum().backward()
print(json.dumps(found))
"""


def interrupted(folder, target, training, tries, seed):
    device = "cuda" if target == "cuda" else "cpu"
    source = TRIES.format(tries=tries, seed=seed, device=device, training=training)
    mode = "fibers" if target == "cpu-fibers" else "block"
    environment = dict(TSFUSER_CACHE_DIR=str(folder / "cache"), TSFUSER_HOST_LAUNCH=mode)
    status, out, err = run_python(
        folder, source, timeout=900, whole_end=True, CXX=quick.compiler(), **environment
    )
    assert status == 0, out + err
    assert "Exception ignored" not in err, err
    found = json.loads(out.splitlines()[-1])
    found.pop("slowest")
    assert found == dict(raised=tries, fused=tries, equal=tries, left=[], fallbacks={})


@pytest.mark.graphs
@pytest.mark.parametrize("training", [False, True])
def test_every_interrupt_reaches_the_caller(tmp_path, target, training):
    """On a GPU the backward is planned in a thread of autograd, while the main thread waits for it."""
    interrupted(tmp_path, target, training, tries=2, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("training", [False, True])
def test_fifty_interrupts_reach_the_caller(tmp_path, target, training):
    interrupted(tmp_path, target, training, tries=50, seed=2)


PROGRAM = """
import signal, threading, time, torch, tsfuser
def press(number):
    signal.pthread_kill(threading.main_thread().ident, number)
def program(x, y):
    return (x + y).sigmoid() * x
x, y = torch.randn(16, 64), torch.randn(64)
scripted = torch.jit.script(program)
with tsfuser.fuser():
    scripted(x, y)
    {before}
    try:
        for _ in range(3):
            out = scripted(x, y)
    except {error}:
        print("caught")
torch.testing.assert_close(scripted(x, y), program(x, y))
print(dict(tsfuser.stats()))
"""


def compiler(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return dict(CXX=str(path), TSFUSER_CACHE_DIR=str(folder / "cache"))


def test_a_compiler_that_hangs_is_given_up(tmp_path):
    environment = compiler(tmp_path, "sleep 600")
    status, out, err = run_python(
        tmp_path,
        PROGRAM.format(before="", error="ZeroDivisionError"),
        TSFUSER_COMPILE_TIMEOUT="1",
        **environment,
    )
    assert status == 0, err
    assert "did not finish kernel" in err and "TSFUSER_COMPILE_TIMEOUT" in err and "'plans_built': 0" in out


@pytest.mark.parametrize(
    "before, error",
    [
        (
            "threading.Timer(1, press, (signal.SIGINT,)).start()",
            "KeyboardInterrupt",
        ),
        (
            "def late(*_): raise TimeoutError\n    signal.signal(signal.SIGALRM, late); signal.alarm(1)",
            "TimeoutError",
        ),
        (
            "def end(*_): raise SystemExit\n    signal.signal(signal.SIGTERM, end); "
            "threading.Timer(1, press, (signal.SIGTERM,)).start()",
            "SystemExit",
        ),
    ],
)
def test_signals_reach_the_caller_while_a_compiler_hangs(tmp_path, before, error):
    """Also those that the program has handlers for."""
    environment = compiler(tmp_path, f"echo $$ >> {tmp_path}/pids; exec sleep 600")
    program = PROGRAM.format(
        before=f"signal.signal(signal.SIGINT, signal.default_int_handler)\n    {before}", error=error
    )
    program = program.replace("torch.testing", "import os; os.environ['CXX'] = 'c++'\ntorch.testing")
    status, out, err = run_python(tmp_path, program, **environment)
    assert status == 0, err
    assert out.startswith("caught\n") and "'plans_built': 1" in out and "'fallbacks': {}" in out
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(OSError):
            open(f"/proc/{pid}/stat").close()


def test_a_long_wait_is_told(tmp_path):
    environment = compiler(tmp_path, 'sleep 1.5; exec c++ "$@"')
    program = PROGRAM.format(before="", error="ZeroDivisionError")
    status, out, err = run_python(tmp_path, program, TSFUSER_PROGRESS="1", **environment)
    assert status == 0, err
    told = re.escape(f"tsfuser: compiling 1 of 1 kernels, kept in {tmp_path / 'cache'}\ntsfuser: done after ")
    assert re.search(rf"{told}\d+ s$", err, re.M), err
    assert tsfuser.options.get("progress") is False  # else tests that read stderr would depend on the machine
