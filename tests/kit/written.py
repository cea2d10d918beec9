"""Programs of one op whose operands, or results, are written to between forward and backward.

In: a `Program` of `opinfo`, and a form of it. Out: sentences, one for each tensor that is written to and each
choice of operands that require a gradient, where TorchScript raises and eager does not, or a gradient is
another one. Kernels are not compiled: what is saved does not depend on them. Example:

    with single_nodes(), tsfuser.fuser(), collecting():
        assert not differences(program, "returned")
"""

import itertools

import torch

from kit.opsweep import PROFILED, plain
from kit.support import copy_of, incoming_gradient, script

MOST = 3  # operands that may require a gradient
RAISED = "raised"
FORMS = ("alone", "returned", "idle", "asked")


def source(program, form):
    """The program's source with its one op `alone`, with a reader but `returned`, or with a result that no
    gradient reaches: `idle`, of which nothing but bools are made, or `asked` for its dtype alone, which a
    differentiable graph does itself."""
    *lines, last = program.source.rstrip().split("\n")
    call = last.strip().removeprefix("return ")
    moving = [f"x{k}" for k, a in enumerate(program.arguments) if _is_moving(a)]
    if form == "alone":
        lines += [f"    return {call}"]
    elif form == "returned":
        lines += [f"    y = {call}", "    return y + 1, y"]
    else:
        first, *others = moving
        lines += [f"    {first} = {first} * 1.5", f"    y = {call}"]
        made = "torch.isnan(y)" if form == "idle" else f"{first}.cos().type_as(y)"
        lines += [f"    return {', '.join([made, first, *(f'{x}.sin()' for x in others)])}"]
    return "\n".join(lines) + "\n"


def differences(program, form):
    """Sentences, of a program whose op gives a tensor."""
    text = source(program, form)
    eager, found = plain(text), []
    moving = [k for k, a in enumerate(program.arguments) if _is_moving(a)][:MOST]
    for count in range(1, len(moving) + 1):
        for leaves in itertools.combinations(moving, count):
            found += _of_leaves(eager, script(text), program.arguments, leaves)
    return [f"{text}    {sentence}" for sentence in found]


def _of_leaves(eager, scripted, arguments, leaves):
    try:
        wanted = _outcome(eager, arguments, leaves)
    except RuntimeError:
        return  # of an operand that may require no gradient
    if not wanted:
        return
    for _ in range(PROFILED):
        _outcome(scripted, arguments, leaves)
    places = [("argument", k) for k, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
    places += [("result", k) for k in range(3)]
    for place in (None, *places):
        expected, actual = (_outcome(f, arguments, leaves, place) for f in (eager, scripted))
        if expected is None:
            continue
        if actual == RAISED and expected != RAISED:
            yield f"leaves {leaves}, {place} written: raises"
        elif actual != RAISED and not _are_close(actual, wanted if expected == RAISED else expected):
            yield f"leaves {leaves}, {place} written: another gradient"


def _outcome(function, arguments, leaves, place=None):
    """The gradients of the arguments `leaves`, or `RAISED`; none where nothing could be written to."""
    given = [copy_of(a.detach()) if isinstance(a, torch.Tensor) else a for a in arguments]
    for k in leaves:
        given[k].requires_grad_()
    torch.manual_seed(0)
    made = function(*given)
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    ends = [t for t in results if t.requires_grad]
    steps = [incoming_gradient(t) for t in ends]
    if not ends or (place and not _write(given if place[0] == "argument" else results, place[1])):
        return None
    try:
        return torch.autograd.grad(ends, [given[k] for k in leaves], steps, allow_unused=True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return RAISED


def _write(tensors, k):
    """Whether there is such a tensor, which has changed then."""
    if k >= len(tensors) or not tensors[k].numel():
        return False
    with torch.no_grad():
        tensors[k].logical_not_() if tensors[k].dtype == torch.bool else tensors[k].add_(1)
    return True


def _is_moving(argument):
    return isinstance(argument, torch.Tensor) and argument.is_floating_point()


def _are_close(actual, expected):
    return all(
        (x is None) == (y is None)
        and (x is None or (x.dtype == y.dtype and torch.allclose(x, y, 1e-3, 1e-3, equal_nan=True)))
        for x, y in zip(actual, expected, strict=True)
    )
