"""Arguments that eager rejects, on functions that were profiled and fused with valid ones.

Each call raises what eager raises, or gives what eager gives. The eager of the same torch is asked; no text
is compared. First the errors of torch's own list and changes of its samples, then every number of every row
at the edges of all dtypes and beyond, then calls by name. Run with -s for the counts.
"""

import contextlib
import math
import warnings

import pytest
import torch

import tsfuser
from kit.opinfo import named
from kit.opsweep import single_nodes
from kit.outcomes import Tally, differs, outcome, plain, sweep
from kit.rejected import row_trials, trials
from kit.support import counted, groups, script
from tsfuser.ops import table

pytestmark = pytest.mark.graphs

PARTS = 8  # of the ops; without --long the first trial of every second op
MODES = {"guards": {}, "no guards": {"guards": False}, "training": {"training": True}}


def check(tally, what):
    print(f"\n{what}: {tally}")
    assert not tally.wrong, f"{len(tally.wrong)} of {tally}:\n" + "\n".join(tally.wrong[:20])
    assert tally.checks and tally.fused
    assert tally.errors > tally.checks // 50


def swept(found, what, guards=True, training=False):
    tally = Tally()
    with single_nodes(guards):
        sweep(found, tally, training)
    check(tally, what)


@pytest.mark.each_value()  # the next test has each op in each mode
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(PARTS))
def test_errors_of_torchs_list_and_changed_samples(request, place, part, mode):
    everything = request.config.getoption("--long")
    most, cross, step = (3, True, PARTS) if everything else (1, False, 2 * PARTS)
    found, _ = trials(named()[part::step], most, cross, place)
    swept(found, f"part {part} of {PARTS}, {mode}", **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_numbers_at_the_edges_of_all_dtypes_and_beyond(request, place, mode):
    everything = request.config.getoption("--long")
    dtypes = (
        ("float32", "float64", "float16", "int64", "uint8", "complex64")
        if everything
        else ("float32", "uint8")
    )
    dtypes = dtypes[:2] if mode == "training" and everything else dtypes[:1] if mode == "training" else dtypes
    swept(row_trials(table.all_rows(), dtypes, everything, place), f"numbers, {mode}", **MODES[mode])


X = torch.linspace(-2.0, 2.0, 64).reshape(8, 8)
MASK = torch.arange(64).reshape(8, 8) % 3 == 0
HALF, BYTES, WHOLE = X.half(), (X * 9).abs().to(torch.uint8), (X * 9).to(torch.int64)
EDGES = [-0.1, 1.5, -1.0, 0.0, math.nan, math.inf, -math.inf, 1e6, 1e30, 1e39, 1e308]
#: What a function does; a tensor and a number for its first calls; tensors and numbers for those that follow.
CALLS = {
    "dropout": ("torch.dropout(x * 2.0, v, True)", X, 0.5, [X], EDGES),
    "dropout outside of training": ("torch.dropout(x * 2.0, v, False)", X, 0.5, [X], EDGES),
    "softshrink": ("torch.nn.functional.softshrink(x * 2.0, v)", X, 0.5, [X, HALF], EDGES),
    "hardshrink": ("torch.nn.functional.hardshrink(x * 2.0, v)", X, 0.5, [X, HALF], EDGES),
    "celu": ("torch.celu(x * 2.0, v)", X, 0.5, [X, HALF], [*EDGES, 1e-40]),
    "leaky_relu": ("torch.nn.functional.leaky_relu(x * 2.0, v)", X, 0.5, [X, HALF], EDGES),
    "threshold": ("torch.threshold(x * 2.0, v, 0.5)", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "threshold's value": ("torch.threshold(x * 2.0, 0.5, v)", X, 0.25, [X, HALF, WHOLE, BYTES], EDGES),
    "add": ("torch.add(x * 2.0, x, alpha=v)", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "sub": ("torch.sub(x * 2, x, alpha=v)", X, 3, [X, HALF, WHOLE, BYTES], [300, -(2**63), 70000]),
    "clamp": ("torch.clamp(x * 2.0, v, 3.0)", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "clamp_min": (
        "torch.clamp_min(x * 2, v)",
        WHOLE,
        1,
        [X, HALF, WHOLE, BYTES],
        [300, -(2**63), 70000, -300],
    ),
    "masked_fill": ("(x * 2.0).masked_fill(m, v)", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "masked_fill with an int": (
        "(x * 2).masked_fill(m, v)",
        X,
        5,
        [X, HALF, WHOLE, BYTES],
        [300, -300, 70000, -(2**63)],
    ),
    "where": ("torch.where(m, x * 2.0, v)", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "where with an int": (
        "torch.where(m, x * 2, v)",
        BYTES,
        5,
        [X, HALF, WHOLE, BYTES],
        [300, -300, 70000, -(2**63)],
    ),
    "full_like": ("torch.full_like(x, v) + x", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "full_like with an int": (
        "torch.full_like(x, v) + x",
        X,
        5,
        [X, HALF, WHOLE, BYTES],
        [300, -300, 70000, -(2**63)],
    ),
    "fill": ("torch.fill(x, v) + x", X, 0.5, [X, HALF, WHOLE, BYTES], EDGES),
    "pow": ("torch.pow(x * 2.0, v)", X, 0.5, [X, HALF, WHOLE], EDGES),
    "lerp": ("torch.lerp(x * 2.0, x, v)", X, 0.5, [X, HALF], EDGES),
    "softmax": ("torch.softmax(x * 2.0, v)", X, 1, [X, HALF], [0, -1, 2, -3, 2**63 - 1]),
    "sum": ("torch.sum(x * 2.0, [v])", X, 1, [X, HALF], [0, -1, 2, -3, 2**63 - 1]),
    "unsqueeze": ("torch.unsqueeze(x * 2.0, v) + 1", X, 1, [X, HALF], [0, -3, 3, -4, 2**63 - 1]),
    "reshape": ("(x * 2.0).reshape([v, 16]) + 1", X, 4, [X, HALF], [-1, -2, 0, 5, -16, 2**62]),
    "view": ("(x * 2.0).view([v, 16]) + 1", X, 4, [X, HALF], [-1, -2, 0, 5, -16, 2**62]),
    "expand": ("(x * 2.0).expand([v, 8, 8]) + 1", X, 4, [X, HALF], [-1, -2, 0, -16]),
    "rows": ("torch.nn.functional.layer_norm(x * 2.0, [v])", X, 8, [X, HALF], [0, 1, 7, -1]),
}
RANDOM = ("dropout",)
LONE = (
    "full_like",
    "full_like with an int",
    "full_like with nan",
    "fill",
    "dropout outside of training",
    "clamp_min",
    "sub",
)


@contextlib.contextmanager
def guard_mode(on):
    before = torch._C._jit_set_nvfuser_guard_mode(on)
    try:
        with tsfuser.fuser(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", tsfuser.TsfuserWarning
            )  # classes of calls that eager rejects are refused
            yield
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


def compare(source, warm, calls, training, random=False):
    """Calls the function with `warm` until it is fused, then with each of `calls`; compares with eager, which
    rejects one at least on the CPU: on CUDA some ops compute in float what they reject there."""
    scripted, eager = script(source), plain(source)
    for _ in range(4):
        outcome(scripted, warm, training)
    assert training or groups(scripted)  # autodiff leaves some of them to eager
    raised = 0
    for arguments in calls:
        expected = outcome(eager, arguments, training)
        raised += expected[0] == "raises"
        for _ in range(2):  # the second time there may be a plan
            problem = differs(outcome(scripted, arguments, training), expected, random)
            assert problem is None, f"{arguments[0].dtype}, {arguments[2:]}: {problem}"
    assert raised or warm[0].is_cuda


@pytest.mark.each_value(("guards", "training"))
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("guards", [True, False], ids=["guards", "no guards"])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_eager_rejects(place, name, guards, training):
    text, warm, number, tensors, numbers = CALLS[name]
    training = training and name not in LONE  # what is left of these in training is no group
    source = f"def f(x, m, v: {type(number).__name__}):\n    return {text}\n"
    mask = MASK.to(place)
    calls = [[x.to(place), mask, v] for x in tensors for v in [number, *numbers]]
    with guard_mode(guards):
        compare(source, [warm.to(place), mask, number], calls, training, name in RANDOM)


#: The same of numbers of the code: they are rejected in dtypes that come later.
CONSTANTS = {
    "masked_fill": ("(x * 2).masked_fill(m, 70000.0)", [HALF, WHOLE]),
    "masked_fill with an int": ("(x * 2).masked_fill(m, 300)", [HALF, WHOLE, BYTES]),
    "where with an int": ("torch.where(m, x * 2, 300)", [HALF, WHOLE, BYTES]),
    "full_like": ("torch.full_like(x, 1e6) + x", [HALF, WHOLE, BYTES]),
    "full_like with nan": ("torch.full_like(x, float('nan')) + x", [HALF, WHOLE, BYTES]),
    "fill": ("torch.fill(x, 1e30) + x", [HALF, WHOLE, BYTES]),
    "add": ("torch.add(x * 2, x, alpha=70000)", [HALF, WHOLE, BYTES]),
    "add with a fraction": ("torch.add(x * 2, x, alpha=0.5)", [HALF, WHOLE, BYTES]),
    "clamp": ("torch.clamp(x * 2, -70000.0, 70000.0)", [HALF, WHOLE, BYTES]),
    "clamp with ints": ("torch.clamp(x * 2, -300, 300)", [HALF, WHOLE, BYTES]),
    "threshold": ("torch.threshold(x * 2, 0.5, 70000.0)", [HALF]),
    "leaky_relu": ("torch.nn.functional.leaky_relu(x * 2, 1e39)", [X, HALF]),
    "hardtanh": ("torch.nn.functional.hardtanh(x * 2, -70000.0, 70000.0)", [HALF]),
    "softplus": ("torch.nn.functional.softplus(x * 2, 1.0, 1e39)", [X, HALF]),
    "subtraction": ("(x * 2) - (x > 0).type_as(x)", [MASK]),
    "mean": ("torch.mean(x * 2)", [WHOLE, BYTES]),
}


@pytest.mark.each_value(("guards", "training"))
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("guards", [True, False], ids=["guards", "no guards"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_dtype_that_rejects_a_number_of_the_code(place, name, guards, training):
    text, tensors = CONSTANTS[name]
    mask = MASK.to(place)
    with guard_mode(guards):
        calls = [[x.to(place), mask] for x in tensors]
        compare(
            f"def f(x, m):\n    return {text}\n",
            [X.double().to(place), mask],
            calls,
            training and name not in LONE,
        )


@pytest.mark.parametrize("guards", [True, False], ids=["guards", "no guards"])
def test_a_tensor_without_dims_that_eager_takes_for_a_number(place, guards):
    numbers = [torch.tensor(v) for v in (2.0, 70000.0, math.inf, math.nan, 300, -300, 7)]
    numbers += [v.to(place) for v in numbers if place != "cpu"]
    mask = MASK.to(place)
    calls = [[x.to(place), mask, v] for x in (X, HALF, BYTES, WHOLE) for v in numbers]
    with guard_mode(guards):
        compare(
            "def f(x, m, v):\n    return (x * 2).masked_fill(m, v) + 1\n",
            [X.to(place), mask, numbers[0]],
            calls,
            False,
        )


def test_a_call_beyond_a_limit_that_eager_takes_is_counted():
    scripted = script("def f(x, v: float):\n    return torch.celu(x * 2.0, v)\n")
    with tsfuser.fuser():
        for _ in range(3):
            scripted(X, 0.5)
        with counted() as rise:
            result = scripted(X, -0.5)
    assert torch.equal(result, torch.celu(X * 2.0, -0.5))
    assert rise["fallbacks"] == {"a number is beyond what the plan is made for": 1}


@pytest.mark.parametrize("op", ["torch.where(m, x, 300)", "torch.where(m, 300, x)", "x.masked_fill(m, 300)"])
def test_the_first_call_raises_what_eager_raises(op):
    scripted = script(f"def f(x, m):\n    return {op} * 2\n")
    with tsfuser.fuser():
        for _ in range(4):
            assert outcome(scripted, [BYTES, MASK])[0] == "raises"
