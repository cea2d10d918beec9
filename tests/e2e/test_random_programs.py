"""Random programs against eager, twenty here and two thousand with --long;
`tests/kit/random_programs.py` runs as many as one likes. A failure prints a script."""

import pytest
import torch

from kit import random_jobs
from kit.random_compare import compare, expectation
from kit.random_families import FIRST, features_of
from kit.random_inputs import Input
from kit.random_jobs import Job, run_jobs
from kit.random_ops import Statement
from kit.random_outcome import RAISED, incoming
from kit.random_programs import prepared, sweep
from kit.random_runs import epsilons
from kit.random_scripted import execute
from kit.random_shrink import script_of, shrink
from kit.random_world import Program, generate
from tsfuser.frontends.torchscript.training import differentiable
from tsfuser.planning import compile as pipeline

COUNT = {"cpu": 20, "cpu-fibers": 10}
#: Seeds of programs that failed once: strides of masked_fill, of a number's power, of expanded bools, of
#: logsigmoid on the CPU, of dims of size 1, of rms_norm, of batch norm and of promoted operands; the sign of
#: a zero; sums of terms that cancel; gradients that only TorchScript has; results that ask for gradients
#: without a way to get any; and a kernel without a loop.
FAILED_ONCE = [1343, 1689, 1859, 1647, 2384, 21207, 24278, 9200866, 8100526, 8801042]
FAILED_ONCE += [
    8301137,
    8400070,
    8500667,
    9400343,
    20001403,
    20002461,
    21002067,
    21002298,
    21010865,
    21011050,
    21014019,
]
FAILED_ONCE += [33010406, 36000145]
#: The same of families: what is asked for its dtype, eager's batch norm behind a permute, results that ask
#: for gradients in TorchScript alone, branches that later calls take, a flat cat, two loops, a cast behind a
#: write, an input that is handed on.
FAMILIES_FAILED_ONCE = [4000935, 4003783, 4006815, 4007441, 4023323, 4025213, 6000023, 7202669]


def run(seeds, target, device, features=()):
    lines = []
    counts, failed, _ = sweep(seeds, device, opt_level=0, report=lines.append, features=features)
    print(f"\n{target}: {lines[-1]}")
    assert counts["fused"] > 0
    for run in failed:
        text = script_of(*shrink(run, device)[:1], target, run.wrong, run.seed)
        pytest.fail(f"{len(failed)} programs; seed {run.seed}:\n{text}")


def test_random_programs(place, target, request):
    count = 2000 if request.config.getoption("--long") else COUNT.get(target, 40)
    run(range(count), target, place)


@pytest.mark.graphs
def test_programs_that_failed_once(place, target):
    run(FAILED_ONCE, target, place)


def test_random_families(place, target, request):
    """Branches, autocast, calls that change, inputs that are written, empty tensors, special values."""
    count = 2000 if request.config.getoption("--long") else COUNT.get(target, 40)
    run(range(100000, 100000 + count), target, place, FIRST)


@pytest.mark.graphs
def test_programs_of_families_that_failed_once(place, target):
    run(FAMILIES_FAILED_ONCE, target, place, FIRST)


def test_every_family_has_programs():
    made = {name: [generate(seed, (name,)) for seed in range(8)] for name in FIRST}
    assert all(any(programs) for programs in made.values())
    texts = {name: "".join(p.source() for p in programs if p) for name, programs in made.items()}
    assert "    if " in texts["branches"] or "    for " in texts["branches"]
    assert any(f"torch.{op}(" in texts["autocast"] for op in ("matmul", "mm"))
    assert any(p and any(p.changes) for p in made["changes"]) and any(
        p and p.written for p in made["written"]
    )
    assert any(p and any(0 in call.values() for call in p.calls) for p in made["empty"])
    for name in ("special", "limits"):
        tensors = [
            t for p in made[name] if p for t in p.arguments(0)[:-2] if t.is_floating_point() and t.numel()
        ]
        wild = [
            not t.isfinite().all() if name == "special" else t.detach().abs().max() > 60000 for t in tensors
        ]
        assert any(wild)


@pytest.mark.parametrize("target", ["cpu"])
def test_kernels_that_compute_something_else_are_found(place, monkeypatch):
    made = pipeline.emit.source
    monkeypatch.setattr(pipeline.emit, "source", lambda *given: made(*given).replace("tanh(", "sin("))
    seeds = [seed for seed in range(300) if "tanh" in str(generate(seed, features_of(seed, FIRST)))][:16]
    _, failed, _ = sweep(seeds, place, opt_level=0, report=lambda line: None, features=FIRST)
    assert failed


