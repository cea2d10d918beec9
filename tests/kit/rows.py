"""What the tests of the op table share: a sample as a Fusion, as TorchScript, and its result against
eager's.

Example:
    fusion, call, arguments = build(sample, dynamic=False)
    assert mismatch(sample, result) is None
"""

from dataclasses import replace

import torch

from kit.samples import Sample
from tsfuser.errors import Refusal
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, ScalarArg, TensorArg
from tsfuser.ops import table

EPSILON = {
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}
EPSILON |= {torch.complex64: 2.0**-23, torch.complex128: 2.0**-52}
ULPS = 16  # two libraries' sin, exp or pow and the roundings of a formula; a 16-bit result is rounded once

#: Derivatives at NaN: eager's vector and scalar code differ from each other.
NAN_UNDEFINED = {
    "hardtanh_backward",
    "hardshrink_backward",
    "softshrink_backward",
    "hardswish_backward",
    "elu_backward",
    "logit_backward",
}
#: Eager's vector code gives NaN where the quotient has more digits than the dtype.
LONG_QUOTIENT = {"fmod", "remainder"}


def is_integer_division(sample):
    name = sample.row.name.partition("::")[2]
    whole = name in ("floor_divide", "remainder", "fmod") or sample.arguments.get("rounding_mode")
    dividend, divisor = sample.arguments.get("self"), sample.arguments.get("other")
    return whole and not any(
        isinstance(x, float) or isinstance(x, torch.Tensor) and x.is_floating_point()
        for x in (dividend, divisor)
    )


def tame(sample):
    """The sample with divisors that neither raise nor (the lowest integer by -1) end the process; None if
    it has to be left out."""
    if not is_integer_division(sample):
        return sample
    divisor = sample.arguments["other"]
    if not isinstance(divisor, torch.Tensor):
        return sample if divisor not in (0, False) else None
    if divisor.is_complex():
        return sample
    bad = (divisor == 0) | ((divisor == -1) if divisor.dtype not in (torch.uint8, torch.bool) else False)
    return Sample(
        sample.row,
        sample.overload,
        {**sample.arguments, "other": torch.where(bad, torch.full_like(divisor, 1), divisor)},
    )


def has_numbers(sample):
    return any(_is_number(sample, n, v) for n, v in sample.arguments.items())


def _is_number(sample, name, value):
    return isinstance(value, (bool, int, float, complex)) and name not in sample.row.structural


def build(sample, dynamic=False, device=None):
    """The Fusion of a sample, its Call and the call's arguments. `dynamic`: numbers are arguments, not
    literals. Integer divisions are built as for CUDA, since the CPU refuses unknown divisors. Raises
    Refusal."""
    device = device or ("cuda:0" if is_integer_division(sample) else "cpu")
    arguments, described, given = [], [], {}
    for name, value in sample.arguments.items():
        if isinstance(value, torch.Tensor):
            described.append(
                TensorArg(str(value.dtype)[6:], device, tuple(value.shape), tuple(value.stride()))
            )
        elif dynamic and _is_number(sample, name, value):
            described.append(ScalarArg(type(value).__name__, value if isinstance(value, int) else None))
        else:
            literal = _is_number(sample, name, value)
            given[name] = lambda b, value=value, literal=literal: b.literal(value) if literal else value
            continue
        arguments.append(value)
        kind = "tensor" if isinstance(value, torch.Tensor) else "number"
        given[name] = lambda b, index=len(arguments) - 1, kind=kind: getattr(b, kind)(index)
    call = Call(tuple(described))
    builder = Builder(call, device)
    result = sample.row.build(builder, **{name: make(builder) for name, make in given.items()})
    for value in result if isinstance(result, tuple) else (result,):
        builder.output(value)
    return builder.finish(), call, arguments


def refusal(sample, dynamic=False):
    try:
        build(sample, dynamic)
    except Refusal as reason:
        return str(reason)
    return None


def mismatch(sample, result):
    """What is wrong with `result`; None if it is what eager gives: equal dtype, shape, NaN and inf, equal
    integers, and numbers as near to eager or to its result in double as the dtype allows."""
    eager = sample.eager()
    if (result.dtype, result.shape) != (eager.dtype, eager.shape):
        return f"{sample}: {result.dtype}{list(result.shape)}, eager {eager.dtype}{list(eager.shape)}"
    if eager.dtype in EPSILON:
        wrong = ~(
            _near(sample, result, eager)
            | _near(sample, result, _double(sample, eager))
            | _excused(sample, eager)
        )
    else:
        wrong = result != eager
    if not bool(wrong.any()):
        return None
    shown = []
    for i in wrong.flatten().nonzero()[:3, 0].tolist():
        operands = [t.flatten()[i].item() if t.dim() else t.item() for t in sample.tensors.values()]
        shown.append(f"at {operands} {result.flatten()[i].item()!r}, eager {eager.flatten()[i].item()!r}")
    return f"{sample}: {int(wrong.sum())} of {wrong.numel()}: {'; '.join(shown)}"


