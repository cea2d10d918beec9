#!/usr/bin/env python3
"""Random programs, fused against eager.

    python tests/random_programs.py --count 20000 --seed 0 --target cpu
    python tests/random_programs.py --count 5000 --target cuda
    python tests/random_programs.py --seed 1234 --count 1 --show     the program of one seed, as a script

The program of a seed is always the same one; its seed also chooses the modes that it runs in. Kernels are
compiled in batches. A program that differs is cut down to the least that still differs and printed as a
script of its own. Exit status 1: there was one.
"""

import argparse
import contextlib
import faulthandler
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from batch import collecting, load
from random_world import REFUSALS, epsilons, generate, noisy, outcome, run_plain
from support import EPSILON, counted, script

import tsfuser
from tsfuser import options

PROFILED = 3  # calls until torch has optimised a function, in training
TRIALS = 3  # runs with noise
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
    with options.override(host_launch="fibers" if name == "cpu-fibers" else "block"):
        tsfuser.reset()
        yield "cuda" if name == "cuda" else "cpu"


def expectation(program, call, device):
    """Name -> (eager's tensor, the exact one, how far off it may be: None for not at all). Raises ValueError
    where eager's results are not finite."""
    plain = run_plain(program, call, device)
    roundings, still = epsilons(program, call)
    exact = noisy(program, call)
    shaken = [noisy(program, call, roundings, seed) for seed in range(1, TRIALS + 1)]
    found = {}
    for name, eager in plain.items():
        if name not in exact:
            raise ValueError(f"{name} has a gradient in double only")
        wanted = exact[name]
        if not eager.is_floating_point():
            found[name] = eager, wanted, None
            continue
        if not bool(torch.isfinite(eager).all() and torch.isfinite(wanted).all()):
            raise ValueError(f"{name} of eager is not finite")
        kind, number = name.split()[:2]
        names = {"result": program.results, "input": [i.name for i in program.inputs]}.get(kind, ())
        if names and names[int(number)] in still:
            found[name] = eager, wanted, None
            continue
        off = max(_largest(other - wanted) for other in (eager.cpu().double(), *(s[name] for s in shaken)))
        found[name] = eager, wanted, 4 * off + _roundings(eager.dtype, wanted)
    return found


def _largest(x):
    return float(x.abs().max()) if x.numel() else 0.0


def _roundings(dtype, wanted):
    """How far off results of `dtype` may be by the last operations on them: one rounding to it, 64 in registers."""
    return (2 * EPSILON[dtype] + 64 * min(EPSILON[dtype], EPSILON[torch.float32])) * _largest(wanted)


def adds_gradients(program):
    """Whether gradients of several readers of a value may add up. The first one to come decides about the strides of the sum, and
    within TorchScript's differentiable graphs that is another one than in eager."""
    read = Counter([n for _, st in program.statements for n in st.operands] + list(program.results))
    return max(read.values()) > 1


def compare(actual, expected, adds_gradients=False):
    """What is wrong with the outcome of a call; "" for nothing."""
    if actual.keys() != expected.keys():
        return f"gives {sorted(actual)}, eager {sorted(expected)}"
    for name, (eager, exact, allowed) in expected.items():
        mine = actual[name]
        said = [(t.dtype, tuple(t.shape), t.device) for t in (mine, eager)]
        if said[0] != said[1]:
            return f"{name} is {said[0]}, eager {said[1]}"
        strides = [[s for n, s in zip(t.shape, t.stride()) if n > 1] for t in (mine, eager)]
        free = adds_gradients and name.startswith("gradient")
        if mine.numel() and strides[0] != strides[1] and not free:
            return f"{name} of {tuple(mine.shape)} has strides {mine.stride()}, eager {eager.stride()}"
        if allowed is None:
            wrong = mine != eager
        else:
            off = (mine.cpu().double() - exact).abs()
            wrong = ~(off <= allowed).to(mine.device)
        if bool(wrong.any()):
            where = wrong.flatten().nonzero()[:3, 0].tolist()
            both = [(i, mine.flatten()[i].item(), eager.flatten()[i].item()) for i in where]
            pairs = [f"[{i}] {a!r}, eager {b!r}" for i, a, b in both]
            bound = "" if allowed is None else f" (allowed: {allowed:.3g})"
            return f"{name}: {int(wrong.sum())} of {wrong.numel()} differ{bound}: {'; '.join(pairs)}"
    return _aliases(actual, expected)


def _aliases(actual, expected):
    """Whether the same tensors share memory."""
    eager = {name: t for name, (t, _, _) in expected.items()}
    shared = [_sharing(found) for found in (actual, eager)]
    return "" if shared[0] == shared[1] else f"share memory: {shared[0]}, in eager: {shared[1]}"


def _sharing(tensors):
    by_place = {}
    for name, t in tensors.items():
        if t.numel() and not name.startswith("gradient"):
            by_place.setdefault(t.untyped_storage().data_ptr(), []).append(name)
    return sorted(names for names in by_place.values() if len(names) > 1)


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
                run.wrong = f"raises {type(error).__name__}: {_last(error)}"
                run.own = _without_fusion(run, device) == run.wrong
    runs = [run for run in runs if not run.own]
    load(kernels, opt_level, jobs)
    fused, reasons = 0, Counter()
    for run in runs:
        _note(progress, run)
        if not run.wrong:
            with counted() as rise:
                _compare(run, device)
            fused += rise["launches"] > 0
    for reason, count in tsfuser.stats()["fallbacks"].items():
        reasons[reason] += count
    return fused, reasons


