"""Errors of reductions and norms against float64: at most twice eager's own, and the rounding of the result.

Sums of many terms, rows with a mean of 1e4, softmax far from 0, derivatives by differences."""

import math

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.accuracy import assert_no_worse, compare, values
from kit.reductions import Fused
from kit.support import fresh, no_fallback, script, train

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("single_nodes")]


LOW = [torch.float32, torch.bfloat16]


def terms(target, request):
    """How many terms a sum has here: 2^24 in the long run, fewer where a fiber does the work of a thread."""
    return 1 << (16 if target == "cpu-fibers" else 24 if request.config.getoption("--long") else 20)


SUMS = """
def f(x, dim: List[int]):
    return torch.sum(x, dim), torch.mean(x, dim), torch.sum(x * x, dim), torch.linalg.vector_norm(x, 2, dim)
"""


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["full", "inner", "outer", "middle"])
@pytest.mark.parametrize("kind", ["positive", "normal"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sums_of_many_terms(target, device, request, dtype, kind, layout):
    n = terms(target, request)
    shape, dim = {
        "full": ((n,), [0]),
        "inner": ((2, n), [1]),
        "outer": ((n, 3), [0]),
        "middle": ((2, n // 2, 2), [1]),
    }[layout]
    roundings = math.log2(n) / 8  # those of sums in pairs, which err by 3e-8 a level, in all directions
    assert_no_worse(Fused(SUMS), values(kind, shape, device, dtype), dim, roundings=roundings)


WIDER = """
def f(x):
    return torch.sum(x, dtype=torch.float32), torch.mean(x, dtype=torch.float32), torch.sum(x), torch.mean(x)
"""


def test_sums_of_bfloat16_in_float(target, device, request):
    assert_no_worse(Fused(WIDER), values("positive", (terms(target, request),), device, torch.bfloat16))


VARIANCES = """
def f(x, dim: List[int]):
    return torch.var(x, dim), torch.std(x, dim), torch.var(x, dim, False, True), torch.var_mean(x, dim)[1]
"""
PLACES = {
    "short rows": ((9, 260), [1]),
    "long rows": ((3, 70000), [1]),
    "columns": ((4097, 5), [0]),
    "channels": ((6, 5, 31, 33), [0, 2, 3]),
    "everything": ((300, 301), [0, 1]),
}


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_variances_of_values_with_a_mean_of_10000(device, dtype, place):
    shape, dim = PLACES[place]
    assert_no_worse(Fused(VARIANCES), values("offset", shape, device, dtype), dim, roundings=4)


NORMS = """
def f(x, w, b):
    n = [x.size(-1)]
    y, mean, rstd = torch.native_layer_norm(x, n, w, b, 1e-5)
    c = x - x.mean(-1, True)
    primitive = c * torch.rsqrt((c * c).mean(-1, True) + 1e-5) * w + b
    root = x * torch.rsqrt((x * x).mean(-1, True) + 1e-6)
    return y, mean, rstd, torch.rms_norm(x, n, w, 1e-5), root, primitive
"""


@pytest.mark.each_value
@pytest.mark.parametrize("columns", [64, 1000, 8192, 70000])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_norms_of_rows_with_a_mean_of_10000(target, device, dtype, columns):
    if target == "cpu-fibers" and columns == 70000:
        pytest.skip("on the other targets")
    x = values("offset", (5, columns), device, dtype)
    w, b = (values("normal", (columns,), device, dtype, seed) for seed in (1, 2))
    assert_no_worse(Fused(NORMS), x, w, b, roundings=4)


def layer_norm_block(x, w, b):
    return F.layer_norm(x * 1.0 + b, [x.size(-1)], w, b) * 2.0


def rms_norm_block(x, w, b):
    y = x * 1.0 + b
    return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * w


def softmax_block(x, w, b):
    return torch.softmax(x * 1.0 + b, -1) * w


def log_softmax_block(x, w, b):
    return torch.log_softmax(x * 1.0 + b, -1) * w


def primitives_block(x, w, b):
    y = x * 1.0 + b
    mean = y.mean(-1, keepdim=True)
    difference = y - mean
    variance = (difference * difference).mean(-1, keepdim=True)
    return w * (difference / torch.sqrt(variance + 1e-12)) + b


def batch_norm_block(x, w, b):
    y = x * 1.0
    # no relu: its step would show a rounding as a whole gradient
    return F.batch_norm(y, None, None, w, b, training=True) * 2.0


BLOCKS = [
    layer_norm_block,
    rms_norm_block,
    softmax_block,
    log_softmax_block,
    primitives_block,
    batch_norm_block,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda f: f.__name__)
def test_gradients_of_rows_with_a_mean_of_10000(device, block):
    x = values("offset", (6, 5, 260), device, torch.float32)
    size = 5 if block is batch_norm_block else 260
    inputs = [x, *(values("normal", (size,), device, torch.float32, seed) for seed in (1, 2))]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(fresh(block), inputs)
    eager, eager_gradients = train(block, inputs, 1)
    exact, exact_gradients = train(block, [t.detach().double().requires_grad_() for t in inputs], 1)
    found = zip([out, *gradients], [eager, *eager_gradients], [exact, *exact_gradients])
    for k, (a, e, r) in enumerate(found):
        compare(a, e, r, 16, f"output or gradient {k}")


@pytest.mark.graphs
@pytest.mark.quick
@pytest.mark.each_value
@pytest.mark.parametrize("block", BLOCKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("columns", [3, 7])
def test_derivatives_by_differences(device, block, columns):
    size = 2 if block is batch_norm_block else columns
    inputs = [
        values("normal", s, device, torch.float64, k)
        for k, s in enumerate(((3, 2, columns), (size,), (size,)))
    ]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    scripted = fresh(block)
    with tsfuser.fuser(), no_fallback():
        train(scripted, inputs)
        assert torch.autograd.gradcheck(scripted, inputs)


SOFTMAX = """
def f(x, dim: int):
    return torch.softmax(x, dim), torch.log_softmax(x, dim)
"""


@pytest.mark.each_value
@pytest.mark.parametrize("offset", [1e4, -1e4, 3e30, -3e30])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_far_from_zero(device, dtype, offset, dim):
    x = values("normal", (37, 260), device, dtype) * (5.0 if abs(offset) < 1e9 else 1e30) + offset
    assert_no_worse(Fused(SOFTMAX), x, dim, roundings=2)


def test_softmax_of_rows_with_infinities(device):
    x = values("normal", (8, 260), device, torch.float32)
    x[0, :] = -torch.inf
    x[1, 5:] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 4] = torch.nan
    function = Fused(SOFTMAX)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            actual = function.scripted(x, 1)
    for mine, eager in zip(actual, function.plain(x, 1)):
        torch.testing.assert_close(mine, eager, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with 20 GB of memory")
def test_a_sum_of_more_than_2_31_terms():
    """int8 sums are exact in int64; of bfloat16 terms, sums of parts are added in double."""
    count = (1 << 31) + 4099
    function = script("def f(x, scale: int):\n    return torch.sum(x * scale), torch.amax(x * scale)\n")
    x = torch.ones(count, dtype=torch.int8, device="cuda")
    x[-3:] = 5
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            total, largest = function(x, 1)
    assert total.item() == count + 12 and largest.item() == 5
    del x
    function = Fused(
        "def f(x):\n    return torch.sum(x, dtype=torch.float32), torch.mean(x, dtype=torch.float32)\n"
    )
    x = torch.rand(count, device="cuda", dtype=torch.bfloat16)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            total, mean = function.scripted(x)
    exact = sum(part.double().sum() for part in x.split(1 << 28))
    eager = function.plain(x)
    for mine, plain, right in ((total, eager[0], exact), (mean, eager[1], exact / count)):
        compare(mine, plain, right, 1, "a sum or mean")
