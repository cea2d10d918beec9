"""Random programs, fused against eager and against TorchScript without fusion.

    export PYTHONPATH=.:tests
    python -m kit.random_programs --seeds 0:20000 --jobs 16 --features all
    python -m kit.random_programs --seeds 0:5000 --target cuda --jobs 4
    python -m kit.random_programs --seeds 1234:1235 --show     the program of one seed, as a script

The program of a seed is always the same one; its seed also chooses the modes that it runs in (guards off,
groups of one node, no horizontal fusion) and, where there are `--features` (random_families.py), which of
them it has. Kernels are compiled in batches, in processes of their own: one that dies is reported with its
seed, and the rest goes on in another. What TorchScript without fusion gives, too, is no difference. A
program that differs is cut down to the least that still differs and printed as a script of its own. Exit
status 1: there was one.
"""

import argparse
import contextlib
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

import tsfuser
from kit.batch import collecting, load
from kit.launches import FIBERS
from kit.random_compare import adds_gradients, all_roundings, differences, expectation
from kit.random_families import FEATURES, features_of
from kit.random_outcome import RAISED, saved_copies
from kit.random_world import REFUSALS, generate
from kit.support import counted, script
from tsfuser import options

PROFILED = 3  # calls until torch has optimised a function, in training
MODES = ({}, {}, {"single": True}, {"guards": False}, {"horizontal": False})
BROKEN = ("failed to plan", "failed on kernel", "cannot load")  # refusals that are mistakes of ours


@dataclass
class Run:
    """A program with what its calls should give, its scripted function, and what is wrong."""

    seed: int
    program: object
    scripted: object = None
    expected: list = None
    wrong: str = ""
    own: bool = False  # whether TorchScript raises without fusion, too
    launches: int = 0  # in one call of each kind
    excused: str = ""  # what is other than in eager, but also without fusion


@contextlib.contextmanager
def modes(single=False, guards=True, horizontal=True):
    """The knobs, put back after."""
    knobs = (
        (torch._C._jit_set_nvfuser_single_node_mode, single),
        (torch._C._jit_set_nvfuser_guard_mode, guards),
        (torch._C._jit_set_nvfuser_horizontal_mode, horizontal),
    )
    before = [knob(value) for knob, value in knobs]
    try:
        yield
    finally:
        for (knob, _), value in zip(knobs, before):
            knob(value)


@contextlib.contextmanager
def target(name):
    """The device of a target: `cpu`, `cpu-fibers` or `cuda`."""
    with options.override(host_launch=FIBERS if name == "cpu-fibers" else "block"):
        tsfuser.reset()
        yield "cuda" if name == "cuda" else "cpu"


def prepared(seed, program, device):
    """A Run with its expectations, or None where eager gives nothing to compare with."""
    try:
        expected = [expectation(program, call, device) for call in range(len(program.calls))]
    except (ValueError, AssertionError, *REFUSALS):
        return None
    return Run(seed, program, expected=expected)


def execute(runs, device, opt_level=1, jobs=1, progress=None):
    """Runs programs fused; what is wrong stays in the Runs. Returns how many have a fusion group, and the
    reasons of refusals."""
    with collecting() as kernels, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in runs:
            _note(progress, run)
            try:
                with modes(**MODES[run.seed % len(MODES)]), tsfuser.fuser():
                    run.scripted = script(run.program.source())
                    for call in range(len(run.program.calls)):
                        _last_of(run, call, device)
            except Exception as error:
                run.wrong = f"raises {_last(error)}"
                run.own = _without_fusion(run, device) == run.wrong
    runs = [run for run in runs if not run.own]
    load(kernels, opt_level, jobs)
    fused, reasons = 0, Counter()
    for run in runs:
        _note(progress, run)
        if not run.wrong:
            with counted() as rise:
                _compare(run, device)
            run.launches = rise["launches"]
            fused += run.launches > 0
    for reason, count in tsfuser.stats()["fallbacks"].items():
        reasons[reason] += count
    return fused, reasons


