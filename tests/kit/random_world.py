"""A random program: what it is, and how it is made.

In: a seed. Out: a `Program` whose comparison is well-founded: inputs are multiples of 1/8, and `World`
follows which values are still exact. What jumps (a comparison, floor, the derivative of relu) is only fed
with exact values, or with such that lie away from the jump; the error allowed elsewhere is measured
(random_runs.py), by running the program in double with noise as large as the roundings of eager's dtypes.
Example:

    program = generate(7)
    print(program.source())
"""

import contextlib
import random
import re
import warnings
from dataclasses import dataclass, replace

import torch

from kit import strided_ops  # noqa: F401  programs call them
from kit.random_families import LATER, changes, complex_calls, makers
from kit.random_inputs import Input
from kit.random_kinds import gap, steps
from kit.random_ops import dtypes, merged, normal, reduction, statement
from kit.random_outcome import REFUSALS, outcome, refused, wide_of
from kit.support import copy_of

SMALL = ("c", "z")  # inputs of few elements
STATISTICS = ("m", "r")  # of norms, which write to them without saying so
LARGEST = 64.0  # values beyond make sin and exp amplify rounding errors
MARGIN = 2.0**-5  # how far an inexact value must be from a jump
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 33)
LAYOUTS = ("dense", "dense", "dense", "transposed", "strided", "shifted", "expanded", "last")
#: What eager computes in several ways, by family of values and whether it matters only for gradients: the
#: product of addcmul's factors comes first on CUDA; some of the matrix products of the CPU's library keep
#: sums beyond the largest float32, and others make NaN of them; the gradients of hardswish, hardtanh,
#: hardshrink and softshrink at NaN are NaN or 0 in the vectors of the CPU's loop, and the incoming one in its
#: tail, and on CUDA; of two NaNs a sum has the sign of one. Before torch 2.13 the CPU's gelu of inf is NaN.
#: Statistics of inf, or of numbers whose difference overflows, are NaN by Welford's updates (torch's on CUDA,
#: and its var_mean on the CPU unless inf comes last), and not by two sums (the CPU's batch norm).
UNCLEAR = {
    "limits": {"addcmul": False, "matmul": False, "torch.mm(": False, ", m, r,": False},
    "special": {
        **dict.fromkeys(("hardswish", "hardtanh", "relu6", "hardshrink", "softshrink"), True),
        "signbit": False,
        ", m, r,": False,
    },
}
if torch.nn.functional.gelu(torch.full((16,), float("inf"))).isnan().any():
    for _rules in UNCLEAR.values():
        _rules["gelu"] = False
#: A statement that only casts; in double it gives its operand.
CAST = re.compile(r"\{0\}\.(to|type_as|float|half|bfloat16|double)\(.*\)")


@dataclass(frozen=True)
class Program:
    """`calls`: sizes of each call. `results`: names that are returned. `changes`: for each call, what is
    other in its inputs. `written`: inputs that are changed between forward and backward. `features`: the
    families it is of."""

    inputs: tuple
    statements: tuple  # (name of the result, "" for none; Statement)
    results: tuple
    calls: tuple
    changes: tuple = ()
    written: tuple = ()
    features: tuple = ()

    @property
    def doors(self):
        """What it runs through: TorchScript, torch.compile."""
        return ("script", "compile")

    @property
    def gradients(self):
        return any(i.leaf for call in range(len(self.calls)) for i in self.inputs_of(call))

    def inputs_of(self, call):
        """The inputs as they are in a call."""
        found = self.changes[call] if self.changes else {}
        return tuple(replace(i, **found.get(i.name, {})) for i in self.inputs)

    def context(self, device):
        """What the forward runs in."""
        on = "autocast" in self.features
        return torch.autocast(device, torch.bfloat16) if on else contextlib.nullcontext()

    def outcome(self, function, call, device, arguments=None, backward=None, moving=None):
        """Of one call, as it is on the device; or with `arguments` in double, which has no autocast.
        `moving`: see `random_outcome.outcome`."""
        given = self.arguments(call, device) if arguments is None else arguments
        context = self.context(device) if arguments is None else contextlib.nullcontext()
        written = [k for k, i in enumerate(self.inputs) if i.name in self.written]
        asks = bool(self.features)
        make = refused if "complex" in self.features else outcome
        return make(function, given, self.gradients, backward, context, written, asks, moving)

    def source(self):
        heads = [f"{i.name}: Tensor" for i in self.inputs] + ["s: float", "n: int"]
        lines = [line for name, st in self.statements for line in st.lines(name)]
        lines.append(f"return ({', '.join(self.results)},)")
        return f"def f({', '.join(heads)}):\n" + "".join(f"    {line}\n" for line in lines)

    def arguments(self, call, device="cpu"):
        """New tensors and numbers for a call."""
        made = [i.make(self.calls[call]) for i in self.inputs_of(call)]
        if device != "cpu":
            made = [copy_of(x, device).requires_grad_(x.requires_grad) for x in made]
        return [*made, (0.75, -1.5)[call % 2], (2, 3)[call % 2]]


