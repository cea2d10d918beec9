"""Random programs through torch.compile, against eager.

    export PYTHONPATH=.:tests
    python -m kit.random_compiled --seeds 0:1000 [--target cuda] [--features branches,written]

The programs and what they should give are those of `kit.random_programs`, but for strides: those of a result
are what torch's metadata promise while it traces, which now and then are others than those of its kernels.
What torch's own `aot_eager` gives, too, is no difference: it runs the same graphs op by op. Nor is a backward
that raises because an input was written to, if it does not with `{"recompute": False}`. Exit status 1: there
was one.
"""

import argparse
import sys
import time
import warnings

import torch

import tsfuser
from kit.batch import collecting, load
from kit.random_compare import adds_gradients, differences
from kit.random_families import FEATURES, features_of
from kit.random_outcome import RAISED
from kit.random_programs import prepared, target
from kit.random_world import generate


def compiled(program, backend="tsfuser", **choices):
    """The program, compiled anew for any sizes."""
    space = {"torch": torch, "Tensor": torch.Tensor}
    exec(program.source(), space)
    return torch.compile(space["f"], backend=backend, dynamic=True, **choices)


def problem(run, device, function):
    """What is wrong with the calls of a program that `function` makes; "" for nothing."""
    for call, expected in enumerate(run.expected):
        try:
            found = run.program.outcome(function, call, device)
        except Exception as error:
            return f"call {call} raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for name, (eager, *_) in expected.items():
            if name in found and found[name].shape == eager.shape and found[name].stride() != eager.stride():
                found[name] = torch.empty_like(eager, dtype=found[name].dtype).copy_(found[name])
        wrong = differences(found, expected, adds_gradients(run.program))
        if wrong:
            return f"call {call}: {next(iter(wrong.values()))}"
    return ""


def sweep(seeds, device, features=(), batch=50, report=print):
    """Runs the programs of `seeds`; returns how many there were, and the (seed, what is wrong)."""
    seeds, failed, count, start = list(seeds), [], 0, time.monotonic()
    for k in range(0, len(seeds), batch):
        made = ((s, generate(s, features and features_of(s, features))) for s in seeds[k : k + batch])
        runs = [run for run in (prepared(s, p, device) for s, p in made if p is not None) if run]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            functions = [compiled(run.program) for run in runs]
            with collecting() as kernels:
                for run, function in zip(runs, functions):
                    problem(run, device, function)
            load(kernels)
            for run, function in zip(runs, functions):
                what = problem(run, device, function)
                if what and not _is_allowed(what, run, device):
                    failed.append((run.seed, what))
                    report(f"seed {run.seed}: {what}")
        count += len(runs)
        minutes = (time.monotonic() - start) / 60
        report(f"{count} programs, {len(failed)} wrong, {count / minutes:.0f} a minute")
    return count, failed


def _is_allowed(what, run, device):
    """Whether this difference from eager is torch's, or in the guide's limits."""
    if RAISED in what and not problem(run, device, compiled(run.program, options={"recompute": False})):
        return True
    return _same(what, problem(run, device, compiled(run.program, "aot_eager")))


def _same(what, other):
    """Whether the same result of the same call is wrong, or the same call raises: by how much is a matter of
    rounding, and errors name the backend."""
    for end in (" raises ", " differ ("):
        if end in what:
            return what.partition(end)[0] == other.partition(end)[0] and end in other
    return what == other


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="from:to")
    parser.add_argument("--target", default="cpu", choices=("cpu", "cpu-fibers", "cuda"))
    parser.add_argument("--features", default="", help=f"of {','.join(FEATURES)}, or all")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    features = FEATURES if arguments.features == "all" else tuple(filter(None, arguments.features.split(",")))
    with target(arguments.target) as device:
        _, failed = sweep(range(first, last), device, features)
    print(tsfuser.stats())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
