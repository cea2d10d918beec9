"""torch's own list of ops through torch.compile, forward and backward, against eager and double.

    export PYTHONPATH=.:tests
    python -m kit.compiled_ops [--part 0:8] [--count 1] [--dtype float32]

One op is a group. What torch's `aot_eager` gives, too, is no difference: it runs the same graphs op by op.
Exit status 1: there was one.
"""

import argparse
import itertools
import sys
import warnings
from collections import Counter

import torch

import tsfuser
from kit.batch import collecting, load
from kit.nearness import difference
from kit.opinfo import op_db, programs, title
from kit.opsweep import STEPS, _exactly, evaluate, plain

CHUNK = 40  # programs whose kernels are compiled together
ROUNDINGS = 8  # of a gradient
#: Other numbers than eager's, or results that are what memory held before.
LEFT_OUT = ("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential", "geometric")
LEFT_OUT += ("cauchy", "empty", "rrelu", "log_normal", "svd_lowrank", "pca_lowrank", "fractional_max_pool")


def sweep(infos, dtype, count=1, report=print):
    """Returns how many programs ran, how many of them in groups, and (op, what is wrong)."""
    ran, wrong = Counter(), []
    cases = itertools.chain.from_iterable(_cases(info, dtype, count) for info in infos)
    while part := list(itertools.islice(cases, CHUNK)):
        torch._dynamo.reset()
        functions = [_compiled(program) for _, program, *_ in part]
        with collecting() as kernels:
            for function, (_, program, *_) in zip(functions, part):
                _outcome(function, program)
        load(kernels)
        for function, (name, program, eager, exact) in zip(functions, part):
            before = tsfuser.stats()["launches"]
            what = problem(_outcome(function, program), eager, exact)
            ran["programs"] += 1
            ran["fused"] += tsfuser.stats()["launches"] > before
            if what and problem(_outcome(_compiled(program, "aot_eager"), program), eager, exact) is None:
                wrong.append((name, what))
                report(f"{name}: {program.text}: {what}")
        report(f"{ran['programs']} programs, {ran['fused']} fused, {len(wrong)} wrong")
    return ran, wrong


def _cases(info, dtype, count):
    """(op, program, eager's results, those in double)"""
    if any(word in info.name for word in LEFT_OUT) or dtype not in info.supported_dtypes("cpu"):
        return
    try:
        found = list(programs(info, dtype, "cpu", count))
    except Exception:  # samples that this build of torch cannot make
        return
    for program in found:
        try:
            eager = evaluate(plain(program.source), program.arguments, True)
            yield title(info), program, eager, _exactly(program, True)
        except Exception:  # a sample of an error
            continue


def _compiled(program, backend="tsfuser"):
    options = {"options": {"single_node": True}} if backend == "tsfuser" else {}
    return torch.compile(plain(program.source), backend=backend, dynamic=False, **options)


def _outcome(function, program):
    """The results, or what was raised."""
    try:
        return evaluate(function, program.arguments, True)
    except Exception as error:
        return error


def problem(found, eager, exact):
    """How results, or an exception, differ from eager's; None if they do not. Strides may, as neither torch's
    metadata nor thunder promise those of a result."""
    if isinstance(found, Exception):
        return f"raises {type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
    if len(found) != len(eager):
        return f"{len(found)} results, eager {len(eager)}"
    for k, (ours, plainly, wide) in enumerate(zip(found, eager, exact)):
        if ours.shape == plainly.shape and ours.stride() != plainly.stride():
            ours = torch.empty_like(plainly, dtype=ours.dtype).copy_(ours)
        what = difference(ours, plainly, wide if wide.shape == plainly.shape else plainly, STEPS, ROUNDINGS)
        if what:
            return f"result {k} {what}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="0:1", help="part k of n")
    parser.add_argument("--count", type=int, default=1, help="samples an op")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    first, step = map(int, arguments.part.split(":"))
    warnings.simplefilter("ignore")
    _, wrong = sweep(op_db()[first::step], getattr(torch, arguments.dtype), arguments.count)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
