"""Calls of warm functions with arguments that eager may reject.

In: an OpInfo or a row. Out: `Trial`s. The function of a trial takes all that it can as arguments. It is
called with valid ones until it is fused, then with changed ones: numbers at the edges of all dtypes and
beyond, lists of other items and lengths, tensors of other sizes and dtypes, and the errors of torch's own
list. Example: `sweep(trials([info], torch.float32), Tally())` (outcomes.py).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kit.opinfo import NotExpressible, _callee, _Writer, row_of, title
from kit.outcomes import outcome, plain
from kit.rows import _constant
from kit.samples import _OWN_TESTS, _choices, _is_mask, operation, schema_of
from kit.support import script

FLOATS = [
    0.0,
    -0.0,
    -1.0,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    70000.0,
    1e30,
    -1e39,
    1.7976931348623157e308,
    2.0**63,
]
INTS = [
    0,
    -1,
    127,
    128,
    255,
    256,
    300,
    -129,
    -255,
    -256,
    70000,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
]
ITEMS = [-2, -1, 0, 1, 7, 100]
DTYPES = [torch.float32, torch.float16, torch.uint8, torch.int64, torch.bool, torch.complex64]
TEXTS = ["asdf"]
RANDOM = {"nn.functional.dropout", "rand_like", "randn_like", "dropout", "native_dropout"}
#: Ops of eager's that read beyond the end of a tensor that is too short.
UNSAFE = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "native_dropout_backward",
}
#: Gradients that torch's kernels set to 0 in whole vectors, and pass on behind them, where a bound is NaN:
#: which elements these are differs by processor.
DIFFER_BY_PROCESSOR = {"aten::hardtanh_backward", "aten::hardshrink_backward", "aten::softshrink_backward"}


@dataclass
class Trial:
    """`make` gives the function, scripted anew; `eager` is what eager runs; `text` says what it calls.
    `valid` are arguments, and `changed` is a list of other ones."""

    name: str
    text: str
    make: Callable = field(repr=False)
    eager: Callable = field(repr=False)
    valid: list = field(repr=False)
    changed: list = field(repr=False, default_factory=list)

    @property
    def random(self):
        return self.name in RANDOM


class _Open(_Writer):
    """A writer that makes a parameter of all but None, bools and dtypes."""

    def __init__(self):
        super().__init__(True)

    def text(self, value):
        if isinstance(value, str):
            return self.parameter("str", value)
        if isinstance(value, (list, tuple, torch.Size)) and all(type(x) is int for x in value):
            return self.parameter("List[int]", list(value))
        return super().text(value)


def program(info, sample):
    """The source of `f` and its arguments."""
    writer, row = _Open(), row_of(info)
    given = [sample.input, *sample.args]
    if info.name == "where":  # the list calls it as a method of the second operand
        given[:2] = given[1::-1]
    self, *rest = [writer.text(value) for value in given]
    rest += [f"{name}={writer.text(value)}" for name, value in sample.kwargs.items()]
    last = info.name.rpartition(".")[2]
    if row.is_view:  # alone they are no group
        text = f"({self} + 1).{last}({', '.join(rest)}) + 1"
    elif _callee(info) and row.family == "casts":  # alone they are left to torch
        text = f"{_callee(info)}({', '.join([self, *rest])}) + {self}"
    elif _callee(info):
        text = f"{_callee(info)}({', '.join([self, *rest])})"
    else:
        text = f"{self}.{last}({', '.join(rest)})"
    return f"def f({', '.join(writer.parameters)}):\n    return {text}\n", writer.arguments


def valid_programs(info, dtypes, device="cpu"):
    """Source -> arguments, of the samples of torch's list; those with elements first."""
    found = {}
    for dtype in dtypes:
        if dtype not in info.supported_dtypes(device):
            continue
        samples = [s for s in info.sample_inputs(device, dtype) if isinstance(s.input, torch.Tensor)]
        for sample in sorted(samples, key=lambda s: s.input.numel() <= 1 or s.input.dim() > 5):
            try:
                source, arguments = program(info, sample)
            except NotExpressible:
                continue
            found.setdefault(source, arguments)
    return found


