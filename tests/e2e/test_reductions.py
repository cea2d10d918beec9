"""Reductions fused by TorchScript, against eager and against eager in double.

Each function holds several reductions, so that few kernels say much; `check` runs it fused, without a
fallback.
"""

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.reductions import DTYPES, Fused, check, tensor
from kit.support import assert_matches, fuse, fused_as_eager, groups, kinds, no_fallback, script, train

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("single_nodes")]


MANY = """
def f(x, dim: List[int], keepdim: bool):
    return (torch.sum(x, dim, keepdim), torch.mean(x, dim, keepdim), torch.amax(x, dim, keepdim),
            torch.amin(x, dim, keepdim),
            torch.var(x, dim, True, keepdim), torch.std(x, dim, False, keepdim),
            torch.linalg.vector_norm(x, 2, dim, keepdim),
            torch.linalg.vector_norm(x, 1, dim, keepdim),
            torch.linalg.vector_norm(x, float("inf"), dim, keepdim))
"""


LONGER = [*DTYPES[::3], *(pytest.param(d, marks=pytest.mark.long) for d in DTYPES[1:3])]


@pytest.mark.parametrize("dtype", LONGER, ids=str)
def test_every_reduction_over_rows(device, dtype):
    function = Fused(MANY)
    for columns in (33, 1000):
        x = torch.randn(7, columns, dtype=torch.float64).to(device, dtype) + 3
        check(function, x, [1], False)
    assert "aten::var" in function.kinds


@pytest.mark.parametrize(
    "dims, keepdim", [([0], True), ([0, 2], False), ([-1, 1], True), ([1], False)], ids=str
)
def test_every_reduction_over_any_dims(device, dims, keepdim):
    function = Fused(MANY)
    check(function, torch.randn(6, 5, 9, device=device), dims, keepdim)


@pytest.mark.quick
def test_a_dim_of_size_1(device):
    x = torch.randn(6, 1, 33, device=device)
    check(Fused(MANY.replace("torch.var(x, dim, True", "torch.var(x, dim, False")), x, [1], False)
    check(Fused(MANY), x, [1, 2], True)


FULL = """
def f(x):
    return (torch.sum(x), torch.mean(x), torch.max(x), torch.min(x), torch.var(x), torch.std(x, False),
            torch.norm(x))
"""


@pytest.mark.parametrize("dtype", LONGER, ids=str)
def test_full_reductions(target, device, dtype):
    if target == "cpu-fibers" and dtype != torch.bfloat16:
        pytest.skip("as bfloat16")
    function = Fused(FULL)
    for sizes in ((9,), (130, 700)):
        check(function, torch.randn(sizes, dtype=torch.float64).to(device, dtype))


WHOLE = """
def f(x):
    return (torch.sum(x), torch.sum(x, [1]), torch.amax(x, [0]), torch.amin(x, [1], True), torch.max(x),
            torch.min(x), torch.prod(x),
            torch.prod(x, 0), torch.any(x), torch.all(x), torch.any(x, 1), torch.all(x, 0, True),
            torch.mean(x, [0], dtype=torch.float32),
            torch.logsumexp(x, [1]), torch.aminmax(x, dim=1)[0], torch.any(x, [0, 1]),
            torch.sum(x, dtype=torch.float64), torch.sum(x, [0], dtype=torch.int32),
            torch.prod(x, 1, dtype=torch.float32), torch.softmax(x, 1, dtype=torch.float32),
            torch.log_softmax(x, 0, dtype=torch.bfloat16))
"""


OPTIMIZED = [torch.uint8, torch.int32]  # the others at -O0
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=[pytest.mark.quick] * (t not in OPTIMIZED)) for t in INTEGERS], ids=str
)
def test_integers(target, device, dtype):
    if target == "cpu-fibers" and dtype not in (torch.bool, torch.int64):
        pytest.skip("as the others")
    x = (torch.arange(35).view(5, 7) * 37 % 11 - (3 if dtype.is_signed else 0)).to(device, dtype)
    check(Fused(WHOLE), x)


OTHERS = """
def f(x):
    return (torch.any(x), torch.all(x, 1, True), torch.prod(x, 1, True),
            torch.sum(x, [0], dtype=torch.float64), torch.var(x, [0], correction=0),
            torch.var(x, correction=2), torch.var_mean(x, [1], True, True)[0],
            torch.std_mean(x, [0], False)[1], torch.norm(x, 1),
            torch.linalg.vector_norm(x, 0, [1]), torch.linalg.vector_norm(x, float("-inf"), [0], True),
            torch.var(x, [0], correction=0.5),
            torch.norm(x, 3, [0], True), torch.linalg.vector_norm(x, -1.5, [1]), torch.logsumexp(x, [0]),
            torch.logsumexp(x, [0, 1], True),
            torch.aminmax(x)[0], torch.aminmax(x, dim=1, keepdim=True)[1], torch.nansum(x),
            torch.nansum(x, [1], True))
"""


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_forms(dtype):
    check(Fused(OTHERS), torch.randn(5, 7, dtype=torch.float64).to(dtype))


