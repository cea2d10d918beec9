"""Runs many one-op programs fused and eagerly, and counts.

In: programs of `opinfo`. Out: a `Tally`: what was wrong, by op, and how many samples ran, were fused, or were
refused. Example:

    tally = Tally()
    sweep([("gelu", program)], tally, gradients=True)
    assert not tally.wrong
"""

import contextlib
import itertools
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch

import tsfuser
from kit.batch import collecting, load
from kit.nearness import difference
from kit.support import copy_of, counted, groups, incoming_gradient, kinds, script

PROFILED = 3  # inference is fused in call 2, training in call 3
CHUNK = 400  # programs alive at a time
#: What eager computes with constants of float on CUDA, in double, too.
FLOAT_CONSTANTS = {"nn.functional.hardsigmoid", "nn.functional.hardswish"}
STEPS = 24  # operations behind one element of a sample's result: its sums are of up to some hundred terms
WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDER |= {torch.complex64: torch.complex128}


@dataclass
class Tally:
    """`wrong`: sentences; `own`: the same, where TorchScript alone gives it, too; `unsure`: where eager gives
    it of the same numbers in other strides. `ran`, `fused`, `refused`: samples by op; `reasons` of refusals
    at run time."""

    wrong: list = field(default_factory=list)
    own: list = field(default_factory=list)
    unsure: list = field(default_factory=list)
    ran: Counter = field(default_factory=Counter)
    fused: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)

    def __str__(self):
        counts = [sum(c.values()) for c in (self.ran, self.fused, self.refused)]
        said = "{} samples of {} ops: {} fused, {} refused".format(counts[0], len(self.ran), *counts[1:])
        said += f", {len(self.own)} as torch alone has it" if self.own else ""
        return said + (f", {len(self.unsure)} as eager has it in other strides" if self.unsure else "")


@dataclass
class _Case:
    name: str
    program: object
    eager: list
    exact: list
    scripted: object


