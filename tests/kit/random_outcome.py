"""One call of a function, forward and backward, as named tensors.

In: a function and its arguments. Out: what it gives, gradients, and what became of the inputs. Example:

    outcome(f, [x, 0.5], gradients=True)  # -> {"result 0": ..., "gradient 0": ...}
    with saved_copies():
        outcome(f, [x, 0.5], gradients=True)  # a backward that no write makes raise
"""

import contextlib
import re

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kit.support import copy_of

RAISED = "raised in the backward"
REFUSED = "raises"  # what eager rejects, with the message
REFUSALS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, AttributeError)


def refused(*arguments):
    """`outcome`, or that there is none: what is raised is part of it. So it is in the backward, which eager
    may reject, and a group gives the gradients of the values before the write."""
    try:
        return outcome(*arguments, tolerant=True)
    except REFUSALS as error:
        return {f"{REFUSED} {last_line(error)}": torch.tensor(True)}


def last_line(error):
    """Of its message; without the type, which TorchScript's interpreter writes into it."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"^\w+Error: ", "", lines[-1])


def wide_of(x):
    """The dtype that has the exact values of `x`, a tensor."""
    return torch.complex128 if x.is_complex() else torch.float64


def outcome(
    function,
    arguments,
    gradients,
    backward=None,
    context=None,
    written=(),
    asks=False,
    moving=None,
    tolerant=False,
):
    """Named tensors: results, gradients, and the inputs after the call. `context`, `backward`: contexts of
    the forward and the backward. `written`: numbers of the arguments that are changed between them; that
    the backward then raises is part of the outcome. `asks`: so is which results require gradients. `moving`:
    numbers of the only results that a gradient comes for; None for all that require one. `tolerant`: the
    backward may raise without that, too."""
    with context or contextlib.nullcontext():
        results = list(function(*arguments))
    found = {f"result {k}": t for k, t in enumerate(results)}
    inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
    leaves = [a for a in inputs if a.requires_grad]
    ends = [t for k, t in enumerate(results) if t.requires_grad and (moving is None or k in moving)]
    if asks:
        found |= {f"requires {k}": torch.tensor(t.requires_grad) for k, t in enumerate(results)}
    given = [incoming(t) for t in ends]
    with torch.no_grad():
        for k in written:
            arguments[k].logical_not_() if arguments[k].dtype == torch.bool else arguments[k].add_(1)
    if gradients and leaves and ends:
        try:
            with backward or contextlib.nullcontext():
                grads = torch.autograd.grad(ends, leaves, given, allow_unused=True)
        except RuntimeError:
            if not written and not tolerant:
                raise
            grads = []
            found[RAISED] = torch.tensor(True)
        found |= {f"gradient {k}": g for k, g in enumerate(grads) if g is not None}
    found |= {f"input {k} afterwards": t for k, t in enumerate(inputs) if not t.requires_grad}
    return {name: t.detach() for name, t in found.items()}


def saved_copies():
    """A context in which autograd saves copies: a value that is written later does not make the backward
    raise, and the gradients are those of the values before the write."""
    return torch.autograd.graph.saved_tensors_hooks(_copy, lambda copy: copy)


def _copy(x):
    with _disable_current_modes(), torch.no_grad():
        return copy_of(x)


def incoming(result):
    """A gradient that is the same in every dtype: multiples of 1/4."""
    steps = (torch.arange(result.numel(), device=result.device) * 7 % 13 - 6).to(torch.float64) / 4
    steps = steps * (1 + 0.5j) if result.is_complex() else steps
    return steps.reshape(result.shape).to(result.dtype)
