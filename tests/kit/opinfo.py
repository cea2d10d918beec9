"""torch's own list of ops and sample inputs, as one-op TorchScript programs.

In: an OpInfo of `op_db` and a sample. Out: `Program`s: source text of `f(x0, ...)`, in which everything that
is no tensor is a constant or, if asked, an argument where it is a number, and the arguments. Example:

    for info in named():
        for program in programs(info, torch.float32, "cpu"):
            script(program.source)(*program.arguments)
"""

import functools
import importlib.util
import math
import random
import sys
import types
import unittest
from dataclasses import dataclass, field, replace

import torch

from kit.samples import NORMS
from tsfuser.ops import table

#: Ops that TorchScript turns into another one before fusion.
KERNELS = {"nn.functional.prelu": ("_prelu_kernel",)}


@functools.cache
def op_db():
    """torch's OpInfos. They live in a test module that imports a package of which nothing is needed here."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db as infos
    from torch.testing._internal.opinfo import core

    # Four fifths of the time of a sweep: for each sample torch looks for its own test on the stack, in source
    # files, and notes the stack of each seed for a CUDA that may start later.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    common_utils.set_rng_seed = _seed
    return infos


def _seed(seed):
    """`torch.testing._internal.common_utils.set_rng_seed`."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(seed)


@functools.cache
def rows():
    """Names of the rows, without their namespace."""
    return {row.name.partition("::")[2]: row for row in table.all_rows()}


def names(info):
    """What the OpInfo may be called in the op table."""
    aliases = [alias.name for alias in info.aliases]
    own = [info.name, info.aten_name or "", info.name.rpartition(".")[2], *aliases]
    own += KERNELS.get(info.name, ())
    return dict.fromkeys(own + [name.replace(".", "_") for name in (info.name, *aliases)])


def row_of(info):
    """The row that the OpInfo names; None for none."""
    known = rows()
    return next((known[name] for name in names(info) if name in known), None)


def named():
    """The OpInfos that the op table names. torch.masked is Python that TorchScript does not take."""
    return [i for i in op_db() if row_of(i) is not None and not i.name.startswith("masked.")]


def title(info):
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


@dataclass
class Program:
    """`source` of `f`, and `arguments` of a call; `text` says what is called; `around`: kinds of nodes
    besides the op's own."""

    source: str
    arguments: list = field(repr=False)
    text: str
    around: frozenset = frozenset()


class NotExpressible(Exception):
    """A sample that TorchScript source cannot say."""


class _Writer:
    """Values as source text; tensors, and numbers if `dynamic`, become parameters."""

    def __init__(self, dynamic):
        self.dynamic, self.parameters, self.arguments = dynamic, [], []

    def parameter(self, annotation, value):
        name = f"x{len(self.parameters)}"
        self.parameters.append(f"{name}: {annotation}")
        self.arguments.append(value)
        return name

    def text(self, value):
        if isinstance(value, torch.Tensor):
            return self.parameter("Tensor", value)
        if isinstance(value, (list, tuple, torch.Size)):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, (int, float)) and not isinstance(value, bool) and self.dynamic:
            return self.parameter(type(value).__name__, value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, complex):
            return f"complex({value.real!r}, {value.imag!r})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device('{value}')"
        raise NotExpressible(f"a {type(value).__name__}")


def _callee(info):
    """What to call: `torch.add`; "" for a method."""
    space, _, last = info.name.rpartition(".")
    module = torch
    for part in filter(None, space.split(".")):
        module = getattr(module, part, None)
    if hasattr(module, last):
        return f"torch.{info.name}"
    return "" if hasattr(torch.Tensor, last) else f"torch.ops.aten.{last}"


