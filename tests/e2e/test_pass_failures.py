"""No exception of a pass reaches a program: the graph runs as it was before the pass, with eager's results in
inference and training, one warning names the pass and a line of the program, and `stats()` counts it. Each
pass of each list is made to fail, at its end, when its work is half done for the list."""

import inspect
import warnings
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import assert_matches, fresh, run_python
from tsfuser import _C
from tsfuser.errors import PassFailed
from tsfuser.frontends.dynamo import compile as dynamo_door
from tsfuser.frontends.dynamo import program as dynamo_program
from tsfuser.frontends.dynamo.groups import passes as dynamo_groups
from tsfuser.frontends.dynamo.joint_graph import partition as dynamo_partition
from tsfuser.frontends.torchscript import passes
from tsfuser.frontends.torchscript.training import differentiable
from tsfuser.planning import failures

pytestmark = [pytest.mark.graphs, pytest.mark.passes_fail]


class Net(torch.nn.Module):
    """A branch on a flag, an op in place, a cast, views, a norm, a dropout that drops nothing, and parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x, twice: bool):
        y = torch.relu(self.linear(x)) * 2.0
        if twice:
            y = y + torch.sigmoid(y)
        y = y.type_as(x)
        y += 1.0
        a, b = torch.chunk(torch.dropout(self.norm(y), 0.0, True), 2, 1)
        return torch.cat([torch.tanh(a) * b, a], 1).t().mul(0.5)


def results(module, x):
    """The result of a call, and the gradients; and the result without gradients."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, True)
    (y * y).sum().backward()
    with torch.no_grad():
        return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters()), module(x, False)]


def assert_as_eager(module, x):
    net = Net().to(x.device)
    found = results(module, x), results(net, x), results(net.double(), x.double())
    for one, other, exact in zip(*found, strict=True):
        assert_matches(one, other, exact, ops=40)


def failing(run):
    """`run`, which raises when it has done its work; and how often it did."""
    fails = []

    def broken(*given, **named):
        run(*given, **named)
        fails.append(1)
        raise KeyError("a pass went wrong")

    return broken, fails


def all_calls(module, x, calls):
    """The warnings of some calls, the last of which is compared with eager."""
    failures.forget_warnings()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(calls - 1):
            results(module, x)
        assert_as_eager(module, x)
    return [str(w.message) for w in seen if issubclass(w.category, PassFailed)]


def assert_told(texts, name, before):
    """Each failure is warned of once, with the line, and counted."""
    assert texts and len(texts) == len(set(texts))
    assert all(name in text and "please report it" in text for text in texts)
    assert any(f"{__file__}:" in text for text in texts)
    counts = tsfuser.stats()["passes_failed"]
    assert sum(n for key, n in counts.items() if key.startswith(name)) > 0
    assert failures.total > before


def scripted(device):
    return torch.jit.script(Net()).to(device), torch.randn(6, 8, device=device)


#: Passes of C++ outside of the list of steps that prepare a graph.
IN_CPP = [
    "end_loops",
    "settled_copies",
    "eager_forms",
    "graph_pass",
    "differentiable_graph",
    "gradient_check",
    "step_lists",
]


@pytest.fixture
def asked():
    yield _C.fail_pass
    _C.fail_pass("")


@pytest.mark.parametrize("name", [*_C.preparing_steps(), *IN_CPP])
def test_a_pass_in_cpp_fails(device, asked, name):
    module, x = scripted(device)
    module._c._get_method("forward")._debug_flush_compilation_cache()
    tsfuser.reset()
    before = failures.total
    asked(name)
    with tsfuser.fuser():
        texts = all_calls(module, x, calls=5)
    if texts or name not in ("differentiable_graph", "gradient_check") or not by_joint_graphs():
        assert_told(texts, name, before)  # joint graphs leave nothing of the program to autodiff


def each_of(module, list_name):
    return [pytest.param(module, list_name, step.name, id=step.name) for step in getattr(module, list_name)]


@pytest.mark.parametrize(
    ("module", "list_name", "name"), each_of(passes, "PASSES") + each_of(differentiable, "STEPS")
)
def test_a_pass_of_torchscript_fails(device, monkeypatch, module, list_name, name):
    steps = getattr(module, list_name)
    (step,) = (step for step in steps if step.name == name)
    broken, fails = failing(step.run)
    monkeypatch.setattr(module, list_name, tuple(replace(s, run=broken) if s is step else s for s in steps))
    net, x = scripted(device)
    net._c._get_method("forward")._debug_flush_compilation_cache()
    tsfuser.reset()
    before = failures.total
    with tsfuser.fuser():
        texts = all_calls(net, x, calls=5)
    if fails:  # not each graph comes to the last passes
        assert_told(texts, name, before)
    # steps on autodiff's graphs change no joint graph
    assert (
        fails or by_joint_graphs() or name in ("merge_views", "move_views_out", "tidy", "name_groups", "drop")
    )


