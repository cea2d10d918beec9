"""Random programs in processes of their own: one that dies takes no other with it.

In: a `Job`, how many processes. Out: counts on stdout, each difference with its seed, and the least
programs as scripts. A process is this module: it reads a Job as JSON and prints a line of JSON for each batch
and difference.
"""

import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

PATHS = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # of kit and of tsfuser
HANGS = 900  # seconds after which a batch counts as one that hangs


@dataclass(frozen=True)
class Job:
    """Seeds from `first` to `last` - 1 without `skipped`, through `door`, of random_programs.py. With
    `shrink` only the least program that differs is told."""

    first: int
    last: int
    features: tuple
    target: str
    batch: int
    opt: int
    door: str = "script"
    skipped: tuple = ()
    shrink: bool = False


DOORS = {"script": ("script",), "compile": ("compile",), "both": ("script", "compile")}


def run_jobs(job, jobs, shrunk):
    """The exit status: 1 where something differs or dies."""
    total, failed, lock, start = Counter(), {}, threading.Lock(), time.monotonic()

    def told(line):
        with lock:
            if "counts" in line:
                total.update(line["counts"])
                print(summary(total, time.monotonic() - start), flush=True)
            elif "wrong" in line:
                failed[line["seed"], line.get("door", job.door)] = line["wrong"]
                print(f"seed {line['seed']} {line.get('door', '')}: {line['wrong']}", flush=True)
            elif "script" in line:
                print(f"\n# ---- seed {line['seed']}\n{line['script']}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda part: _through(part, told), _parts(job, jobs)))
    print(summary(total, time.monotonic() - start), flush=True)
    print(table(total), flush=True)
    alone = [
        replace(job, first=seed, last=seed + 1, door=door, shrink=True)
        for seed, door in sorted(failed)[:shrunk]
    ]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: _run(one, told), alone))
    return int(bool(failed))


def _parts(job, jobs):
    """The job in parts of a few batches, in turn of each door."""
    seeds = job.last - job.first
    count = min(seeds, max(jobs, seeds // max(4 * job.batch, 1)))
    ends = [job.first + seeds * k // count for k in range(count + 1)]
    parts = [replace(job, first=a, last=b) for a, b in zip(ends, ends[1:])]
    return [replace(part, door=door) for part in parts for door in DOORS[job.door]]


def table(total):
    """By door and family: programs, how many of a hundred ran fused, differences. A program is counted in
    each of its families, and once in the sums."""
    rows = sorted({tuple(name.split(" ")[:2]) for name in total if name.endswith(" programs")})
    lines = [f"{'door':<9}{'family':<12}{'programs':>9}{'fused %':>9}{'differences':>13}"]
    for door, family in rows:
        of = {what: total[f"{door} {family} {what}"] for what in ("programs", "fused", "differences")}
        share = 100 * of["fused"] / max(of["programs"], 1)
        lines.append(f"{door:<9}{family:<12}{of['programs']:>9}{share:>9.1f}{of['differences']:>13}")
    return "\n".join(lines)


def summary(total, seconds):
    """One line."""
    t = total
    return (
        f"{t['seeds']} seeds, {t['programs']} programs ({t['trained']} with gradients, {t['fused']} fused), "
        f"{t['calls']} calls, {t['launches']} fused launches, {t['differences']} differences "
        f"({t['excused']} more without fusion as well), {t['died']} died, {seconds:.0f} s"
    )


def _through(job, told):
    """The whole job, in another process where one dies."""
    while job.first < job.last:
        died, reached = _run(job, told)
        if died is None:
            return
        seed, why = died
        told({"seed": seed, "door": job.door, "wrong": why})
        told({"counts": {"died": 1}})
        if seed in job.skipped:
            return  # it dies whatever it runs
        job = replace(job, first=reached, skipped=(*job.skipped, seed))


def _run(job, told):
    """((seed, why) where the process died, the first seed of the batch that was not finished)."""
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
    cache = Path(tempfile.gettempdir()) / f"tsfuser-tests-{os.getuid()}"
    environment.setdefault("TSFUSER_CACHE_DIR", str(cache))
    environment["PYTHONPATH"] = os.pathsep.join([*PATHS, environment.get("PYTHONPATH", "")])
    reached, ended = job.first, False
    with tempfile.TemporaryDirectory() as folder:
        progress, errors = Path(folder, "seed"), Path(folder, "errors")
        command = [
            sys.executable,
            "-m",
            "kit.random_jobs",
            json.dumps(dataclasses.asdict(job)),
            str(progress),
        ]
        with open(errors, "w") as stderr:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
            )
            for text in child.stdout:
                if text.startswith('{"'):
                    line = json.loads(text)
                    reached, ended = line.get("reached", reached), "ended" in line
                    told(line)
            status = child.wait()
        if ended and status == 0:
            return None, reached
        seed = (
            int(progress.read_text().split()[0]) if progress.exists() and progress.stat().st_size else reached
        )
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return (seed, f"the process died: {name}: {errors.read_text()[-1500:]}"), reached


def _tell(**line):
    print(json.dumps(line), flush=True)


def main():
    """A process."""
    from kit import random_programs
    from kit.random_shrink import script_of, shrink

    faulthandler.enable()
    given = json.loads(sys.argv[1])
    job = Job(**{**given, "features": tuple(given["features"]), "skipped": tuple(given["skipped"])})
    progress = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
    seeds = [seed for seed in range(job.first, job.last) if seed not in job.skipped]

    def finished(counts, seed):
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(HANGS, exit=True)
        if not job.shrink:
            _tell(counts=counts, reached=seed + 1)

    faulthandler.dump_traceback_later(HANGS, exit=True)
    with random_programs.target(job.target) as device:
        counts, failed, _ = random_programs.sweep(
            seeds,
            device,
            job.opt,
            1,
            job.batch,
            lambda text: None,
            job.features,
            finished,
            progress,
            job.door,
        )
        for run in failed:
            if job.shrink:
                program, wrong = shrink(run, device, job.door)
                _tell(seed=run.seed, script=script_of(program, job.target, wrong, run.seed, job.door))
            else:
                _tell(seed=run.seed, door=job.door, wrong=run.wrong)
    _tell(ended=True)


if __name__ == "__main__":
    main()
