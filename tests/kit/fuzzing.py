"""The program of scripts/fuzz: tries seeds on each target of `kit.fuzz`, in a process that may crash or hang.

In: how long, which targets, from which seed on. Out: a line for each target, and its findings. Example:

    PYTHONPATH=.:tests python -m kit.fuzzing --seconds 300 --only fusion,cache
"""

import argparse
import multiprocessing
import random
import sys
import time
import warnings

from kit import fuzz

MOST_FINDINGS = 5  # of a target
MOST_SECONDS = 60


def work(target, seeds, until, sender):
    """Tries the seeds; sends each before it is tried, and each finding."""
    for seed in seeds:
        if time.monotonic() > until:
            break
        sender.send((seed, None))
        if finding := target.finding(random.Random(seed)):
            sender.send((seed, finding))


def tried(target, first, last, until):
    """Tries the seeds from `first` to `last`, until that time. Gives how many, and findings by seed."""
    seed, findings = first - 1, {}
    while seed < last and time.monotonic() < until and len(findings) < MOST_FINDINGS:
        receiver, sender = multiprocessing.Pipe(False)
        child = multiprocessing.get_context("fork").Process(
            target=work, args=(target, range(seed + 1, last + 1), until, sender)
        )
        child.start()
        sender.close()
        try:
            while len(findings) < MOST_FINDINGS:
                if not receiver.poll(MOST_SECONDS):
                    findings[seed] = f"takes more than {MOST_SECONDS} seconds"
                    break
                seed, finding = receiver.recv()
                if finding:
                    findings[seed] = finding
        except EOFError:
            child.join()
            if child.exitcode:
                findings[seed] = f"the process ends with {child.exitcode}"
        child.kill()
        child.join()
    return seed - first + 1, findings


def main():
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description="Damages texts that levels of the compiler print, and files of the disk cache.",
    )
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together (60)")
    parser.add_argument("--only", metavar="TARGET,...", help=f"of {', '.join(fuzz.TARGETS)}")
    parser.add_argument("--seed", type=int, help="this one alone")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(fuzz.TARGETS)
    if unknown := set(names) - set(fuzz.TARGETS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(fuzz.TARGETS)}")
    warnings.simplefilter("ignore", SyntaxWarning)  # Python's, about damaged texts
    failed = False
    for name in names:
        target = fuzz.TARGETS[name]()
        first = time.time_ns() // 1000 if options.seed is None else options.seed
        last = first if options.seed is not None else first + 10**9
        count, findings = tried(target, first, last, time.monotonic() + options.seconds / len(names))
        print(f"{name}: {count} inputs, {len(findings)} findings", flush=True)
        for seed, finding in findings.items():
            failed = True
            print(f"\nscripts/fuzz --only {name} --seed {seed}\n{finding}\n", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