def functions_of(module):
    """The functions of the torch.compile door that the module calls from other files."""
    return [
        pytest.param(module, name, id=f"{module.__name__.rsplit('.', 1)[-1]}.{name}")
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__.startswith("tsfuser.")
        and value.__module__ != module.__name__
        and name not in ("boxed", "run", "first_graph", "whole_ops", "enabled")
    ]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        case
        for module in (dynamo_program, dynamo_groups, dynamo_partition, dynamo_door)
        for case in functions_of(module)
    ],
)
def test_a_pass_of_torch_compile_fails(device, forgotten, monkeypatch, module, name):
    broken, fails = failing(getattr(module, name))
    monkeypatch.setattr(module, name, broken)
    if name in [rewrite.__name__ for rewrite in dynamo_program.REWRITES] and module is dynamo_program:
        rewrites = [broken if rewrite.__name__ == name else rewrite for rewrite in dynamo_program.REWRITES]
        monkeypatch.setattr(dynamo_program, "REWRITES", rewrites)
    net, x = torch.compile(Net().to(device), backend="tsfuser"), torch.randn(6, 8, device=device)
    before = failures.total
    texts = all_calls(net, x, calls=2)
    if fails:
        assert texts and failures.total > before and tsfuser.stats()["passes_failed"]


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("door", ["torchscript", "torch.compile"])
def test_out_of_memory_and_interrupts_reach_the_program(forgotten, monkeypatch, door, error):
    def broken(*given, **named):
        raise error("not a mistake")

    x = torch.randn(6, 8)
    if door == "torchscript":
        step = passes.PASSES[0]
        monkeypatch.setattr(passes, "PASSES", (replace(step, run=broken), *passes.PASSES[1:]))
        run = torch.jit.script(fresh(lambda_program))
    else:
        monkeypatch.setattr(dynamo_program, "fuse", broken)
        run = torch.compile(lambda_program, backend="tsfuser")
    # TorchDynamo wraps what a backend raises, but for KeyboardInterrupt.
    with pytest.raises((error, BackendCompilerFailed), match="not a mistake") as raised, tsfuser.fuser():
        for _ in range(3):
            run(x)
            for _ in range(100):  # from C++ it comes between two bytecodes
                pass
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), error)


def lambda_program(x):
    return torch.relu(x) * 2.0 + 1.0


def test_a_thread_may_end_in_a_pass(tmp_path):
    """As Python ends a thread that asks for the interpreter once that is gone: by pthread_exit, which unwinds
    it like an exception, but ends the process where that is swallowed. At its end the thread calls _exit."""
    source = """
import ctypes, threading
import torch, tsfuser
from tsfuser import _C

libc, key = ctypes.PyDLL(None), ctypes.c_uint()
libc.pthread_key_create(ctypes.byref(key), libc._exit)

def end(graph):
    libc.pthread_setspecific(key, ctypes.c_void_p(7))
    libc.pthread_exit(None)

def run():
    unit = torch.jit.CompilationUnit("def f(x):\\n    return torch.relu(x) * 2.0 + 1.0\\n")
    with tsfuser.fuser():
        for _ in range(3):
            unit.f(torch.randn(3))

_C.set_pass(end)
threading.Thread(target=run).start()
"""
    status, _, err = run_python(tmp_path, source)
    assert status == 7, err


def test_with_the_fallback_disabled_a_failure_is_raised(tmp_path):
    source = """
import sys, torch, tsfuser
from tsfuser import _C
from tsfuser.frontends.dynamo import program

def f(x):
    return torch.relu(x) * 2.0 + 1.0

def broken(*given):
    raise KeyError("a pass went wrong")

program.fuse = broken
try:
    torch.compile(f, backend="tsfuser")(torch.randn(3))
except Exception as error:
    print("a pass went wrong" in str(error))
for name in ("make_functional", "graph_pass"):
    _C.fail_pass(name)
    unit = torch.jit.CompilationUnit("def f(x):\\n    return torch.relu(x) * 2.0 + 1.0\\n")
    try:
        with tsfuser.fuser():
            for _ in range(3):
                unit.f(torch.randn(3))
    except RuntimeError as error:
        print(f"the pass {name} fail" in str(error))
"""
    status, out, err = run_python(tmp_path, source, PYTORCH_NVFUSER_DISABLE="fallback")
    assert (status, out) == (0, "True\nTrue\nTrue\n"), err