def _without_fusion(run, device):
    """What TorchScript raises without fusion; "" for nothing."""
    try:
        with torch.jit.fuser("none"):
            run.scripted = script(run.program.source())
            for call in range(len(run.program.calls)):
                _last_of(run, call, device)
    except Exception as error:
        return f"raises {_last(error)}"
    return ""


def _raises_without_fusion(run, device):
    """Whether TorchScript raises the same, perhaps of another tensor, or in larger differentiable graphs."""
    what = run.wrong.split(": [")[0]
    if _without_fusion(run, device).split(": [")[0] == what:
        return True
    with each_op_differentiated():
        return _without_fusion(run, device).split(": [")[0] == what


def _last_of(run, call, device, moving=None):
    """The last of some calls."""
    for _ in range(PROFILED):
        found = run.program.outcome(run.scripted, call, device, moving=moving)
    return found


def _compare(run, device):
    with modes(**MODES[run.seed % len(MODES)]), tsfuser.fuser(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = dict(tsfuser.stats()["fallbacks"])
        for call, expected in enumerate(run.expected):
            try:
                actual = run.program.outcome(run.scripted, call, device)
                free = adds_gradients(run.program)
                wrong = differences(actual, expected, free)
                if wrong:  # each tensor may be eager's or TorchScript's
                    own = differences(actual, _torchscripts_own(run, call, device, actual), free)
                    run.excused = next(iter(wrong.values()))
                    run.wrong = next((what for name, what in wrong.items() if name in own), "")
            except Exception as error:
                run.wrong = f"raises {_last(error)}"
                if _raises_without_fusion(run, device):
                    run.wrong, run.excused = "", run.wrong
                    return
            if run.wrong:
                run.wrong = f"call {call}: {run.wrong}"
                return
        for reason, count in tsfuser.stats()["fallbacks"].items():
            if any(word in reason for word in BROKEN) and count != before.get(reason, 0):
                run.wrong = f"refused: {reason[:2000]}"


def _torchscripts_own(run, call, device, actual):
    """What TorchScript gives with no fuser at all, as `expectation` has it: some gradients of its own
    formulas are not eager's, and are there where eager has none, as through a cast to bool. After the same
    calls, as they decide what it specialises on, and with gradients for the results only that require one in
    `actual`, as in eager: of another set of them the gradients of the inputs are other sums."""
    moving = [k for k in range(len(run.program.results)) if actual.get(f"requires {k}", True)]

    def outcome():
        plain = Run(run.seed, run.program, script(run.program.source()))
        for other in range(len(run.program.calls)):
            _last_of(plain, other, device)
        return _last_of(plain, call, device, moving)

    with torch.jit.fuser("none"):
        unfused = outcome()
        if RAISED in unfused and RAISED not in actual:
            with saved_copies():
                unfused = outcome()  # the gradients that TorchScript's formulas give
        elif RAISED in actual and RAISED not in unfused:
            with each_op_differentiated():
                unfused = outcome()
    others = differences(unfused, run.expected[call], adds_gradients(run.program))
    allowed = {name: bound for name, (_, _, bound) in run.expected[call].items()}
    for name, t in unfused.items():
        if t.is_floating_point() and (name in others or name not in allowed):
            # eager's error is no measure of other values
            own = all_roundings(run.program, call, t.dtype, t.cpu().double())
            bound = allowed.get(name)
            allowed[name] = own if bound is None else torch.as_tensor(bound).clamp(min=own)
    return {
        name: (t, _exact(t, run.expected[call].get(name)), allowed.get(name)) for name, t in unfused.items()
    }


@contextlib.contextmanager
def each_op_differentiated():
    """A context in which TorchScript keeps its smallest differentiable graphs, too: what a larger one saves
    may make a backward raise, and it depends on other ops how large they are."""
    torch._C._debug_set_autodiff_subgraph_inlining(False)
    try:
        yield
    finally:
        torch._C._debug_set_autodiff_subgraph_inlining(True)


def _exact(unfused, expected):
    """What TorchScript gives, in double; where that is not finite, what is right."""
    values = unfused.cpu().double()
    if expected is None or expected[1].shape != values.shape:
        return values
    return torch.where(values.isfinite(), values, expected[1].double())


def _last(error):
    """Its type, and the last line of its message or, where it has none, its place. TorchScript's interpreter
    writes the type into the message, where it is the one that raises."""
    lines = str(error).strip().splitlines() or traceback.format_tb(error.__traceback__) or [""]
    kind = f"{type(error).__name__}: "
    return kind + lines[-1].removeprefix(kind)


def _note(progress, run):
    """Leaves the seed in a file, for when the process dies."""
    if progress is not None:
        os.pwrite(progress, f"{run.seed:<12}\n".encode(), 0)


def fails(seed, program, device):
    """What is wrong with one program; "" for nothing."""
    run = prepared(seed, program, device)
    if run is None:
        return ""
    execute([run], device, opt_level=3)
    return "" if run.own else run.wrong


def sweep(
    seeds, device, opt_level=1, jobs=1, batch=150, report=print, features=(), finished=None, progress=None
):
    """Runs the programs of `seeds`, of the families `features`; returns the counts, the failed Runs and why
    groups were refused. `finished(counts, seed)` is called after each batch, with its last seed."""
    counts, failed, reasons, start = Counter(), [], Counter(), time.monotonic()
    seeds = list(seeds)
    for k in range(0, len(seeds), batch):
        part = seeds[k : k + batch]
        made = ((seed, generate(seed, features and features_of(seed, features))) for seed in part)
        runs = [run for run in (prepared(s, p, device) for s, p in made if p is not None) if run]
        fused, refused = execute(runs, device, opt_level, jobs, progress)
        reasons += refused
        runs = [run for run in runs if not run.own]
        here = Counter(programs=len(runs), fused=fused, seeds=len(part))
        here["trained"] = sum(r.program.gradients for r in runs)
        here["calls"] = sum(len(r.program.calls) for r in runs)
        here["launches"] = sum(r.launches for r in runs)
        here["differences"] = sum(bool(r.wrong) for r in runs)
        here["excused"] = sum(bool(r.excused) for r in runs)
        here["raises"] = sum(RAISED in call for r in runs for call in r.expected)
        here.update(f"of {name}" for r in runs for name in r.program.features)
        counts += here
        for run in runs:
            if run.wrong:
                failed.append(run)
                report(f"seed {run.seed}: {run.wrong}")
        if finished:
            finished(here, part[-1])
        minutes = (time.monotonic() - start) / 60
        report(
            f"{counts['seeds']} seeds, {counts['programs']} programs ({counts['trained']} with gradients), "
            f"{counts['fused']} fused, {len(failed)} wrong, {counts['programs'] / minutes:.0f} a minute"
        )
    return counts, failed, reasons


def main():
    from kit.random_jobs import Job, run_jobs

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", default="0:1000", help="A:B, from A to B - 1")
    parser.add_argument("--features", default="", help=f"all, or some of: {', '.join(FEATURES)}")
    parser.add_argument("--target", choices=("cpu", "cpu-fibers", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--batch", type=int, default=150, help="programs that are compiled together")
    parser.add_argument("--opt", type=int, default=1, help="-O of g++; 1 compiles fast, 3 is what users get")
    parser.add_argument(
        "--shrink", type=int, default=10, help="of so many that differ print the least program"
    )
    parser.add_argument("--show", action="store_true", help="only print the programs, as scripts")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    features = FEATURES if given.features == "all" else tuple(filter(None, given.features.split(",")))
    if unknown := set(features) - set(FEATURES):
        parser.error(f"unknown features: {', '.join(sorted(unknown))}")
    if given.show:
        from kit.random_shrink import script_of

        for seed in range(first, last):
            program = generate(seed, features and features_of(seed, features))
            print(script_of(program, given.target, "as it came", seed) if program else f"# seed {seed}: none")
        return
    job = Job(first, last, features, given.target, given.batch, given.opt)
    sys.exit(run_jobs(job, given.jobs, given.shrink))


if __name__ == "__main__":
    main()
