"""thunder's own list of ops through `thunder.jit`, forward and backward, against torch and double.

    export PYTHONPATH=.:tests TSFUSER_CACHE_DIR=build/cache
    python -m kit.thunder_ops [--part 0:8] [--count 1] [--dtype float32] [--device cuda]

Each op stands between negations, two by two, which are claimed, so that it shares a region with them if it
is claimed. Prints, for each op, whether all of it ran in regions, a part, or nothing, and why the rest stayed
outside. What thunder's torch executor gives, too, is no difference: it gives thunder's ops their meaning.
Exit status 1: there was one.
"""

import argparse
import contextlib
import itertools
import sys
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_flatten

import tsfuser
from kit import thunders
from kit.batch import collecting, load
from kit.compiled_ops import problem
from kit.opsweep import evaluate

ATTEMPTS = 8  # samples that thunder itself may refuse before an op counts as not run
CHUNK = 40  # programs whose kernels are compiled together
COPIES = ("neg", "logical_or")  # symbols that stand before and after the op
WHOLE, PART, NONE = "all of it", "a part", "nothing"
#: Results that are other numbers each time, or what memory held before.
LEFT_OUT = ("dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "empty", "exponential")


@dataclass
class Tally:
    """`ran`: op -> how much of its samples ran in regions, counted; `stayed`: op -> symbol that ran outside
    -> why; `left`: op -> why no sample of it was run; `wrong`: (op, what)."""

    ran: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    stayed: dict[str, dict] = field(default_factory=lambda: defaultdict(dict))
    left: dict[str, str] = field(default_factory=dict)
    wrong: list = field(default_factory=list)

    def of(self, kind):
        """The ops of which all samples ran so."""
        return [name for name, found in self.ran.items() if set(found) == {kind}]

    def __str__(self):
        samples = sum(sum(found.values()) for found in self.ran.values())
        whole, none = self.of(WHOLE), self.of(NONE)
        part = len(self.ran) - len(whole) - len(none)
        said = (
            f"{samples} samples of {len(self.ran)} ops: {len(whole)} ops whole in regions, {part} in part, "
        )
        return said + f"{len(none)} outside; {len(self.left)} not run; {len(self.wrong)} wrong"


@dataclass
class _Case:
    name: str
    program: object  # of thunder's op
    arguments: list
    plain: list  # what thunder's torch executor gives
    eager: list
    exact: list
    gradients: bool  # whether thunder has a backward for it
    jitted: object = None

    def outcome(self):
        """The results, or what was raised."""
        try:
            return evaluate(self.jitted, self.arguments, self.gradients)
        except Exception as error:
            return error


def sweep(infos, dtype, count=1, device="cpu", report=print):
    """The Tally of samples of thunder's OpInfos."""
    tally, reasons = Tally(), {}
    cases = itertools.chain.from_iterable(_cases(info, dtype, count, device, tally) for info in infos)
    while part := list(itertools.islice(cases, CHUNK)):
        for case in part:
            case.jitted = _jit(case.program, ["tsfuser"])
        with collecting() as kernels, _noted(reasons):
            for case in part:
                case.outcome()
        load(kernels)
        for case in part:
            _check(case, tally, reasons, report)
        report(str(tally))
    return tally


def _jit(program, executors):
    return thunders.load().jit(program, executors=executors)


@contextlib.contextmanager
def _noted(reasons):
    """While this is open, `reasons` gets what each symbol was not claimed for, by its name."""
    claims = thunders.load().extend.get_executor("tsfuser")._claims
    original = claims.claim

    def claim(symbol):
        found = original(symbol)
        if found.reason is not None and symbol.sym.executor is None:
            reasons.setdefault(symbol.sym.name, found.reason)
        return found

    claims.claim = claim
    try:
        yield
    finally:
        del claims.claim


def _check(case, tally, reasons, report):
    before = tsfuser.stats()["launches"]
    found = case.outcome()
    launched = tsfuser.stats()["launches"] > before
    what = problem(found, case.plain, case.exact) and problem(found, case.eager, case.exact)
    if what:
        tally.wrong.append((case.name, what))
        report(f"{case.name}: {[getattr(a, 'shape', a) for a in case.arguments]}: {what}")
        return
    thunder = thunders.load()
    trace = thunder.last_traces(case.jitted)[-1]
    stayed = _names(thunders.outside(trace), case.name)
    inside = _names(symbol for region in thunders.regions(trace) for symbol in region.subsymbols)
    kind = NONE
    if launched and (inside or not stayed):
        kind = PART if stayed else WHOLE
    tally.ran[case.name][kind] += 1
    for name in stayed:
        tally.stayed[case.name].setdefault(name, _reason(name, reasons))


def _names(symbols, op=None):
    """Names of symbols, without those of the copies around an op."""
    return [s.sym.name for s in symbols if s.sym.name not in COPIES or s.sym.name == op]


def _reason(name, reasons):
    """thunder's torch executor calls a prim `torch_pad_prim_impl`."""
    known = (reasons.get(found) for found in (name, name.removeprefix("torch_").removesuffix("_prim_impl")))
    return next(filter(None, known), "it would be alone in its region")


def _cases(info, dtype, count, device, tally):
    if any(word in info.name for word in LEFT_OUT):
        tally.left[info.name] = "its results are other numbers each time"
        return
    if info.torch_reference is None:
        tally.left[info.name] = "thunder has no torch function to compare it with"
        return
    if dtype not in info.dtypes():
        tally.left[info.name] = f"it does not take {dtype}"
        return
    try:
        samples = list(info.sample_inputs(device, dtype))
    except Exception as error:
        tally.left[info.name] = f"its samples cannot be made: {error}"
        return
    samples = [sample for sample in samples if _tensors(sample)]
    samples.sort(key=_is_small)
    tally.left[info.name] = "no sample of it takes a tensor and runs without tsfuser"
    step, made = max(1, len(samples) // count), 0
    for sample in (samples[::step] + samples)[: count + ATTEMPTS]:
        if made == count:
            break
        case = _case(info, sample)
        if case is not None:
            tally.left.pop(info.name, None)
            made += 1
            yield case


def _case(info, sample):
    """None for a sample of an error, and for what thunder itself cannot."""
    arguments, program = _between(info.op, sample)
    _, reference = _between(info.torch_reference, sample)
    for gradients in (True, False):
        try:
            eager = evaluate(reference, arguments, gradients)
            plain = evaluate(_jit(program, []), arguments, gradients)
        except Exception:
            continue
        exact = _exactly(reference, arguments, eager, gradients)
        return _Case(info.name, program, arguments, plain, eager, exact, gradients)
    return None


def _exactly(reference, arguments, eager, gradients):
    """The results in double; eager's where the op takes no double."""
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    try:
        found = evaluate(reference, wide, gradients)
    except Exception:
        found = []
    return found if len(found) == len(eager) else eager


def _is_small(sample):
    """Whether groups would have nothing to gain: no element, or just one."""
    flat, _ = tree_flatten((sample.args, sample.kwargs))
    return any(isinstance(value, torch.Tensor) and value.numel() < 2 for value in flat)


def _tensors(sample):
    flat, _ = tree_flatten((sample.args, sample.kwargs))
    return [value for value in flat if isinstance(value, torch.Tensor)]


def _between(op, sample):
    """The tensors of a sample, and a function of them: copies of the op's results for copies of them. It is
    made from text that names the arguments one by one: thunder interprets Python, and takes seconds for that
    of a pytree."""
    held, tensors = {"op": op, "_copy": _copy}, []

    def text(value):
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return f"_copy(t{len(tensors) - 1})"
        if type(value) in (tuple, list):
            parts = "".join(text(part) + ", " for part in value)
            return f"[{parts}]" if type(value) is list else f"({parts})"
        held[f"c{len(held)}"] = value
        return f"c{len(held) - 1}"

    given = [*map(text, sample.args), *(f"{name}={text(value)}" for name, value in sample.kwargs.items())]
    source = f"""
def outer({", ".join(held)}):
    def program({", ".join(f"t{k}" for k in range(len(tensors)))}):
        out = op({", ".join(given)})
        return tuple(map(_copy, out)) if isinstance(out, (tuple, list)) else _copy(out)
    return program
"""
    exec(source, made := {})
    return tensors, made["outer"](**held)


def _copy(tensor):
    return torch.logical_or(tensor, tensor) if tensor.dtype == torch.bool else tensor.neg().neg()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="0:1", help="part k of n")
    parser.add_argument("--only", help="names of ops, between commas")
    parser.add_argument("--count", type=int, default=1, help="samples an op")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    first, step = map(int, arguments.part.split(":"))
    warnings.simplefilter("ignore")
    thunder = thunders.load()
    from thunder.tests.opinfos import opinfos

    chosen = opinfos[first::step]
    if arguments.only:
        chosen = [info for info in opinfos if info.name in arguments.only.split(",")]
    dtype = thunder.dtypes.to_dtype(getattr(torch, arguments.dtype))
    tally = sweep(chosen, dtype, arguments.count, arguments.device, lambda text: print(text, flush=True))
    for name, found in tally.ran.items():
        kinds = ", ".join(f"{kind} ({number})" for kind, number in found.items())
        stayed = "; ".join(f"{symbol}: {reason}" for symbol, reason in tally.stayed[name].items())
        print(f"  {name}: {kinds} in regions{'; outside: ' if stayed else ''}{stayed}")
    for name, reason in tally.left.items():
        print(f"  {name}: not run: {reason}")
    print(tally)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
