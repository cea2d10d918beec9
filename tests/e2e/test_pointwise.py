"""Pointwise groups against eager: sizes, layouts, dtypes, scalars, special values. All run with the fallback
off, so what is compared ran fused."""

import math

import pytest
import torch

import tsfuser
from kit.support import assert_matches, counted, fuse, groups, kinds, no_fallback, script, through

pytestmark = pytest.mark.optimized

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]
SMALL = [torch.uint8, torch.int8, torch.int16]  # wrap around in arithmetic
COMPLEX = [torch.complex64, torch.complex128]


@pytest.fixture(autouse=True)
def fused_only():
    with no_fallback():
        yield


def check(program, *inputs, ops, reference=True, strides=True):
    """Fuse `program` on `inputs`, and compare its result with eager's. It must have run in one group."""
    scripted = fuse(program, *inputs)
    assert len(groups(scripted)) == 1
    with counted() as rise:
        actual = scripted(*inputs)
    assert rise["exact_hits"] == 1 and rise["fallbacks"] == {}
    exact = program(*(wide(x) for x in inputs)) if reference else None
    assert_matches(actual, program(*inputs), exact, ops=ops, strides=strides)
    return scripted


def wide(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def ten_ops(x, b):
    y = x + b
    y = torch.sigmoid(y) * y
    y = y * 0.5 + 1.0
    y = torch.tanh(y) - x
    y = y.relu() + 0.25
    return y * y


def three_ops(x, y):
    return (x * 1.5 + y).tanh()


def two_ops(x):
    return (x * 1.5).tanh()


@pytest.mark.parametrize(
    "shape", [(1,), (7,), (128,), (1025,), (3, 5), (1, 9), (9, 1), (2, 3, 257), (4, 1, 6, 5), (64, 1024)]
)
def test_a_chain_with_a_bias(device, shape):
    x, b = torch.randn(shape, device=device), torch.randn(shape[-1:], device=device)
    check(ten_ops, x, b, ops=10)


@pytest.mark.parametrize("profiled", ["empty", "full"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_nothing_is_launched_for_size_zero(device, shape, profiled):
    """Where the first calls have elements, the guard lets those without through once it has missed some."""
    first = shape if profiled == "empty" else [max(size, 2) for size in shape]
    scripted = fuse(three_ops, torch.randn(first, device=device), torch.randn(first, device=device))
    x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
    with tsfuser.fuser(), counted() as rise:
        for _ in range(6):
            assert_matches(scripted(x, y), three_ops(x, y))
    assert rise["launches"] == 0 and not rise["fallbacks"]
    assert rise["exact_hits"] + rise["class_hits"] >= 2


@pytest.mark.parametrize(
    "left, right",
    [
        ((4, 5), (5,)), ((4, 5), (4, 1)), ((4, 1), (1, 5)), ((1, 1), (4, 5)), ((), (4, 5)),
        ((3, 1, 5), (4, 1)), ((2, 1, 3, 1), (5, 1, 7)), ((6, 1, 1), (1, 40, 33)),
        ((2, 3, 4, 5, 6), (3, 1, 5, 1)), ((1,), (1,)), ((1, 1), (1,)), ((128, 1), (1, 128)),
    ],
)  # fmt: skip
def test_broadcasts(device, left, right):
    check(three_ops, torch.randn(left, device=device), torch.randn(right, device=device), ops=3)


LAYOUTS = {
    "transposed": lambda x: x.transpose(-1, -2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x[:, 1::2],
    "sliced inner": lambda x: x[..., ::3],
    "narrowed": lambda x: x[..., 1:-1],
    "expanded": lambda x: x[:1].expand(6, -1, -1),
    "expanded inner": lambda x: x[..., :1].expand(-1, -1, 9),
    "all expanded": lambda x: x[0, 0, 0].expand(5, 6, 7),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_alone(device, name):
    """The output has eager's strides: those of the input where it is dense, row-major order of its stride
    order else."""
    x = LAYOUTS[name](torch.randn(6, 10, 12, device=device))
    check(two_ops, x, ops=2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_beside_a_contiguous_tensor(device, name):
    x = LAYOUTS[name](torch.randn(6, 10, 12, device=device))
    y = torch.randn(x.shape, device=device)
    check(three_ops, x, y, ops=3)
    check(three_ops, y, x, ops=3)


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(33, 65), (64, 64), (5, 128, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_operand(device, shape, dtype):
    x = torch.randn(shape, device=device, dtype=dtype)
    y = torch.randn(shape, device=device, dtype=dtype).transpose(-1, -2).contiguous().transpose(-1, -2)
    check(three_ops, x, y, ops=3)
    check(three_ops, y, x, ops=3)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 16, 8, 8), (1, 3, 2, 2), (2, 1, 4, 4)])
def test_channels_last_is_kept(device, shape):
    x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    bias = torch.randn(shape[1], 1, 1, device=device)
    other = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    scripted = check(three_ops, x, bias, ops=3)
    assert scripted(x, bias).is_contiguous(memory_format=torch.channels_last)
    check(three_ops, x, other, ops=3)
    check(three_ops, x, torch.randn(shape, device=device), ops=3)
    check(three_ops, torch.randn(shape, device=device), x, ops=3)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_misaligned_storage(device, dtype, offset):
    x = torch.randn(1024 + offset, device=device).to(dtype)[offset:]
    y = torch.randn(1024, device=device).to(dtype)
    check(three_ops, x, y, ops=3)


def test_alignment_is_looked_at_in_every_call(device):
    """A function fused on aligned tensors gets a misaligned one, and the other way round."""
    x, y = torch.randn(1024, device=device), torch.randn(1025, device=device)
    scripted = fuse(three_ops, x, x)
    for a in (y[1:], x, y[:1024], y[1:]):
        assert_matches(scripted(a, x), three_ops(a, x), three_ops(a.double(), x.double()), ops=3)


def test_new_tensors_are_no_new_class_of_call(device):
    """Whatever more than a vector's width their addresses are multiples of."""
    scripted = fuse(three_ops, torch.randn(1024, device=device), torch.randn(1024, device=device))
    whole = torch.randn(1024 + 512, device=device)
    offsets = [k * 16 for k in range(32)]  # multiples of 64 bytes, one of each of 128, 256...
    with counted() as rise:
        for offset in offsets:
            x = whole[offset : offset + 1024]
            assert_matches(scripted(x, x), three_ops(x, x), three_ops(x.double(), x.double()), ops=3)
    assert (rise["exact_hits"], rise["class_hits"]) == (len(offsets), 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_dtypes(device, dtype):
    x, b = torch.randn(37, 50, device=device).to(dtype), torch.randn(50, device=device).to(dtype)
    check(ten_ops, x, b, ops=10)


def integer_program(x, y):
    z = (x + y) * 2 - x
    return torch.where(z > 3, z, y) & 15


@pytest.mark.parametrize("dtype", INTEGERS + SMALL)
def test_integer_dtypes(device, dtype):
    x, y = (
        torch.randint(0 if dtype == torch.uint8 else -50, 100, (37, 5), device=device, dtype=dtype)
        for _ in range(2)
    )
    check(integer_program, x, y, ops=5)


def bool_program(x, y):
    return (x & y) ^ (x | y)


def test_bool(device):
    x, y = (torch.rand(37, 5, device=device) < 0.5 for _ in range(2))
    check(bool_program, x, y, ops=3)


def complex_program(x, y):
    return (x * y + x) / (y * y + 2.0)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_dtypes(device, dtype):
    x, y = (torch.randn(37, 5, device=device, dtype=dtype) for _ in range(2))
    check(complex_program, x, y, ops=6)


DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
PAIRS = [(a, b) for i, a in enumerate(DTYPES) for b in DTYPES[i + 1 :]]


@pytest.mark.graphs
@pytest.mark.quick
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(str(d).removeprefix("torch.") for d in p))
def test_promotion_of_two_dtypes(device, pair):
    x, y = (torch.randint(-3, 4, (6, 5), device=device).to(dtype) for dtype in pair)
    check(mixed_pair, x, y, ops=2)


def mixed_pair(x, y):
    return (y + x) * y


@pytest.mark.graphs
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("zero_dim", [torch.float16, torch.float32, torch.float64, torch.int64, torch.bool])
def test_zero_dim_operands_do_not_raise_the_dtype_within_a_category(device, dtype, zero_dim):
    x = torch.randint(1, 5, (6, 5), device=device).to(dtype)
    s = torch.tensor(3, device=device).to(zero_dim)
    check(mixed_pair, x, s, ops=2)
    check(mixed_pair, s, x, ops=2)


def test_two_zero_dim_tensors(device):
    """On the CPU they fuse only beside others: arithmetic of single numbers is cheaper in the
    interpreter."""
    x, y = torch.tensor(1.5, device=device), torch.tensor(2, device=device)
    if device == "cuda":
        check(mixed_pair, x, y, ops=2)
    else:
        scripted = fuse(mixed_pair, x, y)
        assert groups(scripted) == []
        assert_matches(scripted(x, y), mixed_pair(x, y), ops=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_cpu_scalar_tensors_travel_by_value(device, dtype):
    x, s = torch.randn(6, 5, device=device), torch.tensor(3).to(dtype)
    scripted = check(mixed_pair, x, s, ops=2)
    for value in (0, 7, -2):
        other = torch.tensor(value).to(dtype)
        assert_matches(scripted(x, other), mixed_pair(x, other), ops=2)


def moved(x, s):
    there = s.to(x.device)
    return x * there + there, there * 2, s.to(x), s.type_as(x)


@pytest.mark.parametrize("door", ["script", "compile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_cpu_scalar_tensors_that_are_moved_leave_a_group(device, dtype, door):
    x, s = torch.randn(6, 5, device=device), torch.tensor(3).to(dtype)
    with no_fallback():
        run = through(moved, door)
        for _ in range(4):
            found = run(x, s)
    wanted = moved(x, s)
    assert [y.device for y in found] == [y.device for y in wanted]
    for ours, eager in zip(found, wanted):
        assert_matches(ours, eager, ops=2)


def number_program(x, a: float, n: int):
    return (x * a + n).tanh() * a


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_python_numbers_are_arguments(device, dtype):
    x = torch.randint(-4, 4, (6, 5), device=device).to(dtype)
    scripted = check(number_program, x, 0.7, 3, ops=4)
    with counted() as rise:
        for a, n in ((0.1, -5), (2.5, 0), (-1.0, 2**20)):
            assert_matches(scripted(x, a, n), number_program(x, a, n), number_program(wide(x), a, n), ops=4)
    assert rise["kernels_compiled"] == 0


def alpha_program(x, y, a: float):
    return torch.add(x, y, alpha=a) - torch.sub(y, x, alpha=2)


def test_alpha(device):
    x, y = torch.randn(6, 5, device=device), torch.randn(6, 5, device=device)
    check(alpha_program, x, y, 0.3, ops=5)


SPECIAL = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e30,
    -1e30,
    1e-40,
    0.5,
    88.8,
    -104.0,
    65504.0,
]


def special_program(x, y):
    a = torch.maximum(x, y) + torch.relu(x)
    b = torch.clamp(y, -1.0, 1.0) * torch.sigmoid(x)
    return torch.where(x < y, a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf(device, dtype):
    values = torch.tensor(SPECIAL, device=device).to(dtype)
    x, y = values.repeat(len(SPECIAL)), values.repeat_interleave(len(SPECIAL))
    check(special_program, x, y, ops=4, reference=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 64])
@pytest.mark.parametrize(
    "text",
    ["torch.add(x, y, alpha=3)", "torch.sub(x, -y, alpha=3)", "torch.rsub(-y, x, alpha=3)"]
    + ["torch.addcmul(x, y, z)"],
)
def test_a_product_may_overflow_where_its_sum_does_not(device, text, size, dtype):
    """A sum of products is rounded once, as by eager's kernels for processors with that instruction."""
    source = f"def f(x, y, z):\n    return {text} * 1.0\n"
    most = torch.finfo(dtype).max
    inputs = [torch.full((size,), v, dtype=dtype, device=device) for v in (-most, most / 2, 3.0)]
    scripted = fuse(script(source), *inputs)
    result = scripted(*inputs)
    assert len(groups(scripted)) == 1 and torch.equal(result, inputs[1])


def many_outputs(x, y):
    a = x + y
    b = a.relu()
    c = b * x
    return a, b, c, b > 0


def test_several_outputs_of_several_dtypes(device):
    x, y = torch.randn(33, 7, device=device), torch.randn(7, device=device)
    scripted = fuse(many_outputs, x, y)
    assert len(groups(scripted)) == 1
    for actual, eager in zip(scripted(x, y), many_outputs(x, y)):
        assert_matches(actual, eager, ops=3)


def outputs_of_several_shapes(x, y):
    a = x.exp() + 1.0
    return a, a * y


def test_outputs_of_several_shapes(device):
    x, y = torch.randn(7, device=device), torch.randn(5, 7, device=device)
    scripted = fuse(outputs_of_several_shapes, x, y)
    for actual, eager in zip(scripted(x, y), outputs_of_several_shapes(x, y)):
        assert_matches(actual, eager, ops=3)


def same_tensor_twice(x):
    return (x + x) * x


def test_one_tensor_as_two_operands(device):
    check(same_tensor_twice, torch.randn(33, 7, device=device), ops=2)


def casts(x):
    y = x.to(torch.float16)
    z = y.to(torch.float32) * 2.0
    return z.to(torch.int32)


def test_casts(device):
    """A half inside a group is not rounded, so the values are halves already."""
    check(casts, torch.randint(-100, 100, (33, 7), device=device).double(), ops=3)


def test_a_long_chain(device):
    """100 nodes in one kernel."""
    body = "".join(f"    y = y * {1 - i / 1000} + x\n" for i in range(50))
    unit = torch.jit.CompilationUnit(f"def f(x):\n    y = x\n{body}    return y\n")
    x = torch.randn(33, 7, device=device, dtype=torch.float64)
    scripted = fuse(unit.f, x)
    (group,) = groups(scripted)
    y = x
    for i in range(50):
        y = y * (1 - i / 1000) + x
    assert_matches(scripted(x), y, ops=100)


@pytest.mark.parametrize("count", [60, 150])
def test_many_inputs(device, count):
    """Kernels take a limited number of arguments: beyond it there is more than one group, and the result is
    the same."""
    names = [f"x{i}" for i in range(count)]
    source = f"def f({', '.join(names)}):\n    return ({' + '.join(names)}) * 2.0\n"
    inputs = [torch.randn(5, 7, device=device, dtype=torch.float64) for _ in names]
    scripted = fuse(torch.jit.CompilationUnit(source).f, *inputs)
    assert (len(groups(scripted)) == 1) == (count < 128)
    assert_matches(scripted(*inputs), sum(inputs[1:], inputs[0]) * 2.0, ops=count)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("floats", [torch.float32, torch.float64], ids=str)
def test_a_cast_to_integers_and_back_leaves_no_negative_zero(device, floats, integers):
    def program(x, back, like):
        return 1.0 / (x.type_as(like).type_as(back) * 1.0)

    x = torch.linspace(-2, 2, 101, dtype=floats, device=device)
    operands = x, x[:1], x[:1].to(integers)
    assert torch.equal(fuse(program, *operands)(*operands), program(*operands))


@pytest.mark.parametrize("copy", [False, True])
def test_casts_of_a_trace_that_name_the_device(device, copy):
    """`x.to(device)` and `x.to(device, dtype)` have overloads of their own."""

    def function(x, y):
        both = (x > 0.5).to(x.device) & (y > 0.5).to(x.device, torch.bool, copy=copy)
        return both.to(device=x.device, dtype=torch.float32) * x

    x, y = torch.rand(6, 10, device=device), torch.rand(10, device=device)
    traced = torch.jit.trace(function, (x, y))
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            assert torch.equal(traced(x, y), function(x, y))
        (group,) = groups(traced)
    assert kinds(group).count("aten::to") == 3