DTYPED = """
def f(x):
    return (torch.sum(x, dtype=torch.float64), torch.sum(x, [0], True, dtype=torch.float16),
            torch.mean(x, [1], dtype=torch.float64), torch.mean(x, dtype=torch.bfloat16),
            torch.prod(x, dtype=torch.float32), torch.sum(x, [1], dtype=torch.int64),
            torch.softmax(x, 0, dtype=torch.float64), torch.log_softmax(x, 1, dtype=torch.float16),
            torch.softmax(x, 1, dtype=torch.float32))
"""


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_arguments(dtype):
    """Everything is as precise as the least precise of the dtypes."""
    function = Fused(DTYPED)
    x = torch.randn(5, 7, dtype=torch.float64).to(dtype)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            actual = function.scripted(x)
    for a, e in zip(actual, function.plain(x)):
        assert_matches(a, e, ops=16, precision=torch.bfloat16 if a.is_floating_point() else None)


EXTREME = """
def f(x):
    return (torch.amax(x, [1]), torch.amin(x, [0]), torch.max(x), torch.min(x), torch.sum(x, [1]),
            torch.softmax(x, 1), torch.var(x, [1]),
            torch.log_softmax(x, 1), torch.any(x, 0), torch.linalg.vector_norm(x, float("inf"), [1]),
            torch.logsumexp(x, [1]), torch.logsumexp(x, [0]),
            torch.nansum(x, [1]), torch.aminmax(x, dim=0)[0], torch.aminmax(x)[1])
"""


@pytest.mark.parametrize("dtype", LONGER, ids=str)
def test_nan_and_infinity(dtype):
    x = torch.randn(5, 7, dtype=torch.float64)
    x[2, 3], x[1, 1], x[4, 4] = float("nan"), float("inf"), -float("inf")
    check(Fused(EXTREME), x.to(dtype))
    check(Fused(EXTREME), torch.full((3, 5), -float("inf")).to(dtype))


EMPTY = """
def f(x):
    return (torch.sum(x), torch.sum(x, [0]), torch.sum(x, [-1], True), torch.mean(x), torch.mean(x, [-1]),
            torch.prod(x), torch.any(x), torch.all(x, -1),
            torch.var(x, [0]), torch.softmax(x, -1), torch.logsumexp(x, [-1]), torch.nansum(x, [0]))
"""


@pytest.mark.quick
@pytest.mark.parametrize("sizes", [(0, 5), (3, 0, 4)], ids=str)
def test_empty_tensors(device, sizes):
    check(Fused(EMPTY), torch.randn(sizes, device=device))


def test_the_largest_of_nothing_is_left_to_eager():
    scripted = script("def f(x, dim: List[int]):\n    return torch.amax(x * 2, dim) + 1\n")
    with tsfuser.fuser():
        for _ in range(3):
            assert scripted(torch.ones(3, 4), [1]).tolist() == [3.0] * 3
        assert scripted(torch.ones(0, 4), [1]).shape == (0,)
        with pytest.raises(RuntimeError, match="[Ee]xpected reduction dim"):
            scripted(torch.ones(3, 0), [1])


def test_long_sums_are_as_exact_as_those_of_eager():
    x = torch.rand(1 << 24)
    scripted = script("def f(x):\n    return torch.sum(x), torch.mean(x)\n")
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            total, mean = scripted(x)
    exact = float(x.double().sum())
    assert abs(float(total) - exact) <= 2 * abs(float(x.sum()) - exact) + 2.0**-23 * exact
    assert abs(float(mean) * len(x) - exact) <= 2.0**-22 * exact


def test_few_long_rows_are_split_over_blocks(device):
    check(
        Fused("def f(x):\n    return torch.softmax(x, -1), torch.var(x), torch.mean(x)\n"),
        torch.randn(2, 70001, device=device),
    )


PRODUCT = """
def f(x, y):
    a = (x * y).abs().sqrt()
    b = x * y + 0.5
    b = b + b.amax(0)
    return torch.softmax(b, 0).sum(), a.amax(1), b.exp().sum(0)
"""


@pytest.mark.parametrize("sizes", [(16, 1000), (1000, 16)])
def test_rows_and_columns_of_a_product_that_is_nowhere_in_memory(device, sizes):
    check(
        Fused(PRODUCT),
        torch.randn(sizes[0], 1, device=device),
        torch.randn(1, sizes[1], device=device),
        ops=40,
    )


@pytest.mark.quick
@pytest.mark.each_value
@pytest.mark.parametrize("text", ["x.sum(-1)", "x.sum([1, 2])", "x.mean(1)"])
@pytest.mark.parametrize("sizes", [(3, 1, 1), (3, 2, 2)], ids=str)
def test_a_sum_of_negative_zeros_is_positive(device, text, sizes):
    """It begins at 0, over a dim of size 1, too."""
    scripted = script(f"def f(x):\n    return torch.signbit({text} * 1.0)\n")
    x = torch.full(sizes, -0.0, device=device)
    with tsfuser.fuser(), no_fallback():
        fuse(scripted, x)
        assert not scripted(x).any()


