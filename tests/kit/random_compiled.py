"""Random programs through torch.compile, against eager.

In: Runs (random_programs.py). Out: what is wrong with each, in the Run. The programs and what they should
give are those of TorchScript, but for strides: those of a result are what torch's metadata promise while it
traces, which now and then are others than those of its kernels. Those of networks of modules must be what
eager has, or what torch's fake kernels give. What torch's own `aot_eager` gives, too, is no difference: it
runs the same graphs op by op. Nor is a backward that raises because an input was written to, if it does not
with `{"recompute": False}`. Example:

    refusals = execute(runs, "cpu")
"""

import warnings
from collections import Counter

import torch

import tsfuser
from kit.batch import collecting, load
from kit.random_modules import strides
from kit.random_outcome import RAISED, REFUSED
from kit.random_scripted import note
from kit.support import counted

#: Families whose every op is in a group, or is called by C++: nothing is left to Python.
WHOLE = ("updates", "optimizers")
#: torch.compile's `dynamic` by the seed of a program.
DYNAMIC = (True, None)
#: Each optimizer that is made compiles `step` anew, which is one function for all.
LIMITS = {"recompile_limit": 10000, "accumulated_recompile_limit": 10000}


def compiled(run, backend="tsfuser", **choices):
    """The program, compiled anew: for any sizes at once, or for those of the first call at first. Or what
    compiles the step of an optimizer, or a module."""
    dynamic = DYNAMIC[run.seed % 2]
    if "optimizers" in run.program.features:
        return lambda step: torch.compile(step, backend=backend, **choices)
    if "modules" in run.program.features:
        return lambda module: torch.compile(module, backend=backend, dynamic=dynamic, **choices)
    space = {"torch": torch, "Tensor": torch.Tensor}
    exec(run.program.source(), space)
    return torch.compile(space["f"], backend=backend, dynamic=dynamic, **choices)


def problem(run, device, function):
    """What is wrong with the calls of a program that `function` makes; "" for nothing."""
    traced = run.program.traced_strides(device) if "modules" in run.program.features else None
    for call in range(len(run.expected)):
        try:
            found = run.program.outcome(function, call, device)
        except Exception as error:
            return f"call {call} raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if _both_refuse(found, run.expected[call]):
            continue
        free = {name for name, t in found.items() if traced is None or traced.get(name) == strides(t)}
        wrong = run.differ(found, call, device, free)
        if wrong:
            return f"call {call}: {next(iter(wrong.values()))}"
    return ""


def _both_refuse(found, expected):
    """Whether both raise: the messages name what was traced."""
    return all(any(name.startswith(REFUSED) for name in names) for names in (found, expected))


def execute(runs, device, opt_level=1, jobs=1, progress=None):
    """Runs programs compiled; what is wrong stays in the Runs. Returns the reasons of refusals."""
    with warnings.catch_warnings(), torch._dynamo.config.patch(**LIMITS):
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        functions = [compiled(run) for run in runs]
        with collecting() as kernels:
            for run, function in zip(runs, functions):
                note(progress, run)
                before = tsfuser.stats()
                problem(run, device, function)
                run.wrong = _unfused(run, before, tsfuser.stats())
        load(kernels, opt_level, jobs)
        for run, function in zip(runs, functions):
            note(progress, run)
            with counted() as rise:
                what = problem(run, device, function)
            run.launches = rise["launches"]
            if what and _is_allowed(what, run, device):
                run.excused = what
            else:
                run.wrong = what or run.wrong
    return Counter(tsfuser.stats()["fallbacks"])


def _unfused(run, before, after):
    """Which graphs were given up since, or ops left to Python that never should be; "" for none."""
    for name in ("graphs_unfused", "left_to_python"):
        new = [reason for reason, count in after[name].items() if count > before[name].get(reason, 0)]
        if new and (name == "graphs_unfused" or set(WHOLE) & set(run.program.features)):
            return f"{name}: {new[0]}"
    return ""


def _is_allowed(what, run, device):
    """Whether this difference from eager is torch's, or in the guide's limits."""
    if RAISED in what and not problem(run, device, compiled(run, options={"recompute": False})):
        return True
    return _same(what, problem(run, device, compiled(run, "aot_eager")))


def _same(what, other):
    """Whether the same result of the same call is wrong, or the same call raises: by how much is a matter of
    rounding, and errors name the backend."""
    for end in (" raises ", " differ ("):
        if end in what:
            return what.partition(end)[0] == other.partition(end)[0] and end in other
    return what == other