def _double(sample, eager):
    """What eager gives in float64, on the CPU: on CUDA some ops (hardswish, hardsigmoid) keep constants in
    float even then."""
    arguments = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in sample.arguments.items()}
    try:
        exact = replace(sample, arguments=arguments).eager(double=True).to(eager.device)
    except Exception:
        return eager
    return exact if exact.shape == eager.shape else eager


def _near(sample, result, wanted):
    wide = torch.complex128 if result.is_complex() else torch.float64
    rounded = wanted.to(result.dtype).to(wide)
    actual, wanted = result.to(wide), wanted.to(wide)
    same = (actual == rounded) | (torch.isnan(actual) & torch.isnan(wanted))
    scale = wanted.abs()  # and, where the formula cancels, that of the operands and 1
    if sample.row.error != "result":
        for t in sample.tensors.values():
            scale = torch.maximum(scale, t.to(wide).abs().nan_to_num(0, 0, 0).clamp(min=1))
    info = torch.finfo(result.dtype)
    ulps = 1 if info.bits == 16 else ULPS
    allowed = ulps * EPSILON[result.dtype] * scale.clamp(min=info.tiny)
    return same | (torch.isfinite(wanted) & torch.isfinite(actual) & ((actual - wanted).abs() <= allowed))


def _excused(sample, eager):
    """Elements at which eager is at odds with itself."""
    name = sample.row.name.partition("::")[2]
    excused = torch.zeros(eager.shape, dtype=torch.bool, device=eager.device)
    if name in NAN_UNDEFINED:
        excused |= torch.isnan(sample.arguments.get("self", sample.arguments.get("self_or_result")))
    if name == "log_sigmoid_backward":  # a buffer that underflowed, times an infinite gradient
        excused |= torch.isinf(sample.arguments["grad_output"])
    if sample.row.error == "contracted":
        for t in sample.tensors.values():
            excused |= t.abs() > torch.finfo(t.dtype).max / 128 if t.is_floating_point() else False
    if name in LONG_QUOTIENT:
        dividend, divisor = (
            torch.as_tensor(sample.arguments[n]).to(eager.device).double() for n in ("self", "other")
        )
        excused |= (dividend / divisor).abs() > 0.25 / EPSILON[eager.dtype]
    return excused


# ---- as TorchScript


def graph_of(samples):
    """TorchScript IR that evaluates `samples`, numbers as constants, and its inputs (each tensor once)."""
    inputs, lines, results = {}, [], []
    for sample in samples:
        operands = []
        for argument in sample.schema.arguments:
            value = sample.arguments[argument.name]
            if isinstance(value, torch.Tensor):
                operands.append(f"%x{list(inputs.setdefault(id(value), [len(inputs), value]))[0]}")
            else:
                operands.append(f"%c{len(lines)}")
                lines.append(f"  %c{len(lines)} : {_constant(value)}")
        results.append(f"%r{len(lines)}")
        lines.append(f"  %r{len(lines)} : Tensor = {sample.row.name}({', '.join(operands)})")
    head = ", ".join(f"%x{k} : Tensor" for k, _ in inputs.values())
    types = ", ".join(["Tensor"] * len(results))
    tail = [f"  %all : ({types}) = prim::TupleConstruct({', '.join(results)})", "  return (%all)"]
    return "\n".join([f"graph({head}):", *lines, *tail]), [value for _, value in inputs.values()]


def _constant(value):
    if value is None:
        return "NoneType = prim::Constant()"
    if isinstance(value, bool):
        return f"bool = prim::Constant[value={int(value)}]()"
    if isinstance(value, str):
        return f'str = prim::Constant[value="{value}"]()'
    if isinstance(value, float):
        text = f"{value:.17g}"
        return f"float = prim::Constant[value={text}{'' if set(text) & set('.ena') else '.'}]()"
    return f"int = prim::Constant[value={value}]()"


def all_rows():
    """The rows of ops that compute something; views, which are never a group alone, are tested in
    test_views."""
    return [row for row in table.all_rows() if not row.is_view]
