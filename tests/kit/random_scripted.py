"""Random programs through TorchScript: fused, against eager and against TorchScript without fusion.

In: Runs (random_programs.py). Out: what is wrong with each, in the Run. The seed of a program also chooses
the modes that it runs in: guards off, groups of one node, no horizontal fusion. What TorchScript without
fusion gives, too, is no difference. Example:

    refusals = execute(runs, "cpu")
"""

import contextlib
import os
import traceback
import warnings
from collections import Counter
from dataclasses import replace

import torch

import tsfuser
from kit.batch import collecting, load
from kit.random_compare import all_roundings, differences, gradients_with_free_strides
from kit.random_outcome import RAISED, saved_copies
from kit.support import counted, script
from tsfuser.planning import failures

PROFILED = 3  # calls until torch has optimised a function, in training
MODES = ({}, {}, {"single": True}, {"guards": False}, {"horizontal": False})
BROKEN = ("failed to plan", "failed on kernel", "cannot load")  # refusals that are mistakes of ours


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


def execute(runs, device, opt_level=1, jobs=1, progress=None):
    """Runs programs fused; what is wrong stays in the Runs. Returns the reasons of refusals."""
    with collecting() as kernels, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in runs:
            note(progress, run)
            try:
                with modes(**MODES[run.seed % len(MODES)]), tsfuser.fuser(), given_up(run):
                    run.scripted = script(run.program.source())
                    for call in range(len(run.program.calls)):
                        _last_of(run, call, device)
            except Exception as error:
                run.wrong = f"raises {_last(error)}"
                run.own = _without_fusion(run, device) == run.wrong
    runs = [run for run in runs if not run.own]
    load(kernels, opt_level, jobs)
    for run in runs:
        note(progress, run)
        if not run.wrong:
            with counted() as rise:
                _compare(run, device)
            run.launches = rise["launches"]
    return Counter(tsfuser.stats()["fallbacks"])


@contextlib.contextmanager
def given_up(run):
    """A pass that gives up on a graph of the program is wrong, though the program runs."""
    failures.forget_warnings()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", tsfuser.TsfuserWarning)
        yield
    found = [str(w.message) for w in said if "gave up" in str(w.message)]
    run.wrong = run.wrong or "".join(found[:1])


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
    with modes(**MODES[run.seed % len(MODES)]), tsfuser.fuser(), given_up(run):
        before = dict(tsfuser.stats()["fallbacks"])
        for call in range(len(run.expected)):
            try:
                actual = run.program.outcome(run.scripted, call, device)
                free = gradients_with_free_strides(run.program, run.expected[call])
                wrong = run.differ(actual, call, device, free)
                run.excused = next(iter(wrong.values()), run.excused)
                for first in (False, True) if wrong else ():  # each tensor may be eager's or TorchScript's
                    own = differences(actual, _torchscripts_own(run, call, device, actual, first), free)
                    wrong = {name: what for name, what in wrong.items() if name in own}
                run.wrong = next(iter(wrong.values()), "")
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


def _torchscripts_own(run, call, device, actual, first=False):
    """What TorchScript gives with no fuser at all, as `expectation` has it: some gradients of its own
    formulas are not eager's, and are there where eager has none, as through a cast to bool. After the same
    calls, as they decide what it specialises on, and with gradients for the results only that require one in
    `actual`, as in eager: of another set of them the gradients of the inputs are other sums. Or what it gives
    in the `first` call, before it has profiled anything: what it does to the graph by then, whatever follows
    keeps. So it takes two ops for one, though behind a loop without a turn their operand is written."""
    moving = [k for k in range(len(run.program.results)) if actual.get(f"requires {k}", True)]

    def outcome():
        plain = replace(run, scripted=script(run.program.source()))
        if first:
            return plain.program.outcome(plain.scripted, call, device, moving=moving)
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
    expected = run.expected[call]
    others = differences(unfused, expected, gradients_with_free_strides(run.program, expected))
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


def note(progress, run):
    """Leaves the seed in a file, for when the process dies."""
    if progress is not None:
        os.pwrite(progress, f"{run.seed:<12}\n".encode(), 0)