def rejected_programs(info, device="cpu"):
    """(source, arguments) of the samples of errors of torch's list."""
    if info.error_inputs_func is None:
        return
    for error in info.error_inputs(device):
        if isinstance(error.sample_input.input, torch.Tensor):
            try:
                yield program(info, error.sample_input)
            except NotExpressible:
                continue


# ---- what is changed


def changes(arguments, cross=True, tensors=True):
    """Arguments of which one is changed, or one number and the dtype of all tensors. `tensors`: whether a
    tensor may be changed alone."""
    for k, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and not tensors:
            continue
        for other in others(value):
            yield [*arguments[:k], other, *arguments[k + 1 :]]
    for dtype in DTYPES if cross else ():
        cast = [_cast(a, dtype) for a in arguments]
        yield cast
        for k, value in enumerate(cast):
            if isinstance(value, (int, float)):
                for other in others(value):
                    yield [*cast[:k], other, *cast[k + 1 :]]


def _cast(value, dtype):
    """Floating tensors, or integers', as another dtype; masks and indices stay."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return value
    return value.detach().to(dtype)


def others(value):
    """What may stand in the place of an argument."""
    if isinstance(value, torch.Tensor):
        return list(_tensors(value.detach()))
    if isinstance(value, float):
        return FLOATS
    if isinstance(value, int):
        return INTS + ITEMS
    if isinstance(value, str):
        return TEXTS
    changed = [[*value[:k], item, *value[k + 1 :]] for k in range(len(value)) for item in ITEMS]
    return [
        *changed,
        value[:-1],
        [*value, 1],
        [*value, value[0]],
        [-x for x in value],
        [-1] * len(value),
        [-2] * len(value),
    ]


def _tensors(value):
    for dtype in DTYPES:
        if dtype != value.dtype:
            yield value.to(dtype)
    yield value.reshape(-1)[0].clone() if value.numel() else value.new_zeros(())
    yield value.unsqueeze(0).clone()
    for d in range(value.dim()):
        yield torch.cat([value, value.narrow(d, 0, min(1, value.size(d)))], d)
        yield value.narrow(d, 0, 0).clone()
    if value.dim():
        yield value.select(0, 0).clone() if value.size(0) else value[..., :0].sum(0)


def trials(infos, most=3, cross=True, device="cpu"):
    """Trials of the ops: all errors of torch's list, and changes of `most` programs each. Second: errors for
    which no valid program was found."""
    found, lost = [], []
    for info in infos:
        if device != "cpu" and (row_of(info).table or row_of(info).places):
            continue  # an index out of range is an assertion on CUDA, after which the process has no device
        valid = valid_programs(info, (torch.float32, torch.int64, torch.bool, torch.complex64), device)
        tensors = title(info) not in UNSAFE
        trials_of = {s: _of_source(title(info), s, a) for s, a in valid.items()}
        for source, arguments in rejected_programs(info, device):
            if source not in trials_of:
                repaired = next(_repairs(source, arguments), None)
                if repaired is None:
                    lost.append(f"{title(info)}: {source} {arguments}"[:300])
                    continue
                trials_of[source] = _of_source(title(info), source, repaired)
            trials_of[source].changed.append(arguments)
        for source, arguments in list(valid.items())[:most]:
            trials_of[source].changed += changes(arguments, cross, tensors)
        found += [t for t in trials_of.values() if t.changed]
    return found, lost


def _of_source(name, source, arguments):
    text = source.splitlines()[1].strip()
    return Trial(name, text, lambda: script(source), plain(source), arguments)


def row_trials(rows, dtypes, cross=True, device="cpu"):
    """Trials of each overload of the rows, whose numbers are all arguments."""
    for row, dtype in itertools.product(rows, dtypes):
        if (
            row.family in _OWN_TESTS
            or row.is_view
            or row.name.startswith(("prim::", "tsfuser::"))
            or dtype not in row.dtypes
        ):
            continue
        for overload in row.overloads:
            schema = schema_of(row.name, overload)
            if schema is None:
                continue
            for whole in (False, True):
                trial = _row_trial(row, schema, dtype, whole, cross, device)
                if trial is not None:
                    yield trial


def _is_number(argument):
    return str(argument.type).removeprefix("Optional[").rstrip("]") in ("number", "float")


def _row_trial(row, schema, dtype, whole, cross, device):
    """`whole`: Scalars are ints, else floats. None where the overload has no number to change."""
    if not any(_is_number(a) for a in schema.arguments):
        return None
    inputs, operands, constants, valid = [], [], [], []
    for argument in schema.arguments:
        kind, name = str(argument.type), argument.name
        if kind in ("Tensor", "Optional[Tensor]"):
            inputs.append(f"%x{len(valid)} : Tensor")
            operands.append(f"%x{len(valid)}")
            mask = torch.arange(15).reshape(3, 5) % 3 == 0
            valid.append((mask if _is_mask(row, name) else _positive(dtype)).to(device))
        elif _is_number(argument):
            inputs.append(f"%x{len(valid)} : {'int' if whole and 'number' in kind else 'float'}")
            operands.append(f"%x{len(valid)}")
            valid.append(2 if whole and "number" in kind else 0.25)
        else:
            value = _choices(row, name, kind)[0]
            operands.append(f"%c{len(constants)}")
            constants.append(f"  %c{len(constants)} : {_constant(value)}")
    numbers = [v for v in valid if isinstance(v, (int, float))]
    if whole and not any(isinstance(v, int) for v in numbers) or not isinstance(valid[0], torch.Tensor):
        return None
    call = f"{row.name}({', '.join(operands)})"
    lines = [f"graph({', '.join(inputs)}):", *constants, f"  %r : Tensor = {call}"]
    if row.family == "casts":
        lines += ["  %one : int = prim::Constant[value=1]()", "  %s : Tensor = aten::add(%r, %x0, %one)"]
    text = "\n".join([*lines, f"  return ({'%s' if row.family == 'casts' else '%r'})"])

    def make():
        return torch._C._create_function_from_graph("f", torch._C.parse_ir(text))

    def eager(*arguments):
        given, left = {}, list(arguments)
        for argument, operand in zip(schema.arguments, operands):
            constant = operand.startswith("%c")
            given[argument.name] = (
                _choices(row, argument.name, str(argument.type))[0] if constant else left.pop(0)
            )
        result = operation(row.name, schema.overload_name)(**given)
        return result + arguments[0] if row.family == "casts" else result

    trial = Trial(f"{row.name}.{schema.overload_name}", f"{call} of {dtype}", make, eager, valid)
    trial.changed += changes(valid, cross, tensors=False)
    if row.name in DIFFER_BY_PROCESSOR:
        trial.changed = [c for c in trial.changed if not any(map(_is_nan, c))]
    return trial


def _is_nan(argument):
    return isinstance(argument, float) and math.isnan(argument)


def _positive(dtype):
    return (torch.arange(15).reshape(3, 5) % 7 + 1).to(getattr(torch, dtype)) / (1 if "int" in dtype else 8)


def _repairs(source, arguments):
    """Valid arguments for a program of an error."""
    options = []
    shapes = [(2, 3, 4), (3,), (4,), (20,)]
    for a in arguments:
        if isinstance(a, torch.Tensor):
            options.append(
                [a, a.float(), *(torch.rand(s, device=a.device) for s in shapes), torch.rand(2, 3, 4) > 0.5]
            )
        elif isinstance(a, bool) or isinstance(a, float):
            options.append([a])
        elif isinstance(a, int):
            options.append([a, 0])
        elif isinstance(a, str):
            options.append([a, "none", "trunc"])
        else:
            options.append([a, list(range(len(a))), [4], [3, 4], [1] * len(a)])
    for chosen in itertools.islice(itertools.product(*options), 4000):
        if outcome(plain(source), chosen)[0] == "gives":
            yield list(chosen)
