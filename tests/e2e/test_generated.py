"""Programs that hypothesis makes up: random ops over inputs of random shapes, layouts and dtypes, fused
against eager.

A program is built while it is evaluated eagerly, so that an op which eager refuses, or whose values grow out
of hand, is left out. Ops that jump (comparisons, floor) only see the program's inputs, which are exact: a
rounding error elsewhere would be blown up by them.
"""

import re
import warnings

import pytest
import torch
from support import assert_matches, fuse, no_fallback, tolerance

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import assume, given, note  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SMOOTH = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "{0} * 0.5", "{0} + 2", "{0} - 1.5",
    "2 * {0}", "-{0}", "{0}.abs()", "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=3)",
    "torch.rsub({0}, {1})", "1.0 / ({0} * {0} + 1)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.max({0}, {1})", "torch.relu({0})", "torch.sigmoid({0})", "torch.tanh({0})",
    "torch.exp(-{0}.abs())", "torch.expm1(-{0}.abs())", "torch.log1p({0}.abs())",
    "torch.log({0}.abs() + 1)", "torch.sqrt({0}.abs() + 1)", "torch.rsqrt({0}.abs() + 1)", "torch.sin({0})",
    "torch.cos({0})", "torch.atan({0})", "torch.atan2({0}, {1}.abs() + 1)", "torch.erf({0})",
    "torch.nn.functional.gelu({0})", "torch.nn.functional.silu({0})", "torch.nn.functional.softplus({0})",
    "torch.reciprocal({0}.abs() + 1)", "torch.nn.functional.leaky_relu({0}, 0.1)",
    "torch.nn.functional.hardswish({0})", "torch.nn.functional.hardtanh({0})",
    "torch.nn.functional.elu({0})", "torch.clamp({0}, -1, 1)", "torch.clamp({0}, min=0)",
    "torch.lerp({0}, {1}, 0.25)", "torch.pow({0}, 2)", "torch.addcmul({0}, {1}, {2}, value=0.5)",
    "torch.where(c, {0}, {1})", "{0}.type_as({1})", "{0}.to(torch.float32)",
)  # fmt: skip
JUMPING = (
    "{0} < {1}", "{0} <= {1}", "{0} > 0", "{0} >= 1", "{0} == {1}", "{0} != 0", "torch.floor({0})",
    "torch.ceil({0})", "torch.round({0})", "torch.trunc({0})", "torch.frac({0})", "torch.sign({0})",
    "torch.isnan({0})", "torch.isfinite({0})", "torch.fmod({0}, {1}.abs() + 1)",
    "torch.remainder({0}, {1}.abs() + 1)", "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "torch.bitwise_not({0})",
    "torch.logical_not({0})", "{0}.to(torch.int32)", "torch.nn.functional.threshold({0}, 0.5, -1.0)",
)  # fmt: skip
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)
LARGEST = 30.0  # values beyond make sin and exp amplify rounding errors


@st.composite
def shapes(draw):
    """A shape for the result, and input shapes that broadcast to it."""
    full = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 33]), min_size=1, max_size=4))
    result = []
    for _ in range(draw(st.integers(1, 3))):
        kept = full[draw(st.integers(0, len(full))) if draw(st.booleans()) else 0 :]
        result.append([1 if draw(st.integers(0, 4)) == 0 else size for size in kept])
    return result


def permuted(x):
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def shifted(x):
    storage = torch.cat([x.flatten()[:1], x.flatten()])
    return storage[1:].view(x.shape)


def expanded(x):
    return x[:1].expand(x.shape) if x.dim() else x


LAYOUTS = (torch.clone, torch.clone, permuted, strided, shifted, expanded)


@st.composite
def tensors(draw, shape):
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if dtype == torch.bool:
        x = torch.rand(shape, generator=generator) < 0.5
    elif dtype.is_floating_point:
        x = (torch.randn(shape, generator=generator) * 2).to(dtype)
    else:
        x = torch.randint(-9, 9, shape, generator=generator, dtype=dtype)
    return draw(st.sampled_from(LAYOUTS))(x)


