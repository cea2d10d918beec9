"""Numbers and sizes in compiled programs: what they are computed from, and that results keep their dtype."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


def test_sizes_are_arithmetic_of_the_graph():
    def function(x, y):
        return (
            (x * y.shape[0] + x.shape[1]).softmax(-1).reshape(-1) * x.numel(),
            x.shape[0] * 2 + 1,
            x.shape[0] // 2,
        )

    whole = compiled(function, dynamic=True, fullgraph=True)
    for n in (3, 5, 8):
        ours, plain = (f(torch.ones(n, n + 1), torch.ones(n)) for f in (whole, function))
        assert_matches(ours[0], plain[0], ops=16)
        assert ours[1:] == plain[1:]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_floats_that_sizes_decide():
    def function(x):
        y = x * 2 / x.shape[1] ** 0.5 + math.sqrt(x.shape[0]) - x.shape[0] / x.shape[1]
        return y * (x.shape[1] * 0.5 - 1)

    whole = compiled(function, dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(n, 2 * n)
        assert_matches(whole(x), function(x), function(x.double()), ops=16)
    found = tsfuser.stats()
    assert found["left_to_python"] == {} and found["plans_built"] == 1


def test_negative_zero_stays_apart_from_zero():
    def function(x):
        return torch.where(x > 0, 0.0, -0.0) * x.abs(), torch.where(x > 0, -0.0, 0.0) * x.abs()

    x = torch.randn(16)
    for ours, plain in zip(compiled(function)(x), function(x)):
        assert torch.equal(torch.signbit(ours), torch.signbit(plain))


def test_tensors_that_the_program_holds_as_constants(device):
    def function(x, mask):
        masked = torch.where(mask, x, torch.tensor(float("-inf")))
        return torch.softmax(masked, -1) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)

    x, mask = torch.randn(6, 4, device=device), torch.ones(6, 4, dtype=torch.bool, device=device).tril()
    assert_matches(compiled(function)(x, mask), function(x, mask), ops=16)
    assert tsfuser.stats()["plans_built"] == tsfuser.stats()["launches"] == 1


NUMBERS = {torch.int64: 1.7, torch.bool: 1, torch.float64: 2, torch.int32: 3, torch.float32: 0.1}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_tensor_that_is_filled_with_a_number_keeps_its_dtype(dtype):
    """1.7 is 1 in a tensor of ints. The number alone would lead to floats."""

    def function(mask, x):
        return torch.where(mask, x, torch.full((), NUMBERS[dtype], dtype=dtype)) + x

    mask, x = torch.arange(8) % 3 > 0, torch.arange(8).to(dtype)
    ours, plain = compiled(function)(mask, x), function(mask, x)
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_numbers_that_tensors_hold():
    function = compiled(lambda x: torch.relu(x) * x.sum().item() + 1)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for x in (torch.rand(4), torch.arange(4)):
            assert_matches(function(x), torch.relu(x) * x.sum().item() + 1, ops=8)


@pytest.mark.parametrize("op", [torch.sub, torch.add, torch.mul])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_a_number_before_the_tensor_joins_its_group(op, dtype):
    """ATen's `sub(2, x)`, which tracing by torch leaves as it is, has its number behind in the op table."""

    def function(x):
        return op(2, x) * op(0.5, x)

    x = torch.randn(4, 8).mul(8).to(dtype)
    program = compile_graph(make_fx(function, tracing_mode="fake")(x), Settings())
    tsfuser.reset()
    result = program([x])
    assert_matches(result[0] if isinstance(result, tuple) else result, function(x), ops=8)
    assert tsfuser.stats()["launches"] == 1


def test_a_choice_of_two_bools_is_a_bool():
    def function(x, y):
        n = y.size(0)
        return x * 2 + 1, torch.sym_ite(x.size(0) > 3, n > 2, n > 5), torch.sym_ite(x.size(0) > 3, n, n + 5)

    run = torch.compile(function, backend="tsfuser", dynamic=True)
    for rows, n in (2, 3), (5, 3), (2, 7), (6, 2):
        x, y = torch.randn(rows, 3), torch.randn(n, 2)
        found, expected = run(x, y)[1:], function(x, y)[1:]
        assert found == expected and type(found[0]) is bool and type(found[1]) is int