def widened(x):
    """`x` in double, with its aliasing lost."""
    fractions = isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    return x.detach().to(wide_of(x), copy=True).requires_grad_(x.requires_grad) if fractions else x


def wide_text(text):
    for name in ("float32", "float16", "bfloat16"):
        text = text.replace(f"torch.{name}", "torch.float64")
    for name in ("float", "half", "bfloat16"):
        text = text.replace(f".{name}()", ".double()")
    return text


class World:
    """One call of a program, eagerly (`plain`) and in double (`wide`), a statement at a time. `ended`: eager
    has rejected a statement, so that what follows does not run."""

    def __init__(self, program, call, gradients):
        names, arguments = [i.name for i in program.inputs] + ["s", "n"], program.arguments(call)
        self.gradients, self.context = gradients, lambda: program.context("cpu")
        self.special = {"special", "limits"} & set(program.features)
        self.limits = "limits" in program.features
        self.complex = any(x.is_complex() for x in arguments if isinstance(x, torch.Tensor))
        self.ended = False
        self.plain = dict(zip(names, arguments))
        self.wide = {name: copied(value) for name, value in self.plain.items()}
        self.exact = set(names)

    def tensors(self):
        return {name: x for name, x in self.plain.items() if isinstance(x, torch.Tensor)}

    def step(self, name, st, may_end=True):
        """Runs a statement; False where it is refused, or cannot be compared. `may_end`: with complex inputs
        the call may end here."""
        if self.ended:
            return True
        used = st.used()
        exact = all(o in self.exact for o in used)
        if not self._away_from_jumps(st, exact) or self._is_unclear(st):
            return False
        inexact = st.kind == "writing" and not (st.exact and exact)
        before = {other: copied(x) for other, x in self.tensors().items()} if inexact else {}
        try:
            with self.context():
                plain = execute(name, st.text(name), self.plain)
            wide = execute(name, wide_text(st.text(name)), self.wide, torch.float64)
        except REFUSALS:
            self.ended = may_end and any(_is_complex(self.plain[o]) for o in used)
            return self.ended
        target = name or used[0]
        if not self._sound(plain, wide, st, exact):
            self.plain.pop(name, None)
            self.wide.pop(name, None)
            return False
        if st.kind in ("inplace", "writing"):
            self._written(target, st.exact and exact)
        if st.kind == "writing":
            # What is written is rounded, even where on this device it is exact by chance.
            for other, x in self.tensors().items():
                if not _equal(x, self.wide[other]) or not _equal(x, before.get(other, x)):
                    self.exact.discard(other)
        if st.kind != "inplace" and st.exact and exact and _equal(plain, wide):
            self.exact.add(target)
        return True

    def _is_unclear(self, st):
        named = [rule for family in self.special for rule in UNCLEAR[family].items()]
        return any(op in st.template and (self.gradients or not trained) for op, trained in named)

    def _away_from_jumps(self, st, exact):
        if not st.jump or (st.where == "slope" and not self.gradients):
            return True
        if st.where in ("value", "tie") and exact:
            return True
        if self.limits and not exact:  # the roundings of the largest numbers reach far
            return False
        try:
            distance = execute("", st.jump.format(*st.operands), self.wide, torch.float64, value=True).abs()
        except REFUSALS:
            return False
        if self.special:
            distance = distance[distance.isfinite()]
        least = 0 if exact and st.where != "gap" else MARGIN
        return distance.numel() == 0 or float(distance.detach().min()) > least

    def _sound(self, plain, wide, st, exact):
        if not isinstance(plain, torch.Tensor) or (plain.is_complex() and not self.complex):
            return False
        if plain.numel() > 20000 or plain.dim() > 6:
            return False
        if plain.shape != wide.shape or (self.gradients and not st.smooth and plain.requires_grad):
            return False
        if self.special and not plain.is_floating_point() and plain.dtype != torch.bool:
            return False  # an integer that is made of inf is undefined in C++
        if not plain.is_floating_point() and not plain.is_complex():
            if not exact and not st.jump:
                return False
            return torch.equal(plain, wide)
        finite = plain.detach().to(wide_of(plain)).abs()
        finite = finite[finite.isfinite()] if self.special else finite
        return self.limits or finite.numel() == 0 or float(finite.max()) <= LARGEST

    def _written(self, target, exact):
        """A value was changed: what shares its memory is as exact as it is."""
        changed = self.plain[target].untyped_storage().data_ptr()
        for name, x in self.tensors().items():
            if x.untyped_storage().data_ptr() == changed and not (exact and _equal(x, self.wide[name])):
                self.exact.discard(name)


