"""torch.compile: numbers, checks and bit casts are part of the program, and what is not has a reason."""

import math
import operator

import pytest
import torch

import tsfuser
from kit.support import assert_matches
from tsfuser.ops import left_to_python

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


@pytest.fixture(autouse=True)
def numbers_in_graphs():
    config = torch._dynamo.config
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


def floats_of_sizes(x):
    n = x.shape[0]
    ints = round(n / 4), int(n * 0.5), math.floor(n / 4), math.ceil(n / 4), n**2 + n**3, n << 2, n >> 1
    return x * (n / 3) + math.sqrt(n) + 1, ints, n > 3, (n > 3) | (n == 1), (n > 2) & (n != 5), n % 3 / 2


def test_numbers_that_sizes_decide():
    run = compiled(floats_of_sizes, dynamic=True)
    for n in (6, 7, 10, 13):
        x = torch.randn(n, 4)
        (ours, *numbers), (plain, *expected) = run(x), floats_of_sizes(x)
        assert_matches(ours, plain, ops=8)
        assert numbers == expected and list(map(type, numbers)) == list(map(type, expected))
    assert tsfuser.stats()["left_to_python"] == {}


HOW = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round}


@pytest.mark.parametrize("how", HOW)
def test_numbers_that_data_decide(how):
    """Also those of which Python makes no int."""

    def function(number, x):
        value = number.item()
        return x * HOW[how](value) + max(value, 2.0), value > 3

    run, x = compiled(function), torch.randn(5)
    for value in (2.5, 3.5, -2.5, -7.2, 0.0):
        ours, plain = (f(torch.tensor(value), x) for f in (run, function))
        assert_matches(ours[0], plain[0], ops=4)
        assert ours[1] is plain[1]
    for value, error in ((math.inf, OverflowError), (math.nan, ValueError)):
        with pytest.raises(error, match="cannot convert float"):
            run(torch.tensor(value), x)
    assert tsfuser.stats()["left_to_python"] == {}


DIVISIONS = {
    "/": (operator.truediv, [(7, 2), (7, -2), (7, 0)]),
    "//": (operator.floordiv, [(7, 2), (-7, 2), (7, -1), (7, 0)]),
    "%": (operator.mod, [(7, 2), (-7, 2), (7, -1), (7, 0)]),
    "<<": (operator.lshift, [(7, 2), (-7, 3), (0, 70), (7, -1)]),
    ">>": (operator.rshift, [(7, 2), (-7, 3), (7, 70), (-7, 70), (7, -1)]),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_arithmetic_of_two_ints_gives_or_raises_what_python_does(name):
    """TorchScript's remainder by 0 ends the process, and its quotient is infinite."""
    function, pairs = DIVISIONS[name]
    program, x = (lambda a, b, x: (x * 2, function(a.item(), b.item()))), torch.randn(5)
    try:
        plain = torch.compile(program, backend="eager")
        for a, b in ((7, 2), (9, 3)):  # the second call is traced for any numbers
            plain(torch.tensor(a), torch.tensor(b), x)
    except torch._dynamo.exc.TorchDynamoException as error:  # torch 2.11, of shifts
        pytest.skip(f"this torch does not trace it: {type(error).__name__}")
    run = compiled(program)
    for a, b in pairs:
        try:
            expected = function(a, b)
        except Exception as error:
            with pytest.raises(type(error), match="zero|negative"):
                run(torch.tensor(a), torch.tensor(b), x)
        else:
            found = run(torch.tensor(a), torch.tensor(b), x)[1]
            assert found == expected and type(found) is type(expected)
    assert tsfuser.stats()["left_to_python"] == {}


FUNCTIONS = {"sqrt": (4, 0, -4), "acos": (0, 1, 2), "sinh": (0, 3, -1000), "cos": (0, 3)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numbers_raise_what_python_raises(name):
    """TorchScript's root of -4 is NaN."""
    function = getattr(math, name)
    run = compiled(lambda a, x: (x * 2, function(a.item())))
    for number in FUNCTIONS[name]:
        try:
            expected = function(number)
        except (ValueError, OverflowError) as error:
            with pytest.raises(type(error), match="math (domain|range) error"):
                run(torch.tensor(number), torch.ones(3))
        else:
            assert run(torch.tensor(number), torch.ones(3))[1] == pytest.approx(expected, rel=1e-15)
    assert tsfuser.stats()["left_to_python"] == {}


def test_a_remainder_of_floats_is_rounded_as_python_rounds_it():
    """TorchScript's `-1e-20 % 1.0` is 0, and Python's is 1."""

    def function(x):
        return x * 2, -1e-20 * x.shape[0] % 1.0, x.shape[0] * 0.1 % 0.3, -0.5 * x.shape[0] % 1.0

    run = compiled(function, dynamic=True)
    for n in (2, 5, 10):
        x = torch.randn(n)
        assert run(x)[1:] == function(x)[1:]
    assert tsfuser.stats()["left_to_python"] == {}


def test_checks_of_sizes_and_elements(device):
    def function(x, count):
        n = count.sum().item()
        torch._check(n >= 1, lambda: "too short")
        torch._assert_async((x == x).all(), "not a number")
        return x.narrow(0, 0, 3) * n + 1

    run, x, one = compiled(function), torch.randn(6, device=device), torch.ones(2, dtype=torch.int64)
    for _ in range(2):
        assert_matches(run(x, one), function(x, one), ops=4)
    with pytest.raises(RuntimeError):
        run(x, one * -1)
    if device == "cpu":  # on CUDA the context is lost with it
        with pytest.raises(RuntimeError, match="not a number"):
            run(x * torch.nan, one)
    assert tsfuser.stats()["left_to_python"] == {}


def test_an_updated_input_that_is_returned_is_the_input(device):
    def function(x, y):
        x.add_(y.sin()).mul_(2)
        return x, y + 1

    ours, plain = torch.ones(5, device=device), torch.ones(5, device=device)
    y, run = torch.randn(5, device=device), compiled(function)
    for _ in range(2):
        given, wanted = run(ours, y), function(plain, y)
        assert given[0] is ours
        assert_matches(ours, plain, ops=8)
        assert_matches(given[1], wanted[1])
    assert tsfuser.stats()["left_to_python"] == {}


BITS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF),
    torch.int32: (torch.float32, None),
    torch.uint8: (torch.int8, 0x7F),
    torch.float16: (torch.int16, 0x7FFF),
}