def sweep(named, tally, gradients=False, shared=False, roundings=1):
    """Adds (name, program) pairs to the tally. `shared`: programs of one source share a scripted function, so
    that what one call compiled must serve the others."""
    named = iter(named)
    while part := list(itertools.islice(named, CHUNK)):
        cases = _cases(part, gradients, shared)
        with collecting() as kernels, warnings.catch_warnings(), tsfuser.fuser():
            warnings.simplefilter("ignore")
            cases = [case for case in cases if _profile(case, tally, gradients)]
        load(kernels)
        with tsfuser.fuser(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases:
                _check(case, tally, gradients, roundings)


def _profile(case, tally, gradients):
    """Whether the calls run after which a case is fused."""
    try:
        for _ in range(PROFILED):
            evaluate(case.scripted, case.program.arguments, gradients)
    except RuntimeError as error:
        _note(error, case, tally, gradients)
        return False
    return True


def _note(error, case, tally, gradients):
    """Counts a sample that raises: wrong, unless TorchScript alone raises, too."""
    said = str(error).strip().splitlines()[-1]
    if _alone(case.program, gradients) is None:
        tally.reasons[f"TorchScript alone raises: {said}"] += 1
    else:
        tally.wrong.append(f"{case.name}: {case.program.text}: raises {said}")


def _cases(named, gradients, shared):
    cases, functions = [], {}
    for name, program in named:
        eager = plain(program.source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = evaluate(eager, program.arguments, gradients)
                exact = _exactly(program, gradients)
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, AttributeError):
                continue  # a sample of an error, or of a dtype that the CPU does not have
            key = (name, program.source) if shared else len(cases)
            if key not in functions:
                try:
                    functions[key] = script(program.source)
                except Exception:
                    functions[key] = None  # nothing that TorchScript takes
        if functions[key] is not None:
            cases.append(_Case(name, program, expected, exact, functions[key]))
    return cases


def plain(source):
    """`f` of the source, as Python."""
    space = {"torch": torch, "Tensor": torch.Tensor, "List": list}
    exec(source, space)
    return space["f"]


def evaluate(function, arguments, gradients, incoming=incoming_gradient):
    """The tensors that a call gives and, if asked, the gradients of the floating arguments. `incoming` makes
    the gradient of a result."""
    arguments = [_leaf(a, gradients) for a in arguments]
    out = function(*arguments)
    results = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    ends = [t for t in results if t.requires_grad]
    if leaves and ends:
        found = torch.autograd.grad(ends, leaves, [incoming(t) for t in ends], allow_unused=True)
        results = results + [g for g in found if g is not None]
    return [t.detach() for t in results]


def _leaf(argument, gradients):
    if not isinstance(argument, torch.Tensor):
        return argument
    moving = argument.is_floating_point() or argument.is_complex()
    return copy_of(argument.detach()).requires_grad_(gradients and moving)


def _kinds(scripted):
    return {kind for group in groups(scripted) for kind in kinds(group)}


def _exactly(program, gradients):
    """The same in double, on the CPU: on CUDA eager computes with constants of float now and then, and its
    kernels for different sizes give different results of infinities."""
    source = program.source.replace("cuda", "cpu")
    for narrow, wide in WIDER.items():
        source = source.replace(f"{narrow},", f"{wide},").replace(f"{narrow})", f"{wide})")
    arguments = [
        a.to("cpu", WIDER.get(a.dtype, a.dtype)) if isinstance(a, torch.Tensor) else a
        for a in program.arguments
    ]

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return evaluate(plain(source), arguments, gradients)
    finally:
        torch.set_default_dtype(default)


def _alone(program, gradients):
    """What TorchScript gives without tsfuser; None where it raises, as some of its gradients do on CUDA once
    they are optimised."""
    scripted = script(program.source)
    enabled = tsfuser._C.enabled()
    tsfuser._C.set_enabled(False)
    try:
        for _ in range(PROFILED + 1):
            results = evaluate(scripted, program.arguments, gradients)
    except RuntimeError:
        return None
    finally:
        tsfuser._C.set_enabled(enabled)
    return results


def _check(case, tally, gradients, roundings):
    tally.ran[case.name] += 1
    with counted() as rise:
        try:
            actual = evaluate(case.scripted, case.program.arguments, gradients)
        except RuntimeError as error:
            _note(error, case, tally, gradients)
            return
    if rise["fallbacks"]:
        tally.refused[case.name] += 1
        tally.reasons.update(rise["fallbacks"])
    elif _kinds(case.scripted) - case.program.around:
        tally.fused[case.name] += 1
    eager = case.eager
    if case.name in FLOAT_CONSTANTS and case.program.arguments[0].is_cuda and eager[0].dtype == torch.float64:
        actual, eager = ([t.float() for t in results] for results in (actual, eager))
    problem = _compared(actual, eager, case.exact, roundings)
    if problem:
        kind, alone = tally.wrong, _alone(case.program, gradients)
        if alone is not None and _compared(actual, alone, alone, roundings) is None:
            kind = tally.own
        elif _compared(actual, _otherwise(actual, case, gradients), case.exact, roundings) is None:
            kind = tally.unsure
        kind.append(f"{case.name}: {case.program.text}: {problem}")


def _otherwise(actual, case, gradients):
    """Eager's results, with elements of `actual` where eager gives the same for another layout of its
    arguments. Its vector code, of dense tensors, and its scalar code, of all others and of the rest behind
    the last whole vector, do not agree in all special values: fmod(1e308, 1e-308) is 0 in a tensor of 7, NaN
    in one of 8 elements, and a complex product overflows in another part, as one has fused multiplications
    and the other not."""
    results = list(case.eager)
    for lay_out in (torch.Tensor.contiguous, _in_steps):
        arguments = [lay_out(a) if isinstance(a, torch.Tensor) else a for a in case.program.arguments]
        try:
            others = evaluate(plain(case.program.source), arguments, gradients)
        except RuntimeError:
            continue  # a view that these strides do not allow
        for k, (mine, result, other) in enumerate(zip(actual, results, others)):
            if not mine.dtype == result.dtype == other.dtype or not mine.shape == result.shape == other.shape:
                continue
            same = (mine == other) | (torch.isnan(mine) & torch.isnan(other))
            if mine.is_complex():
                parts = [torch.view_as_real(t.resolve_conj()) for t in (mine, other)]
                same = ((parts[0] == parts[1]) | (torch.isnan(parts[0]) & torch.isnan(parts[1]))).all(-1)
            results[k] = copy_of(result)
            results[k][same] = mine[same]
    return results


def _in_steps(tensor):
    """The tensor with memory between any two elements."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def _compared(actual, eager, exact, roundings):
    if len(actual) != len(eager):
        return f"{len(actual)} results, eager {len(eager)}"
    for k, (mine, plain, wide) in enumerate(zip(actual, eager, exact)):
        exact = wide.to(plain.device) if wide.shape == plain.shape else plain
        problem = difference(mine, plain, exact, STEPS, roundings)
        if problem:
            return f"result {k} {problem}"
    return None


@contextlib.contextmanager
def single_nodes(guards=True):
    """Groups of one node, with guards, or without. Autodiff leaves no op to eager."""
    single = torch._C._jit_set_nvfuser_single_node_mode(True)
    guarded = torch._C._jit_set_nvfuser_guard_mode(guards)
    inlined = torch._C._debug_set_autodiff_subgraph_inlining(False)
    try:
        yield
    finally:
        torch._C._jit_set_nvfuser_single_node_mode(single)
        torch._C._jit_set_nvfuser_guard_mode(guarded)
        torch._C._debug_set_autodiff_subgraph_inlining(True if inlined is None else inlined)