def copied(value):
    if not isinstance(value, torch.Tensor):
        return value
    return widened(value) if value.is_floating_point() or value.is_complex() else value.clone()


def _is_complex(x):
    return isinstance(x, torch.Tensor) and x.is_complex()


def _equal(plain, wide):
    a, b = plain.detach().to(wide_of(plain)), wide.detach().to(wide_of(wide))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def execute(name, text, values, default=None, value=False):
    """Runs a line of the program on a dict of values; returns what it gives, or the operand it changed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default or before)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name and ("\n" in text or text.startswith(f"{name} = ")):
                own = dict(values)
                exec(text, {"torch": torch, **own}, own)
                values[name] = own[name]
                return values[name]
            if name or value:
                result = eval(text, {"torch": torch, "gap": gap, "steps": steps}, values)
                if name:
                    values[name] = result
                return result
            exec(text, {"torch": torch}, values)
            return values[text.partition(".")[0].partition(" ")[0]]
    finally:
        torch.set_default_dtype(before)


def generate(seed, features=()):
    """The program of a seed, of the families `features` (random_families.py); None where the seed gives
    none."""
    rng = random.Random(f"{seed} {features}" if features else seed)
    program, gradients = _start(rng, features)
    worlds = [World(program, call, gradients) for call in range(len(program.calls))]
    statements = []
    others = makers(features)
    left_out = (reduction, normal, merged) if "limits" in features else ()
    for _ in range(rng.randint(2, 6) if worlds[0].special else rng.randint(3, 16)):
        name = f"v{len(statements)}"
        few = SMALL if set(features) & set(LATER) and rng.random() < 0.7 else ()
        few += STATISTICS if "views" in features and rng.random() < 0.6 else ()
        values = {name: x for name, x in worlds[0].tensors().items() if name not in few}
        st = statement(rng, values, others, left_out)
        name = "" if st.kind == "inplace" else name
        may_end = "complex" in features and rng.random() < 0.35
        if not _accepted(worlds, name, st, may_end):
            if st.kind in ("inplace", "writing"):  # half of it may have happened
                worlds = _replayed(replace(program, statements=tuple(statements)))
            continue
        statements.append((name, st))
    results = _results(rng, statements)
    found = replace(program, statements=tuple(statements), results=results)
    return found if len(statements) >= 2 and results and _differentiable(found) else None


def _start(rng, features):
    """A program without statements, and whether it is to have gradients."""
    dims = [f"d{k}" for k in range(rng.randint(1, 4))]
    calls = tuple({d: rng.choice(SIZES) for d in dims} for _ in range(3 if "changes" in features else 2))
    if rng.random() < 0.04:
        calls[0][rng.choice(dims)] = 0
    gradients = rng.random() < (0.6 if features else 0.4) or {"written", "extremes"} & set(features) != set()
    inputs = tuple(_inputs(rng, dims, gradients))
    if "views" in features:  # what a norm that trains writes to
        inputs += tuple(
            Input(name, (dims[-1],), torch.float32, "dense", rng.randint(0, 999)) for name in STATISTICS
        )
    if "casts" in features:
        inputs = _of_one_kind(rng, inputs)
    if "empty" in features:
        for call in calls:
            call[rng.choice(dims)] = rng.choice((0, 0, 1, 2))
        inputs = tuple(replace(i, dims=()) if rng.random() < 0.3 else i for i in inputs)
    for name in ("special", "limits"):
        if name in features:
            chosen = [i.name[0] == "x" and rng.random() < 0.7 for i in inputs]
            inputs = tuple(replace(i, special=name) if its else i for i, its in zip(inputs, chosen))
    program = Program(inputs, (), (), calls, features=features)
    if "changes" in features:
        program = replace(program, changes=changes(rng, inputs, calls, gradients))
    if "complex" in features:
        program = replace(program, changes=complex_calls(rng, inputs, calls))
    if "written" in features:
        able = [i.name for i in inputs if i.layout != "expanded"]
        program = replace(program, written=tuple(rng.sample(able, min(len(able), rng.choice((1, 2))))))
    return program, gradients


def _of_one_kind(rng, inputs):
    """Inputs of at most one dim, or of one dtype: what a pass looks for may not be among them."""
    kind = rng.choice(("any", "short", torch.float64, torch.bfloat16, torch.float16, torch.float32))
    if kind == "short":
        return tuple(replace(i, dims=i.dims[-1:]) for i in inputs)
    if kind == "any":
        return inputs
    return tuple(replace(i, dtype=kind) if i.dtype.is_floating_point else i for i in inputs)


def _accepted(worlds, name, st, may_end=True):
    done = []
    for world in worlds:
        ended = world.ended
        if not world.step(name, st, may_end):
            for other, was in done:
                other.plain.pop(name, None)
                other.wide.pop(name, None)
                other.exact.discard(name)
                other.ended = was
            return False
        done.append((world, ended))
    return True


def _replayed(program):
    worlds = [World(program, call, program.gradients) for call in range(len(program.calls))]
    return worlds if all(_accepted(worlds, name, st) for name, st in program.statements) else None


def valid(program):
    """The worlds after the program where it can be compared; else None. For programs that were changed."""
    if not program.results or not _differentiable(program):
        return None
    worlds = _replayed(program)
    return worlds if worlds and all(r in worlds[0].plain for r in program.results) else None


def _inputs(rng, dims, gradients):
    weights = dtypes()
    for k in range(rng.randint(1, 4)):
        kept = dims[rng.randint(0, len(dims)) if rng.random() < 0.4 else 0 :]
        shape = tuple(1 if rng.random() < 0.15 else d for d in kept)
        (dtype,) = rng.choices([t for _, t in weights], [w for w, _ in weights])
        leaf = gradients and dtype.is_floating_point and rng.random() < 0.75
        yield Input(f"x{k}", shape, dtype, rng.choice(LAYOUTS), rng.randint(0, 999), leaf)
    yield Input("c", tuple(dims[-1:]), torch.bool, "dense", rng.randint(0, 999))
    yield Input("z", (), torch.float32, "dense", rng.randint(0, 999))


def _results(rng, statements):
    """What nobody reads, and one or two of the others. So there is no dead code, which TorchScript drops: an
    op that eager rejects, or a write that torch's alias analysis does not see. What is written in place is to
    be read after that."""
    read = set()
    for _, st in statements:
        read.update(st.used())
        if st.kind == "inplace":
            read.discard(st.operands[0])
    made = [name for name, _ in statements if name]
    unread = [name for name in made if name not in read]
    return tuple(unread + [name for name in made if name in read and rng.random() < 0.2])


def _differentiable(program):
    """Whether eager's backward takes the program: it refuses some in-place ops."""
    if not program.gradients:
        return True
    try:
        return all(run_plain(program, k) for k in range(len(program.calls)))
    except REFUSALS:
        return False


def run_plain(program, call, device="cpu"):
    """Eager's results."""
    space = {"torch": torch, "Tensor": torch.Tensor}
    exec(program.source(), space)
    return program.outcome(space["f"], call, device)
