"""Variances, means and norms of huge, infinite and NaN values, wherever threads and blocks meet.

Squares that overflow make a variance infinite, not NaN; on the CPU, where eager adds up variances in double,
only where the result itself overflows. A mean of values with an infinite one among them is NaN, as eager's
updates of a mean leave it, in every dtype and whichever thread reads that value.
"""

import pytest
import torch

import tsfuser
from kit.accuracy import PLACES, values
from kit.reductions import Fused, tuples
from kit.support import no_fallback
from tsfuser.ops import reduction

pytestmark = pytest.mark.usefixtures("single_nodes", "as_on_a_gpu")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HUGE = {torch.float32: 1e30, torch.float64: 1e300, torch.bfloat16: 1e30}
SPREADS = """
def f(x, dim: List[int]):
    var, mean = torch.var_mean(x, dim, True)
    std, again = torch.std_mean(x, dim, False)
    return torch.var(x, dim), torch.std(x, dim), var, std, mean, again
"""


def run(function, x, *rest, calls=2):
    """The results of a fused call and of eager; the plan is made for ordinary values."""
    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            function.scripted(torch.ones_like(x), *rest)
        actual = tuples(function.scripted(x, *rest))
    assert function.kinds, "nothing was fused"
    return actual, tuples(function.plain(x, *rest))


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HUGE, ids=str)
def test_squares_that_overflow(target, device, dtype, place):
    shape, dim = PLACES[place]
    x = (values("normal", shape, "cpu", torch.float64) * HUGE[dtype]).to(device, dtype)
    actual, eager = run(Fused(SPREADS), x, dim)
    for k, (a, e) in enumerate(zip(actual, eager)):
        if k < 4 and target == "cpu-fibers":
            assert torch.isinf(a).all() and (a > 0).all(), k
        elif k < 4:
            assert torch.equal(torch.isinf(a), torch.isinf(e)) and not torch.isnan(a).any(), k
            finite = torch.isfinite(e)
            rtol = 1e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(a[finite], e[finite], rtol=rtol, atol=0)
        else:
            exact = x.double().mean(dim)
            assert ((a.double() - exact).abs() <= 0.01 * HUGE[dtype]).all(), k


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_value_leaves_neither_mean_nor_variance(device, dtype, place):
    """The first and the last row have one, in their middle."""
    shape, dim = PLACES[place]
    x = values("normal", shape, device, dtype)
    bad = torch.zeros([size for d, size in enumerate(shape) if d not in dim], dtype=torch.bool, device=device)
    for end in (0, -1):
        x[tuple((size - 1) // 2 if d in dim else end for d, size in enumerate(shape))] = float("inf")
        bad[(end,) * bad.dim()] = True
    for k, a in enumerate(run(Fused(SPREADS), x, dim)[0]):
        assert torch.equal(torch.isnan(a), bad) and torch.isfinite(a[~bad]).all(), k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_of_the_largest_number_is_finite(device, dtype):
    """Its sum is not."""
    largest = torch.finfo(dtype).max
    x = torch.full((5, 300), largest, dtype=dtype, device=device)
    for dim in ([0], [1]):
        mean = run(Fused(SPREADS), x, dim)[0][4]
        assert torch.isfinite(mean).all() and ((mean.double() / largest - 1).abs() < 1e-5).all()


NORMS = {
    "layer_norm": "torch.native_layer_norm(x, [64], w, w, 1e-5)",
    "group_norm": "torch.native_group_norm(x, w, w, x.size(0), 64, x.size(2), 1, 1e-5)",
    "batch_norm": "torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)",
    "instance_norm": "(torch.instance_norm(x, w, w, None, None, True, 0.1, 1e-5, True), x.mean(), x.sum())",
}


def norm_of(name):
    return Fused(f"def f(x, w):\n    a, b, c = {NORMS[name]}\n    return a, b, c\n")


@pytest.mark.each_value
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_with_an_infinite_value(device, dtype, norm):
    """Its row, group or channel becomes NaN, nothing else."""
    x = values("normal", (4, 64, 64), device, dtype)
    x[1, 5, 17] = float("inf")
    actual, eager = run(norm_of(norm), x, torch.ones(64, device=device, dtype=dtype))
    assert torch.equal(torch.isnan(actual[0]), torch.isnan(eager[0]))
    if norm == "group_norm":
        assert torch.equal(torch.isnan(actual[1]), torch.isnan(eager[1]))


@pytest.mark.each_value
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", HUGE, ids=str)
def test_norms_of_values_whose_squares_overflow(device, dtype, norm):
    """An infinite variance leaves the bias, as in eager on CUDA; on the CPU some sizes give NaN there."""
    x = (values("normal", (4, 64, 64), "cpu", torch.float64) * HUGE[dtype]).to(device, dtype)
    actual, _ = run(norm_of(norm), x, torch.ones(64, device=device, dtype=dtype))
    assert (actual[0] == 1).all()


@pytest.mark.parametrize("order", ["1", "2", "3", "inf", "-1"])
def test_the_norm_of_one_huge_value_is_its_size(device, order):
    p = f'float("{order}")'
    norms = f"torch.linalg.vector_norm(x, {p}, [1]), torch.norm(x, {p}, [1], True)"
    function = Fused(f"def f(x):\n    return {norms}\n")
    x = torch.tensor([[1e30], [-1e30], [-2.0], [0.0], [float("-inf")]], device=device)
    for a, e in zip(*run(function, x)):
        assert torch.equal(a, e)


def test_moments_of_the_same_data_in_two_dtypes(target, device, monkeypatch):
    """A layer norm adds up in float, a variance on the CPU in double."""
    monkeypatch.setattr(reduction, "VARIANCES_IN_DOUBLE", ("cpu",))
    tsfuser.reset()
    norm = "torch.native_layer_norm(x, [64], w, w, 1e-5)"
    function = Fused(f"def f(x, w):\n    y, m, r = {norm}\n    return y, m, torch.std(x, [1], True)\n")
    x = values("normal", (9, 64), device, torch.float32)
    for scale in (1.0, 1e30):
        actual, eager = run(function, x * scale, torch.ones(64, device=device))
        torch.testing.assert_close(actual[2], eager[2])
    assert (actual[0] == 1).all()
