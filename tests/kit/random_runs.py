"""How a random program runs: eagerly, exactly, with noise, and past what eager rejects.

In: a Program and the number of a call. Out: named tensors (random_outcome.py), or what a comparison needs.
Example:

    noisy(program, 0, epsilons(program, 0)[0], seed=1)  # -> {"result 0": ..., "gradient 0": ...}
"""

import ast
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kit.random_outcome import REFUSALS, REFUSED, last_line, saved_copies
from kit.random_world import CAST, World, copied, execute, wide_text
from kit.roundings import Shaken
from kit.support import EPSILON


def epsilons(program, call):
    """Of each statement the largest epsilon of eager's dtypes, of its result and of intermediate values; None
    where the value is exact or a view. And the names of the values that are exact in the end."""
    world, found = World(program, call, program.gradients), []
    for name, st in program.statements:
        with _Dtypes() as made:
            assert world.step(name, st)
        target = name or st.operands[0]
        still = target in world.exact or st.kind == "view"
        dtypes = made.found | {
            world.plain[n].dtype
            for n in (target, *st.operands)
            if isinstance(world.plain.get(n), torch.Tensor)
        }
        found.append(None if still else max((EPSILON[t] for t in dtypes if t in EPSILON), default=None))
    return found, world.exact


class _Dtypes(TorchDispatchMode):
    """Those of all tensors that ops give."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        several = out if isinstance(out, (tuple, list)) else [out]
        self.found |= {t.dtype for t in several if isinstance(t, torch.Tensor)}
        return out


def refusals(program, call, device="cpu"):
    """What eager says of each line that it rejects, and that needs nothing of another one. The first one is
    what a program raises; if the ops are in groups, another one of them may."""
    values, found, lost = {"torch": torch, "Tensor": torch.Tensor}, [], set()
    names = [i.name for i in program.inputs] + ["s", "n"]
    values.update(zip(names, program.arguments(call, device)))
    for line in ast.parse(program.source()).body[0].body[:-1]:
        names = {node.id for node in ast.walk(line) if isinstance(node, ast.Name)}
        if not lost & names:
            try:
                with program.context(device), warnings.catch_warnings(action="ignore"):
                    exec(compile(ast.Module([line], []), "line", "exec"), values)
                continue
            except REFUSALS as error:
                found.append(f"{REFUSED} {last_line(error)}")
        lost |= _bound(line) | _sharing(values, _written(line))
    return found


def _bound(line):
    """The names that a line gives other values."""
    return {n.id for n in ast.walk(line) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _written(line):
    """The names of the tensors that a line writes to in place: `x.add_(y)`, `x += y`, `x[0] = y`."""
    written = []
    for node in ast.walk(line):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[-1] == "_":
            written.append(node.func.value)
        elif isinstance(node, ast.AugAssign):
            written.append(node.target)
        elif isinstance(node, ast.Assign):
            written += [target for target in node.targets if isinstance(target, ast.Subscript)]
    return set(map(_root, written)) - {None, "torch"}


def _root(node):
    """`x` of `x.view(-1)[0].abs_()`: the name that it starts from."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return None
    return node.id


def _sharing(values, names):
    """`names`, and those of the values that share memory with theirs."""
    places = {n: x.untyped_storage().data_ptr() for n, x in values.items() if isinstance(x, torch.Tensor)}
    found = {places[n] for n in names if n in places}
    return {*names, *(n for n, place in places.items() if place in found)}


def noisy(program, call, roundings=None, seed=0, saving=saved_copies):
    """The outcome in double; where there are `roundings`, the epsilon of each statement, each op of it is
    off by such, and each one of the backward by those of the registers, or of eager's gradients, which have
    the dtypes of the values. `saving`: what autograd saves; a write does not make it raise for copies."""
    shaken = Shaken(seed)

    def function(*arguments):
        values = dict(zip([i.name for i in program.inputs] + ["s", "n"], arguments))
        for (name, st), epsilon in zip(program.statements, roundings or [None] * len(program.statements)):
            with shaken.by(epsilon):
                execute(name, wide_text(st.text(name)), values, torch.float64)
                if epsilon and CAST.fullmatch(st.template):  # of a rounded number, or of one that is not
                    values[name] = values[name] * 1.0
        return [values[name] for name in program.results]

    arguments = [copied(a) for a in program.arguments(call)]
    backward = shaken.by(max([_register(program, call), *filter(None, roundings)]) if roundings else None)
    with shaken, saving():
        return program.outcome(function, call, "cpu", arguments, backward)


def _register(program, call):
    """The epsilon of the registers that gradients are computed in: double's where all leaves are double."""
    leaves = [i.dtype for i in program.inputs_of(call) if i.leaf]
    least = torch.float64 if all(dtype == torch.float64 for dtype in leaves) else torch.float32
    return EPSILON[least]