@pytest.mark.parametrize("dtype", BITS)
def test_bits_of_a_tensor_as_another_dtype(dtype, device):
    """Those of 16-bit floats are left to torch: a NaN has other bits once it was a float32."""
    other, mask = BITS[dtype]

    def function(x):
        bits = (x * 2).view(other)
        bits = bits.abs() if mask is None else bits & mask
        return bits.view(dtype) + 1, (x + 1).view(other)

    x = torch.randn(9, 6, device=device).mul(9).to(dtype)[:, ::2]
    run = compiled(function)
    for _ in range(2):
        for ours, plain in zip(run(x), function(x)):
            assert torch.equal(ours.view(torch.uint8), plain.view(torch.uint8))
    found = tsfuser.stats()
    assert found["left_to_python"] == {} and (found["launches"] > 0 or dtype == torch.float16)


def test_a_view_as_another_dtype_shares_memory_with_its_operand(device):
    x = torch.zeros(4, device=device)
    view = compiled(lambda x: (x.view(torch.int32), x * 2 + 1))(x)[0]
    x.fill_(1)
    assert view.tolist() == [0x3F800000] * 4
    torch._dynamo.reset()
    assert compiled(lambda x: x[:, :2].view(torch.int16) + 1)(torch.zeros(2, 4)).shape == (2, 4)


def test_tensors_filled_with_a_bool(device):
    def function(x):
        mask = torch.full((4,), True, device=device)
        return torch.where(mask, x, -x), torch.full_like(x, True), mask.new_full((2,), False), mask

    x = torch.randn(4, device=device)
    for ours, plain in zip(compiled(function)(x), function(x)):
        assert torch.equal(ours, plain) and ours.dtype == plain.dtype
    assert tsfuser.stats()["left_to_python"] == {}


#: Of a float tensor, an int tensor and a mask.
BOOLS = {
    "compared": lambda x, i, mask: (mask == True, mask != False, x > True, i <= True),  # noqa: E712
    "arithmetic of bools": lambda x, i, mask: (mask + True, True * mask, (mask | False) & True, mask ^ True),
    "arithmetic of numbers": lambda x, i, mask: (x + True, i * True, i / True, True / (x * x + 1), i + True),
    "chosen": lambda x, i, mask: (torch.where(mask, x, True), torch.where(mask, i > 1, True)),
    "filled": lambda x, i, mask: (
        x.masked_fill(mask, True),
        mask.masked_fill(i > 1, False),
        mask.fill_(True),
    ),
    "bounds": lambda x, i, mask: (x.clamp(False, True), i.clamp_min(True)),
    "factors": lambda x, i, mask: (
        torch.addcmul(x, x, x, value=True),
        torch.add(mask, i > 1, alpha=True),
        mask.index_add(0, i.clamp(0, 3), i > 0, alpha=True),
    ),
    "lists": lambda x, i, mask: (torch._foreach_add([x, x], True), torch._foreach_maximum([x, i], True)),
}


@pytest.mark.parametrize("name", BOOLS)
def test_bools_beside_tensors(name, device):
    function, flat = BOOLS[name], torch.utils._pytree.tree_leaves
    x, i, mask = (torch.randn(30, device=device).mul(2).to(d) for d in (torch.float, torch.int, torch.bool))
    mask[::3] = False
    found, expected = (flat(f(x, i, mask.clone())) for f in (compiled(function), function))
    for ours, plain in zip(found, expected):
        assert_matches(ours, plain, ops=2)
    assert tsfuser.stats()["left_to_python"] == {}


@pytest.mark.parametrize(
    "function",
    [lambda x: x - True, lambda x: True - x, lambda x: torch.add(x, x, alpha=True), lambda x: (x > 0) - True],
    ids=["sub", "rsub", "alpha", "sub of bools"],
)
def test_bools_that_eager_rejects(function):
    """But not while it traces the program."""
    x = torch.randn(30)
    with pytest.raises(RuntimeError) as eager:
        function(x)
    with pytest.raises(RuntimeError) as ours:
        compiled(function)(x)
    assert str(eager.value).partition("\n")[0] in str(ours.value)


@torch.library.custom_op("tsfuser_left::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


def changes(x):
    y = x * 2 + 1
    torch.ops.tsfuser_left.add_one_(y)
    return y * 3 + 1


def chooses(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2 + 1, lambda x: x - 1, (x,)) + 1


@pytest.mark.parametrize("function", [changes, chooses], ids=lambda f: f.__name__)
def test_what_is_left_to_python_has_its_reason_in_the_list(function):
    x, run = torch.randn(8), compiled(function)
    assert_matches(run(x), function(x), ops=4)
    reasons = tsfuser.stats()["left_to_python"]
    assert reasons and set(reasons) <= set(left_to_python._SENTENCES.values())
    assert next(iter(reasons)) in str(tsfuser.explain(run, x))
