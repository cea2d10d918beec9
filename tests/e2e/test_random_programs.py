"""Random programs against eager, a few dozen here and two thousand with --long;
`tests/kit/random_programs.py` runs as many as one likes. A failure prints a script."""

import pytest

from kit import random_jobs
from kit.random_families import FEATURES, features_of
from kit.random_jobs import Job, run_jobs
from kit.random_programs import sweep
from kit.random_shrink import script_of, shrink
from kit.random_world import generate
from tsfuser.planning import compile as pipeline

COUNT = {"cpu": 40, "cpu-fibers": 20}
#: Seeds of programs that failed once: strides of masked_fill, of a number's power, of expanded bools, of
#: logsigmoid on the CPU, of dims of size 1, of rms_norm, of batch norm and of what is promoted; the sign of
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


def run(seeds, target, device, features=()):
    lines = []
    counts, failed, _ = sweep(seeds, device, report=lines.append, features=features)
    print(f"\n{target}: {lines[-1]}")
    assert counts["fused"] > 0
    for run in failed:
        text = script_of(*shrink(run, device)[:1], target, run.wrong, run.seed)
        pytest.fail(f"{len(failed)} programs; seed {run.seed}:\n{text}")


def test_random_programs(place, target, request):
    count = 2000 if request.config.getoption("--long") else COUNT.get(target, 40)
    run(range(count), target, place)


def test_programs_that_failed_once(place, target):
    run(FAILED_ONCE, target, place)


def test_random_families(place, target, request):
    """Branches, autocast, calls that change, inputs that are written, empty tensors, special values."""
    count = 2000 if request.config.getoption("--long") else COUNT.get(target, 40)
    run(range(100000, 100000 + count), target, place, FEATURES)


def test_every_family_has_programs():
    made = {name: [generate(seed, (name,)) for seed in range(8)] for name in FEATURES}
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
    monkeypatch.setattr(pipeline.emit, "source", lambda kernel: made(kernel).replace("tanh(", "sin("))
    seeds = [seed for seed in range(300) if "tanh" in str(generate(seed, features_of(seed, FEATURES)))][:12]
    _, failed, _ = sweep(seeds, place, report=lambda line: None, features=FEATURES)
    assert failed


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
    assert "seed 17: the process died: SIGSEGV" in out and "30 seeds" in out and "1 died" in out


def test_the_command_runs_processes_and_counts(capsys):
    assert run_jobs(Job(100000, 100006, ("branches", "special"), "cpu", 3, 1), 2, 0) == 0
    last = [line for line in capsys.readouterr().out.splitlines() if " seeds, " in line][-1]
    assert last.startswith("6 seeds, ") and "0 differences" in last and "0 died" in last


def test_a_process_that_dies_at_once_is_given_up(capsys):
    """A real one, which finds nothing to do with batches of 0."""
    assert run_jobs(Job(5, 6, (), "cpu", 0, 1), 1, 0) == 1
    assert "seed 5: the process died: exit status 1" in capsys.readouterr().out
