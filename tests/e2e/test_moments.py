"""Means and variances that one pass finds, wherever its threads and blocks meet: accuracy, NaN and
infinities, few elements."""

import pytest
import torch

import tsfuser
from kit.accuracy import PLACES, assert_no_worse, compare, values
from kit.reductions import Fused, check
from kit.support import assert_matches, no_fallback

pytestmark = pytest.mark.usefixtures("single_nodes", "as_on_a_gpu")

MOMENTS = """
def f(x, dim: List[int]):
    var, mean = torch.var_mean(x, dim, True, True)
    return var, mean, (x - mean) * torch.rsqrt(var + 1e-5), torch.std(x, dim, False)
"""


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_accuracy(target, device, dtype, place):
    if target == "cpu-fibers" and dtype == torch.float16 and place != "columns in vectors":
        pytest.skip("on the other targets")
    shape, dim = PLACES[place]
    x = values("normal" if dtype == torch.float16 else "offset", shape, device, dtype)
    assert_no_worse(Fused(MOMENTS), x, dim, roundings=16)


@pytest.mark.parametrize("place", PLACES)
def test_accuracy_of_double(target, device, place, few):
    """What is exact comes from values that are 1e4 less, which are numbers as well."""
    if few and place not in ("splits of the inner dim", "columns in vectors"):
        pytest.skip("on the other targets, or with --long")
    shape, dim = PLACES[place]
    x = values("offset", shape, device, torch.float64)
    function = Fused(MOMENTS)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            actual = function.scripted(x, dim)
    assert function.kinds
    exact = [*function.plain(x - 1e4, dim)]
    exact[1] = exact[1] + 1e4
    for k, found in enumerate(zip(actual, function.plain(x, dim), exact)):
        compare(*found, 16, f"result {k}")


def test_channels_last(device):
    x = values("offset", (9, 6, 22, 33), device, torch.float32).contiguous(memory_format=torch.channels_last)
    assert_no_worse(Fused(MOMENTS), x, [0, 2, 3], roundings=16)


SPREAD = "def f(x, dim: List[int]):\n    return torch.var(x, dim), torch.std(x, dim, False)\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_reach_their_own_columns_only(target, device, dtype):
    x = torch.randn(4200, 7)
    for column, number in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[17 * column, column] = x[4199 - column, 4 + column] = number
    x = x.to(device, dtype)
    var, std = check(Fused(SPREAD), x, [0])
    assert torch.isnan(var).tolist() == torch.isnan(std).tolist() == [True] * 3 + [False] + [True] * 3


def test_equal_values_have_no_variance(device):
    for shape, dim in PLACES.values():
        if shape[0] < 5000:
            for number in (0.1, 1e4 / 3):
                var, mean, _, std = check(Fused(MOMENTS), torch.full(shape, number, device=device), dim)
                assert var.abs().max() == 0 and std.abs().max() == 0 and (mean == torch.tensor(number)).all()


@pytest.mark.parametrize(
    "shape, dim",
    [((4, 1, 1), [1, 2]), ((1, 5), [0]), ((0, 3), [0]), ((3, 0, 2), [0]), ((2, 3, 0), [0, 2])],
    ids=str,
)
def test_one_element_or_none(device, shape, dim):
    if device == "cuda" and 0 in shape:
        pytest.skip("torch 2.11's own var of empty float64 tensors fails on CUDA")
    function = Fused(MOMENTS)
    check(function, torch.randn(shape, device=device), dim, strides=False)
    if 0 not in shape:
        check(function, torch.full(shape, float("inf"), device=device), dim, strides=False)


def test_what_is_not_asked_for(device):
    """Only the mean, only the variance, and both twice."""
    x = values("offset", (66, 3, 5), device, torch.float32)
    alone = Fused("def f(x):\n    m = torch.var_mean(x, [0, 2])[1]\n    return m * 2.0, torch.relu(x)\n")
    twice = Fused(
        "def f(x):\n    v, m = torch.var_mean(x, [0, 2])\n    w, n = torch.var_mean(x, [2, 0], False)\n"
        "    return v, m, w, n\n"
    )
    for function in (alone, twice):
        assert_no_worse(function, x, roundings=4)
    results = check(twice, torch.randn(66, 3, 5, device=device))
    assert results[1].data_ptr() != results[3].data_ptr()
    assert_matches(results[1], results[3], None, ops=1)