CAST = """
def f(x):
    return torch.relu(x), torch.sum(x, [0], True).view([-1]).to(torch.float32)
"""


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(7, 33), (6000, 64)], ids=str)
def test_a_cast_behind_a_sum_is_no_kernel_of_its_own(device, shape):
    x = torch.randn(shape, device=device).bfloat16()
    function = fuse(script(CAST), x)
    before = tsfuser.stats()["launches"]
    y, sums = function(x)
    assert tsfuser.stats()["launches"] - before <= 2  # the second one combines parts
    assert sums.dtype == torch.float32 and torch.equal(y, x.relu())
    assert_matches(sums, x.sum(0).float(), x.double().sum(0), ops=shape[0])


@pytest.mark.quick
@pytest.mark.parametrize("between", ["int32", "bool"])
def test_a_cast_that_changes_a_sum_is_done(device, between):
    text = f"def f(x):\n    return torch.sum(torch.relu(x), [0]).to(torch.{between}).to(torch.float32)\n"
    x = torch.randint(-8000, 8000, (7, 33), device=device) / 1024  # the sums are exact
    function = script(text)
    with tsfuser.fuser():
        fuse(function, x)
        sums = function(x)
    assert torch.equal(sums, x.relu().sum(0).to(getattr(torch, between)).float())


POOL = """
def f(x):
    y = torch.sigmoid(x)
    return y * torch.nn.functional.adaptive_avg_pool2d(y, [1, 1])
"""
POOLED = """
def f(x):
    y = torch.sigmoid(x)
    return y, torch.nn.functional.adaptive_avg_pool2d(y, [1, 1])
"""


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_mean_of_each_image(device, memory_format):
    """As squeeze-and-excitation takes it: pooled to one element; in eager's layout."""
    function = script(POOLED)
    for sizes in ((2, 3, 5, 6), (3, 4, 7, 1), (0, 3, 5, 6), (2, 3, 0, 6)):
        x = torch.randn(sizes, device=device).to(torch.bfloat16).contiguous(memory_format=memory_format)
        with torch.no_grad():
            result = fuse(function, x)(x)
        y = torch.sigmoid(x.double())
        pooled = torch.nn.functional.adaptive_avg_pool2d(torch.sigmoid(x), [1, 1])
        assert_matches(result[1], pooled, torch.nn.functional.adaptive_avg_pool2d(y, [1, 1]), ops=3)
        assert_matches(result[0], torch.sigmoid(x), y, ops=2)
    made = [kinds(g)[-1] for g in groups(function)]
    # of joint graphs fallbacks that ran are shown, too
    assert (made[:1] if by_joint_graphs() else made) == ["aten::adaptive_avg_pool2d"]


def test_the_gradient_of_the_mean_of_each_image(device):
    def pool(x):
        y = torch.sigmoid(x)
        return y * torch.nn.functional.adaptive_avg_pool2d(y, [1, 1])

    function = script(POOL)
    for sizes in ((2, 3, 5, 6), (3, 4, 7, 1)):
        x = torch.randn(sizes, device=device).contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        with tsfuser.fuser():
            result = train(function, [x])
        torch.testing.assert_close(result, train(pool, [x]))
    assert any("aten::adaptive_avg_pool2d" in kinds(g) for g in groups(function))


def softmax_of_columns(x, c):
    own = torch.rsqrt(c * c + 1)  # one value a column
    return torch.softmax((own - x) * own, -2)


def test_values_of_short_columns(device):
    """A thread has one element of one column, so there is no loop that its columns' values stand in."""
    x, c = torch.randn(33, 2, 2, 3, device=device), torch.randn(3, device=device)
    with no_fallback():
        fused = fuse(softmax_of_columns, x, c)
        assert len(groups(fused)) == 1
        assert_matches(fused(x, c), softmax_of_columns(x, c), ops=8)


@pytest.mark.parametrize(
    "norm", ["torch.linalg.vector_norm(x.neg(), 2, [2], True)", "torch.norm(x.neg(), 3.0, [2], True)"]
)
def test_a_norm_along_a_dim_of_one_element_is_row_major(norm, device):
    fused_as_eager(norm, torch.randn(1, 5, 3, device=device).permute(2, 1, 0))


COLUMN_SUMS = """
def f(x, y):
    p = x * y
    return p, p.sum(0), (p * x).sum(0), (x - y).sum(0), x.amax(0), torch.relu(y).mean(0)
"""


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("columns", [255, 256, 768, 1536, 3072, 8192 + 5])
def test_columns_that_are_added_up_by_pages(device, rows, columns):
    """Blocks of up to 1,024 columns, of fewer where there are more sums, and some that are not whole."""
    x, y = tensor(rows, columns, device=device), tensor(rows, columns, device=device, seed=1)
    check(Fused(COLUMN_SUMS), x, y)
    check(Fused("def f(x, y):\n    p = x * y\n    return p, p.sum(0)\n"), x, y)