def evaluate(expression, values):
    """The value, or None where eager refuses the expression or the values grow too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = eval(expression, {"torch": torch}, values)
    except (RuntimeError, TypeError):
        return None
    largest = result.abs().max() if result.dtype != torch.bool else torch.tensor(1)
    return result if bool(torch.isfinite(largest)) and largest <= LARGEST else None


@st.composite
def programs(draw):
    """`(source, values)`: TorchScript text of `f(c, x0, ...) -> List[Tensor]`, which returns all that nobody
    reads, and the value of each name."""
    inputs = [draw(tensors(shape)) for shape in draw(shapes())]
    condition = torch.tensor([True, False, True, True, False, False, True, False]).repeat(8)
    widest = torch.broadcast_shapes(*(x.shape for x in inputs))
    values = {"c": condition[: widest[-1] if widest else 1]} | {f"x{i}": x for i, x in enumerate(inputs)}
    exact, names, lines = [n for n in values if n != "c"], [n for n in values if n != "c"], []
    for _ in range(draw(st.integers(3, 12))):
        jumping = draw(st.integers(0, 4)) == 0
        template = draw(st.sampled_from(JUMPING if jumping else SMOOTH))
        operands = [draw(st.sampled_from(exact if jumping else names)) for _ in range(3)]
        expression = template.format(*operands)
        value = evaluate(expression, values)
        if value is None:
            continue
        name = f"v{len(lines)}"
        lines.append(f"    {name} = {expression}\n")
        values[name] = value
        names.append(name)
    assume(len(lines) >= 2)
    read = {operand for line in lines for operand in re.findall(r"\bv\d+", line.partition("=")[2])}
    results = [name for name in names if name[0] == "v" and name not in read]
    if read and draw(st.booleans()):
        results.append(draw(st.sampled_from(sorted(read))))
    arguments = ", ".join(n for n in values if n[0] in "cx")
    source = f"def f({arguments}):\n{''.join(lines)}    return [{', '.join(results)}]\n"
    return source, values


def exact_values(source, values):
    """The program's results with floating inputs in float64."""
    space = {"torch": torch}
    exec(source.replace("torch.float32", "torch.float64"), space)
    inputs = [v.double() if v.is_floating_point() else v for n, v in values.items() if n[0] in "cx"]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the dtype of int / int
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return space["f"](*inputs)
    except RuntimeError:  # lerp of a float64 and a value that the program cast
        assume(False)
    finally:
        torch.set_default_dtype(default)


@given(program=programs())
def test_generated_program(device, program):
    source, values = program
    note(source)
    inputs = [v.to(device) for n, v in values.items() if n[0] in "cx"]
    inputs = [_same_layout(x, v) for x, v in zip(inputs, (v for n, v in values.items() if n[0] in "cx"))]
    note(str([(x.dtype, x.shape, x.stride()) for x in inputs]))
    eager_space = {"torch": torch}
    exec(source, eager_space)
    eager = eager_space["f"](*inputs)
    with no_fallback():
        scripted = fuse(torch.jit.CompilationUnit(source).f, *inputs, calls=3)
        actual = scripted(*inputs)
    floats = [v.dtype for v in values.values() if v.is_floating_point()]
    precision = max(floats, key=lambda dtype: tolerance(dtype, 1), default=torch.float32)
    for mine, plain, exact in zip(actual, eager, exact_values(source, values)):
        assert_matches(mine, plain, exact.to(device), ops=int(len(values) * LARGEST), precision=precision)


def _same_layout(x, like):
    """`x` with the strides and storage offset of `like`: moving to a device makes tensors dense."""
    if x is like:
        return x
    storage = torch.empty(
        like.untyped_storage().nbytes() // like.itemsize, dtype=like.dtype, device=x.device
    )
    view = storage.as_strided(like.shape, like.stride(), like.storage_offset())
    storage.copy_(torch.empty(0, dtype=like.dtype).set_(like.untyped_storage()))
    return view
