"""Runs warm functions with changed arguments, and compares what they give or raise with eager.

In: `Trial`s (rejected.py). Out: a `Tally`. Example:

    tally = Tally()
    sweep(trials([info], torch.float32), tally)
    assert not tally.wrong
"""

import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch

import tsfuser
from kit.batch import collecting, load
from kit.nearness import difference
from kit.support import copy_of, groups, incoming_gradient

CALLS = 4  # until a function is fused, in training, too
STEPS = 24


def plain(source):
    space = {"torch": torch, "Tensor": torch.Tensor, "List": list}
    source = source.replace("List[int]", "list")
    exec(source, space)
    return space["f"]


def outcome(function, arguments, gradients=False):
    """("gives", tensors); or ("raises", the exception's type, its last line). `gradients`: the backward runs,
    too; other tests look at what it gives."""
    arguments = [_leaf(a, gradients) for a in arguments]
    try:
        out = function(*arguments)
        results = [
            t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)
        ]
        leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
        ends = [t for t in results if t.requires_grad]
        if leaves and ends:
            torch.autograd.grad(ends, leaves, [incoming_gradient(t) for t in ends], allow_unused=True)
        return "gives", [t.detach() for t in results]
    except Exception as error:
        return "raises", type(error), (str(error).strip().splitlines() or [""])[-1]


def _leaf(a, gradients):
    if not isinstance(a, torch.Tensor):
        return list(a) if isinstance(a, list) else a
    moves = a.is_floating_point() or a.is_complex()
    return copy_of(a.detach()).requires_grad_(gradients and moves)


@dataclass
class Tally:
    trials: int = 0
    checks: int = 0
    errors: int = 0
    alone: list = field(default_factory=list)
    fused: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)

    def __str__(self):
        said = f"{self.checks} checks of {self.trials} functions, {self.errors} of them errors in eager"
        said += f", {self.fused.total()} functions fused"
        return said + (f", {len(self.alone)} as torch alone has it" if self.alone else "")


def sweep(trials, tally, gradients=False):
    """Runs the trials: first noting kernels, then for good."""
    warm = []
    with warnings.catch_warnings(), tsfuser.fuser():
        warnings.simplefilter("ignore")
        with collecting() as kernels:
            for trial in trials:
                try:
                    scripted = trial.make()
                except Exception:
                    continue
                if all(outcome(scripted, trial.valid, gradients)[0] == "gives" for _ in range(CALLS)):
                    for _ in range(2):  # the second time guards accept what they missed the first time
                        for arguments in trial.changed:
                            outcome(scripted, arguments, gradients)
                    warm.append((trial, scripted))
        load(kernels)
        for trial, scripted in warm:
            _check(trial, scripted, tally, gradients)


def _check(trial, scripted, tally, gradients):
    tally.trials += 1
    outcome(scripted, trial.valid, gradients)
    if groups(scripted):
        tally.fused[trial.name] += 1
    eager, alone = trial.eager, []
    for arguments in trial.changed:
        expected, actual = outcome(eager, arguments, gradients), outcome(scripted, arguments, gradients)
        tally.checks += 1
        tally.errors += expected[0] == "raises"
        problem = differs(actual, expected, trial.random)
        if problem is None or differs(_filled(eager, arguments, gradients), expected, trial.random):
            continue
        if not alone:
            alone.append(_alone(trial, gradients))
        shown = [
            f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a)
            for a in arguments
        ]
        said = f"{trial.name}: {trial.text} with {', '.join(shown)}: {problem}"
        same = differs(actual, outcome(alone[0], arguments, gradients), trial.random) is None
        (tally.alone if same else tally.wrong).append(said)


def _filled(eager, arguments, gradients):
    """What eager gives where new memory is filled with NaN: something else, where it reads what nobody wrote
    (`pad` with a negative size, circular)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return outcome(eager, arguments, gradients)
    finally:
        torch.use_deterministic_algorithms(before)


def _alone(trial, gradients):
    """The function by TorchScript without tsfuser, optimised."""
    scripted = trial.make()
    enabled = tsfuser._C.enabled()
    tsfuser._C.set_enabled(False)
    try:
        for _ in range(CALLS):
            outcome(scripted, trial.valid, gradients)
    finally:
        tsfuser._C.set_enabled(enabled)

    def run(*arguments):
        tsfuser._C.set_enabled(False)
        try:
            return scripted(*arguments)
        finally:
            tsfuser._C.set_enabled(enabled)

    return run


def differs(actual, expected, random=False):
    if actual[0] != expected[0]:
        return f"{actual[0]} {_shown(actual)}, but {expected[0]} {_shown(expected)}"
    if actual[0] == "raises":
        return None
    if len(actual[1]) != len(expected[1]):
        return f"{len(actual[1])} results, not {len(expected[1])}"
    for k, (mine, other) in enumerate(zip(actual[1], expected[1])):
        if random:
            problem = (
                None if (mine.dtype, mine.shape) == (other.dtype, other.shape) else "another dtype or shape"
            )
        else:
            problem = difference(mine, other, other, STEPS, 4)
        if problem:
            return f"result {k} {problem}"
    return None


def _shown(outcome):
    return (
        str(outcome[1:])[:150]
        if outcome[0] == "raises"
        else str([f"{t.dtype}{list(t.shape)}" for t in outcome[1]])
    )
