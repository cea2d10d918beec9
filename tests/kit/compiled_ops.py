"""torch's own list of ops through torch.compile, forward and backward, against eager and double.

    export PYTHONPATH=.:tests
    python -m kit.compiled_ops [--part 0:8] [--count 1] [--dtype float32] [--layouts given,reversed]

One op is a group. What torch's `aot_eager` gives, too, is no difference: it runs the same graphs op by op.
With `--layouts`, inputs have each of these layouts, and the strides of results and gradients are compared as
well: they must be eager's, or those that torch's fake kernels promise. Exit status 1: there was a difference.
"""

import argparse
import itertools
import sys
import warnings
from collections import Counter
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tsfuser
from kit.batch import collecting, load
from kit.nearness import difference
from kit.opinfo import op_db, programs, title, transposed
from kit.opsweep import STEPS, _exactly, evaluate, plain
from kit.random_modules import strides
from kit.support import incoming_gradient

CHUNK = 40  # programs whose kernels are compiled together
ROUNDINGS = 8  # of a gradient
#: Other numbers than eager's, or results that are what memory held before.
LEFT_OUT = ("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential", "geometric")
LEFT_OUT += ("cauchy", "empty", "rrelu", "log_normal", "svd_lowrank", "pca_lowrank", "fractional_max_pool")


def channels_last(program):
    """The program with tensors of three dims and more whose dim 1 is the innermost in memory."""
    return replace(program, arguments=[_channels_last(a) for a in program.arguments])


def _channels_last(value):
    if not isinstance(value, torch.Tensor) or value.dim() < 3:
        return value
    return value.detach().movedim(1, -1).contiguous().movedim(-1, 1)


LAYOUTS = {"given": lambda program: program, "reversed": transposed, "channels_last": channels_last}


def sweep(infos, dtype, count=1, report=print, layouts=(), device="cpu"):
    """Returns how many programs ran, how many of them in groups, and (op, what is wrong). With `layouts`, the
    inputs have these, and strides are compared."""
    ran, wrong = Counter(), []
    cases = itertools.chain.from_iterable(_cases(info, dtype, count, layouts, device) for info in infos)
    while part := list(itertools.islice(cases, CHUNK)):
        torch._dynamo.reset()
        functions = [_compiled(program) for _, program, _ in part]
        with collecting() as kernels:
            for function, (_, program, _) in zip(functions, part):
                _outcome(function, program)
        load(kernels)
        for function, (name, program, expected) in zip(functions, part):
            before = tsfuser.stats()["launches"]
            what = problem(_outcome(function, program), *expected)
            ran["programs"] += 1
            ran["fused"] += tsfuser.stats()["launches"] > before
            if what and problem(_outcome(_compiled(program, "aot_eager"), program), *expected) is None:
                wrong.append((name, what))
                report(f"{name}: {program.text}: {what}")
        report(f"{ran['programs']} programs, {ran['fused']} fused, {len(wrong)} wrong")
    return ran, wrong


def _cases(info, dtype, count, layouts, device):
    """(op, program, (eager's results, those in double, and strides that are allowed beside eager's))"""
    supported = info.supported_dtypes(torch.device(device).type)
    if any(word in info.name for word in LEFT_OUT) or dtype not in supported:
        return
    try:
        found = list(programs(info, dtype, device, None if layouts else count))
    except Exception:  # samples that this build of torch cannot make
        return
    if layouts:  # those of the most dims
        found = sorted(found, key=_dims, reverse=True)[:count]
    for program in found:
        seen = []
        for layout in layouts or ("given",):
            try:
                moved = LAYOUTS[layout](program)
                lies = [strides(a) for a in moved.arguments if isinstance(a, torch.Tensor)]
                eager = _evaluate(plain(moved.source), moved.arguments)
                exact = _exactly(moved, True)
            except Exception:  # a sample of an error, or sparse
                continue
            if lies not in seen and all(t.layout == torch.strided for t in eager):
                seen.append(lies)
                name = f"{title(info)}, {layout}" if layouts else title(info)
                yield name, moved, (eager, exact, _traced_strides(moved) if layouts else None)


def _dims(program):
    tensors = (a for a in program.arguments if isinstance(a, torch.Tensor) and a.numel() > 1)
    return max((a.dim() for a in tensors), default=0)


def _traced_strides(program):
    """Strides of results and gradients as torch's fake kernels have them; none if they depend on values."""
    with FakeTensorMode() as mode:
        try:
            given = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in program.arguments]
            return [strides(t) for t in _evaluate(plain(program.source), given)]
        except Exception:  # noqa: BLE001: an op without a fake kernel, or whose sizes depend on values
            return []


def _compiled(program, backend="tsfuser"):
    options = {"options": {"single_node": True}} if backend == "tsfuser" else {}
    return torch.compile(plain(program.source), backend=backend, dynamic=False, **options)


def _outcome(function, program):
    """The results, or what was raised."""
    try:
        return _evaluate(function, program.arguments)
    except Exception as error:
        return error


def _evaluate(function, arguments):
    """Results and gradients. AOTAutograd gives an incoming gradient the layout of the result; so it has that
    from the start."""
    return evaluate(function, arguments, True, lambda t: torch.empty_like(t).copy_(incoming_gradient(t)))


def problem(found, eager, exact, traced=None):
    """How results, or an exception, differ from eager's; None if they do not. Strides may if `traced` is
    None; else they are eager's, or those of `traced`."""
    if isinstance(found, Exception):
        return f"raises {type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
    if len(found) != len(eager):
        return f"{len(found)} results, eager {len(eager)}"
    for k, (ours, plainly, wide) in enumerate(zip(found, eager, exact)):
        if ours.shape == plainly.shape and ours.stride() != plainly.stride():
            if traced is not None and strides(ours) not in (strides(plainly), *traced[k : k + 1]):
                return f"result {k} has strides {ours.stride()}, eager {plainly.stride()}"
            ours = torch.empty_like(plainly, dtype=ours.dtype).copy_(ours)
        exact_here = wide.to(plainly.device) if wide.shape == plainly.shape else plainly
        what = difference(ours, plainly, exact_here, STEPS, ROUNDINGS)
        if what:
            return f"result {k} {what}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="0:1", help="part k of n")
    parser.add_argument("--count", type=int, default=1, help="samples an op")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layouts", default="", help=f"compare strides, too; some of {', '.join(LAYOUTS)}")
    arguments = parser.parse_args()
    first, step = map(int, arguments.part.split(":"))
    warnings.simplefilter("ignore")
    layouts = tuple(filter(None, arguments.layouts.split(",")))
    infos, dtype = op_db()[first::step], getattr(torch, arguments.dtype)
    _, wrong = sweep(infos, dtype, arguments.count, layouts=layouts)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