def _program(info, sample, dynamic, inplace, training):
    writer = _Writer(dynamic)
    given = [sample.input, *sample.args]
    if info.name == "where":  # the list calls it as a method of the second operand
        given[:2] = given[1::-1]
    self, *rest = [writer.text(value) for value in given]
    if training:  # TorchScript's autodiff takes no lone op
        self = f"({self} * 1.0)"
    rest += [f"{name}={writer.text(value)}" for name, value in sample.kwargs.items()]
    row, last = row_of(info), info.name.rpartition(".")[2]
    if inplace:
        new = f"{self} | {self}" if sample.input.dtype == torch.bool else f"{self} * 1"
        lines = [f"y = {new}", f"y.{last}_({', '.join(rest)})", "return y"]
    elif row and row.is_view:  # alone they are no group
        given = self if row.reshapes else f"({self} + 1)"  # computed values are not reshaped
        call = f"{given}.{last}({', '.join(rest)})"
        lines = [f"return {call} + 1"]
    elif _callee(info):
        lines = [f"return {_callee(info)}({', '.join([self, *rest])})"]
    else:
        lines = [f"return {self}.{last}({', '.join(rest)})"]
    source = f"def f({', '.join(writer.parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
    shown = [
        f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a)
        for a in writer.arguments
    ]
    around = {"aten::mul", "aten::__or__"} - {row.name} if row and inplace else ()
    if row and row.is_view:
        around = {"aten::add"}
    return Program(source, writer.arguments, f"{' '.join(lines)} with {', '.join(shown)}", frozenset(around))


def programs(info, dtype, device, count=None, reference=False, dynamic=False, inplace=False, training=False):
    """Programs of `count` samples of `dtype`: of all where None, of torch's longer list if `reference`.
    `training`: with a second op, as autodiff wants it."""
    make = info.reference_inputs if reference else info.sample_inputs
    found = [s for s in make(device, dtype, requires_grad=False) if _tensors(s.input)]
    if training or inplace or dynamic:
        found = [s for s in found if isinstance(s.input, torch.Tensor)]
    if count is not None:  # those with elements, from all over the list
        found = [s for s in found if all(t.dim() and t.numel() > 1 for t in _tensors(s.input))] or found
        found = found[:: max(len(found) // count, 1)][:count]
    for sample in found:
        try:
            yield _program(info, sample, dynamic, inplace, training)
        except NotExpressible:
            continue


def _tensors(given):
    """The tensors of a sample's first argument, which may be a list."""
    listed = given if isinstance(given, (list, tuple)) else [given]
    return listed if all(isinstance(t, torch.Tensor) for t in listed) else []


def transposed(program):
    """The program with tensors whose first dim is the innermost in memory."""
    return replace(program, arguments=[_transposed(a) for a in program.arguments])


def _transposed(value):
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    order = list(range(value.dim()))[::-1]
    return value.detach().permute(order).contiguous().permute(order)


#: Ops in which large numbers overflow or not, depending on the order of evaluation.
ORDERED = NORMS | {"reduction", "scans", "add", "sub", "rsub", "addcmul", "addcdiv", "lerp", "hypot"}
#: Of infinities eager's vector code has other means than its scalar code.
MOMENTS = NORMS | {"var", "std", "var_mean", "std_mean"}


def extremal(info, program):
    """The program with NaN, infinities, zeros and the limits of each dtype as its floating values, as far as
    what comes out is defined."""
    row = row_of(info)
    words = {row.family, row.name.partition("::")[2]}
    special = [math.nan, 0.0, -0.0, 1.0, -1.0]
    special += [] if words & MOMENTS else [math.inf, -math.inf]
    special += [] if words & (ORDERED | MOMENTS) else ["max", "min", "tiny", "eps"]
    return replace(program, arguments=[_extremal(a, special, k) for k, a in enumerate(program.arguments)])


def _extremal(value, special, seed):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return value
    info = torch.finfo(value.dtype)
    numbers = [getattr(info, x) if isinstance(x, str) else x for x in special]
    order = torch.randperm(value.numel() + len(numbers), generator=torch.Generator().manual_seed(seed))
    chosen = torch.tensor(numbers, dtype=value.dtype)[order[: value.numel()] % len(numbers)]
    made = torch.empty_like(value.detach())
    return made.copy_(chosen.reshape(value.shape).to(value.device))
