"""Random programs, fused against eager, through TorchScript or torch.compile.

    export PYTHONPATH=.:tests
    python -m kit.random_programs --seeds 0:20000 --jobs 16 --features all --door both
    python -m kit.random_programs --seeds 0:5000 --target cuda --jobs 4
    python -m kit.random_programs --seeds 1234:1235 --show     the program of one seed, as a script

The program of a seed is always the same one; where there are `--features` (random_families.py), its seed also
chooses which of them it has. random_scripted.py and random_compiled.py say what a door runs and what is no
difference there. Kernels are compiled in batches, in processes of their own: one that dies is reported with
its seed, and the rest goes on in another. A program that differs is cut down to the least that still differs
and printed as a script of its own. The last lines are a table: by door and family how many programs there
were, how many of them ran fused, and how many differ. Exit status 1: one did.
"""

import argparse
import contextlib
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import tsfuser
from kit.launches import FIBERS
from kit.random_compare import TRIALS, differences, expectation
from kit.random_families import ALONE, FEATURES, features_of
from kit.random_modules import generate_network
from kit.random_optimizers import generate_optimizer
from kit.random_outcome import RAISED, REFUSALS
from kit.random_world import generate
from tsfuser import options


@dataclass
class Run:
    """A program with what its calls should give, its fused function, and what is wrong."""

    seed: int
    program: object
    scripted: object = None
    expected: list = None
    wrong: str = ""
    own: bool = False  # whether it raises without tsfuser, too
    launches: int = 0  # in one call of each kind
    excused: str = ""  # what is other than in eager, but also without tsfuser
    measured: bool = False  # whether `expected` has measured how far off a result may be

    def differ(self, found, call, device, free):
        """Name -> what is wrong with an outcome. How far off it may be is measured only if something is."""
        wrong = differences(found, self.expected[call], free)
        if wrong and not self.measured:
            self.measured = True
            try:
                self.expected = _expected(self.program, device, TRIALS)
            except ValueError:  # it cannot be
                return {}
            wrong = differences(found, self.expected[call], free)
        return wrong


@contextlib.contextmanager
def target(name):
    """The device of a target: `cpu`, `cpu-fibers` or `cuda`."""
    with options.override(host_launch=FIBERS if name == "cpu-fibers" else "block"):
        tsfuser.reset()
        yield "cuda" if name == "cuda" else "cpu"


def program_of(seed, features):
    """The program of a seed, with one to three of the families `features`; None where it gives none."""
    chosen = features and features_of(seed, features)
    makers = {("optimizers",): generate_optimizer, ("modules",): generate_network}
    return makers[chosen](seed) if chosen in makers else generate(seed, chosen)


def prepared(seed, program, device):
    """A Run with its expectations, or None where eager gives nothing to compare with."""
    try:
        return Run(seed, program, expected=_expected(program, device, 0))
    except (ValueError, AssertionError, *REFUSALS):
        return None


def _expected(program, device, trials):
    if set(ALONE) & set(program.features):
        return [program.expected(device, trials)]
    return [expectation(program, call, device, trials) for call in range(len(program.calls))]


def executor(door):
    """What runs Runs through `script` or `compile`, and leaves in them what is wrong. It returns the reasons
    of refusals."""
    from kit import random_compiled, random_scripted

    return {"script": random_scripted.execute, "compile": random_compiled.execute}[door]


def fails(seed, program, device, door="script"):
    """What is wrong with one program; "" for nothing."""
    run = prepared(seed, program, device)
    if run is None:
        return ""
    executor(door)([run], device, opt_level=3)
    return "" if run.own else run.wrong


def sweep(
    seeds, device, opt_level=1, jobs=1, batch=150, report=print, features=(), finished=None, progress=None,
    door="script",
):  # fmt: skip
    """Runs the programs of `seeds`, of the families `features`; returns the counts, the failed Runs and why
    groups were refused. `finished(counts, seed)` is called after each batch, with its last seed."""
    counts, failed, reasons, start = Counter(), [], Counter(), time.monotonic()
    seeds = list(seeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(0, len(seeds), batch):
            part = seeds[k : k + batch]
            made = ((seed, program_of(seed, features)) for seed in part)
            made = [(s, p) for s, p in made if p is not None and door in p.doors]
            runs = [run for run in (prepared(s, p, device) for s, p in made) if run]
            reasons += executor(door)(runs, device, opt_level, jobs, progress)
            runs = [run for run in runs if not run.own]
            here = _counts(runs, door) + Counter(seeds=len(part))
            counts += here
            for run in runs:
                if run.wrong:
                    failed.append(run)
                    report(f"seed {run.seed}: {run.wrong}")
            if finished:
                finished(here, part[-1])
            minutes = (time.monotonic() - start) / 60
            report(
                f"{counts['seeds']} seeds, {counts['programs']} programs, "
                f"{counts['trained']} of them with gradients, {counts['fused']} fused, "
                f"{len(failed)} wrong, {counts['programs'] / minutes:.0f} a minute"
            )
    return counts, failed, reasons


def _counts(runs, door):
    """Of all programs, and of each family. A program is of up to three."""
    found = Counter(programs=len(runs), fused=sum(r.launches > 0 for r in runs))
    found["trained"] = sum(r.program.gradients for r in runs)
    found["calls"] = sum(len(r.program.calls) for r in runs)
    found["launches"] = sum(r.launches for r in runs)
    found["differences"] = sum(bool(r.wrong) for r in runs)
    found["excused"] = sum(bool(r.excused) for r in runs)
    found["raises"] = sum(RAISED in call for r in runs for call in r.expected)
    for run in runs:
        for name in (*(run.program.features or ("plain",)), "~all"):
            found[f"{door} {name} programs"] += 1
            found[f"{door} {name} fused"] += run.launches > 0
            found[f"{door} {name} differences"] += bool(run.wrong)
    return found


def main():
    from kit.random_jobs import Job, run_jobs

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", default="0:1000", help="A:B, from A to B - 1")
    parser.add_argument("--features", default="", help=f"all, or some of: {', '.join(FEATURES)}")
    parser.add_argument("--door", choices=("script", "compile", "both"), default="script")
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
        show(range(first, last), features, given.target, given.door)
        return
    job = Job(first, last, features, given.target, given.batch, given.opt, given.door)
    sys.exit(run_jobs(job, given.jobs, given.shrink))


def show(seeds, features, name, door):
    """Prints programs."""
    from kit.random_shrink import script_of

    for seed in seeds:
        program = program_of(seed, features)
        text = f"# seed {seed}: none"
        print(script_of(program, name, "as it came", seed, door) if program else text)


if __name__ == "__main__":
    main()