def program_of(*statements, rows=(9,), columns=(9,), dtype=torch.float32, special="", **more):
    """A program of a trained input, a matrix, with a call for each of its sizes."""
    inputs = (
        Input("x", ("m", "n"), dtype, "dense", 1, True, special),
        Input("c", (), torch.bool, "dense", 1),
    )
    calls = tuple({"m": m, "n": n} for m, n in zip(rows, columns, strict=True))
    named = tuple(("v0" if st.kind == "value" else "", st) for st in statements)
    return Program(inputs, named, ("v0",), calls, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_overflows_on_the_way_may_be_anything(dtype):
    """Where the terms of one sign overflow, and those of the other do, too, or the sum does not."""
    mean = Statement("{0}.mean(-1, keepdim=True) + {0}", ("x",))
    program = program_of(mean, columns=(16,), dtype=dtype, special="limits", features=("limits",))
    expected = expectation(program, 0, "cpu")
    eager = {name: tensor for name, (tensor, _, _) in expected.items()}
    x = program.arguments(0)[0].detach().double() / 64
    largest = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max / 64
    up, down = x.relu().sum(-1) > largest, (-x).relu().sum(-1) > largest
    unsure = (up & down) | ((up | down) & (x.sum(-1).abs() <= largest))
    assert unsure.any()
    for anything in torch.nan, torch.inf, -torch.inf:
        other = eager["result 0"].masked_fill(unsure[:, None], anything)
        assert compare(eager | {"result 0": other}, expected) == ""
        assert "differ" in compare(eager | {"result 0": torch.full_like(other, anything)}, expected)


def test_the_gradient_of_a_batch_norm_is_right_where_eagers_is_not():
    """Its kernel on the CPU reads gradient and operand in one order."""
    norm = "torch.nn.functional.batch_norm({0}.view(2, 3, 1, 4), None, None, training=True, eps=0.25)"
    permuted = Statement(norm + ".permute([0, 3, 1, 2]).contiguous()", ("x",))
    program = program_of(permuted, rows=(2,), columns=(12,))
    eager, wanted, allowed = expectation(program, 0, "cpu")["gradient 0"]
    x = program.arguments(0)[0].detach().double().requires_grad_()
    rows = x.view(2, 3, 4)
    normal = (rows - rows.mean((0, 2), True)) / (rows.var((0, 2), False, True) + 0.25).sqrt()
    result = normal.permute(0, 2, 1).reshape(-1)
    (right,) = torch.autograd.grad(result, x, incoming(result))
    torch.testing.assert_close(wanted, right)
    assert (eager - wanted).abs().max() > 0.1 and allowed > 0.1


def test_statistics_are_rounded_though_here_their_mean_is_exact_by_chance():
    """On a GPU the running mean had another last bit."""
    norm = "{out} = torch.nn.functional.batch_norm({0}, m, r, None, None, True, 0.25)"
    rows = Input("x", ("m", "n"), torch.float32, "expanded", 1)
    statistics = tuple(Input(name, ("n",), torch.float32, "dense", 2) for name in "mr")
    statement = Statement(norm, ("x",), "writing")
    program = Program((rows, *statistics), (("v0", statement),), ("v0",), ({"m": 4, "n": 3},))
    assert not {"m", "r"} & epsilons(program, 0)[1]


def test_a_product_that_overflows_on_the_way_may_be_anything():
    """Two operands and a sum may be one FMA, which is finite where the product is not."""
    minus_twice = Statement("torch.sub({0}, {0}, alpha=2)", ("x",))
    program = program_of(minus_twice, special="limits", features=("limits",))
    x, expected = program.arguments(0)[0], expectation(program, 0, "cpu")
    overflows = (2 * x).isinf()
    assert torch.equal(expected["result 0"][2].isinf(), overflows) and 0 < int(overflows.sum()) < x.numel()


@pytest.mark.parametrize("seed, call", [(1614496, 1), (1621451, 1)])
def test_where_doubles_overflow_anything_may_be(seed, call):
    """A mean in a list, and a product and a sum in a loop: no wider dtype says what is right."""
    expected = expectation(generate(seed, features_of(seed, FIRST)), call, "cpu")
    eager, exact, allowed = expected["result 0"]
    lost = ~exact.isfinite()
    assert eager.dtype == torch.float64 and 0 < int(lost.sum()) < lost.numel()
    assert allowed[lost].isinf().all() and allowed[~lost].isfinite().any() and not allowed.isnan().any()


def test_where_eagers_backward_raises_gradients_must_be_right():
    """The sigmoid's backward reads its result, which is halved in place."""
    sigmoid, halved = Statement("torch.sigmoid({0})", ("x",)), Statement("{0}.mul_(0.5)", ("v0",), "inplace")
    program = program_of(sigmoid, halved, written=("c",), features=("written",))
    expected = expectation(program, 0, "cpu")
    eager = {name: tensor for name, (tensor, _, _) in expected.items()}
    right = {name: tensor for name, tensor in eager.items() if name != RAISED}
    raises = {name: tensor for name, tensor in eager.items() if name != "gradient 0"}
    assert compare(raises, expected) == "" and compare(right, expected) == ""
    halves = eager["result 0"]
    of_halves = eager["gradient 0"] * (1 - halves) / (2 - 4 * halves)  # as if the sigmoid gave them
    assert "gradient 0" in compare(right | {"gradient 0": of_halves}, expected)
    del right["gradient 0"]
    assert compare(right, expected) == "gradient 0 is missing"


def test_what_reads_the_operand_of_a_cast_in_the_backward_may_raise():
    """Eager saves the float32 copy that it squares, which nobody can write."""
    added, squared = Statement("{0} + 1", ("x",)), Statement("torch.square({0}.float())", ("x",))
    for statement, dtype, may_raise in (
        (squared, torch.bfloat16, True), (squared, torch.float32, True), (added, torch.bfloat16, False)
    ):  # fmt: skip
        program = program_of(statement, dtype=dtype, written=("x",), features=("written",))
        expected = expectation(program, 0, "cpu")
        outcome = {name: tensor for name, (tensor, _, _) in expected.items() if name != "gradient 0"}
        found = compare(outcome | {RAISED: torch.tensor(True)}, expected)
        assert found == ("" if may_raise else f"{RAISED} is not there in eager")


def test_what_raises_without_fusion_as_well_is_no_difference(monkeypatch):
    """TorchScript's derivative of `linear` reshapes a matrix without elements to [-1, 0], if that is not
    corrected."""
    others = tuple(step for step in differentiable.STEPS if step.name != "read_rows")
    monkeypatch.setattr(differentiable, "STEPS", others)
    product = Statement("torch.nn.functional.linear({0}, {0}) * 0.5", ("x",))
    run = prepared(0, program_of(product, rows=(2, 0), columns=(3, 3)), "cpu")
    execute([run], "cpu")
    assert "shape [-1, 0]" in run.wrong and run.own


def test_a_process_that_dies_is_told_and_the_rest_goes_on(monkeypatch, capsys):
    job = Job(0, 30, (), "cpu", 10, 1)
    started = []

    def run(job, told):
        started.append((job.first, job.last, job.skipped))
        if 17 in range(job.first, job.last) and 17 not in job.skipped:
            told({"counts": {"seeds": 10}})
            return (17, "the process died: SIGSEGV"), job.first + 10
        told({"counts": {"seeds": 20}})
        return None, job.last

    monkeypatch.setattr(random_jobs, "_run", run)
    assert run_jobs(job, 1, 0) == 1
    assert started == [(0, 30, ()), (10, 30, (17,))]
    out = capsys.readouterr().out
    assert "seed 17 script: the process died: SIGSEGV" in out and "30 seeds" in out and "1 died" in out


def test_the_command_runs_processes_and_counts(capsys):
    assert run_jobs(Job(100000, 100004, ("branches", "special"), "cpu", 2, 0), 2, 0) == 0
    last = [line for line in capsys.readouterr().out.splitlines() if " seeds, " in line][-1]
    assert last.startswith("4 seeds, ") and "0 differences" in last and "0 died" in last


def test_a_process_that_dies_at_once_is_given_up(capsys):
    """A real one, which finds nothing to do with batches of 0."""
    assert run_jobs(Job(5, 6, (), "cpu", 0, 1), 1, 0) == 1
    assert "seed 5 script: the process died: exit status 1" in capsys.readouterr().out