def _without_fusion(run, device):
    """What TorchScript raises without fusion; "" for nothing."""
    try:
        with torch.jit.fuser("fuser0"):
            run.scripted = script(run.program.source())
            for call in range(len(run.program.calls)):
                _last_of(run, call, device)
    except Exception as error:
        return f"raises {type(error).__name__}: {_last(error)}"
    return ""


def _last_of(run, call, device):
    """The last of some calls."""
    for _ in range(PROFILED):
        found = outcome(run.scripted, run.program.arguments(call, device), run.program.gradients)
    return found


def _compare(run, device):
    with modes(**MODES[run.seed % len(MODES)]), tsfuser.fuser(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = dict(tsfuser.stats()["fallbacks"])
        for call, expected in enumerate(run.expected):
            try:
                actual = outcome(run.scripted, run.program.arguments(call, device), run.program.gradients)
                run.wrong = compare(actual, expected, adds_gradients(run.program))
                if run.wrong and not compare(actual, _torchscripts_own(run, call, device)):
                    run.wrong = ""
            except Exception as error:
                run.wrong = f"raises {type(error).__name__}: {_last(error)}"
            if run.wrong:
                run.wrong = f"call {call}: {run.wrong}"
                return
        for reason, count in tsfuser.stats()["fallbacks"].items():
            if any(word in reason for word in BROKEN) and count != before.get(reason, 0):
                run.wrong = f"refused: {reason[:2000]}"


def _torchscripts_own(run, call, device):
    """What TorchScript gives with no fuser at all, as `expectation` has it: some gradients of its own formulas are
    not eager's, and are there where eager has none, as through a cast to bool."""
    with torch.jit.fuser("none"):
        unfused = _last_of(Run(run.seed, run.program, script(run.program.source())), call, device)
    allowed = {name: bound for name, (_, _, bound) in run.expected[call].items()}
    for name, t in unfused.items():
        if t.is_floating_point():
            allowed.setdefault(name, _roundings(t.dtype, t.cpu().double()))
    return {name: (t, t.cpu().double(), allowed.get(name)) for name, t in unfused.items()}


def _last(error):
    """The last line of its message or, where it has none, its place."""
    lines = str(error).strip().splitlines() or traceback.format_tb(error.__traceback__)
    return lines[-1] if lines else ""


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


def sweep(seeds, device, opt_level=1, jobs=1, batch=150, report=print):
    """Runs the programs of `seeds`; returns the counts and the failed Runs."""
    counts, failed, reasons, start = Counter(), [], Counter(), time.monotonic()
    place = Path(tempfile.gettempdir()) / f"tsfuser-random-{os.getpid()}.seed"
    progress = os.open(place, os.O_CREAT | os.O_WRONLY)
    seeds = list(seeds)
    for k in range(0, len(seeds), batch):
        made = ((seed, generate(seed)) for seed in seeds[k : k + batch])
        runs = [run for run in (prepared(s, p, device) for s, p in made if p is not None) if run]
        fused, refused = execute(runs, device, opt_level, jobs, progress)
        reasons += refused
        runs = [run for run in runs if not run.own]
        counts += Counter(programs=len(runs), fused=fused, seeds=len(seeds[k : k + batch]))
        counts += Counter(trained=sum(r.program.gradients for r in runs))
        for run in runs:
            if run.wrong:
                failed.append(run)
                report(f"seed {run.seed}: {run.wrong}")
        minutes = (time.monotonic() - start) / 60
        report(
            f"{counts['seeds']} seeds, {counts['programs']} programs ({counts['trained']} with gradients), "
            f"{counts['fused']} fused, {len(failed)} wrong, {counts['programs'] / minutes:.0f} a minute"
        )
    os.close(progress)
    place.unlink()
    return counts, failed, reasons


def main():
    from random_shrink import script_of, shrink

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--target", choices=("cpu", "cpu-fibers", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=150, help="programs a batch")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    parser.add_argument("--opt", type=int, default=1, help="-O of g++; 1 compiles fast, 3 is what users get")
    parser.add_argument("--show", action="store_true", help="only print the programs, as scripts")
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    faulthandler.enable()
    seeds = range(given.seed, given.seed + given.count)
    with target(given.target) as device:
        if given.show:
            for program in filter(None, map(generate, seeds)):
                print(script_of(program, given.target, "as it came"))
            return
        counts, failed, reasons = sweep(
            seeds, device, given.opt, given.jobs, given.batch, lambda line: print(line, flush=True)
        )
        for reason, count in reasons.most_common(12):
            print(f"refused {count} x {reason.splitlines()[0]}")
        for run in failed[:20]:
            least, wrong = (run.program, run.wrong) if given.no_shrink else shrink(run, device)
            print(f"\n# ---- seed {run.seed}\n{script_of(least, given.target, wrong, run.seed)}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
