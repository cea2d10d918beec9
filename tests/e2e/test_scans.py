"""cumsum, cumprod, cummax, cummin and logcumsumexp, with what stands before and behind them in one kernel."""

import pytest
import torch
from torch.testing import assert_close

import tsfuser
from kit.support import through
from tsfuser.frontends.dynamo import watch

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

SIZES = [(5, 7), (3, 1000), (2, 5003), (300, 40), (2, 20000), (2, 3, 65), (1, 5), (5, 1), (70,), (9000, 3)]


def listed(found):
    return [found] if torch.is_tensor(found) else [x for some in found for x in listed(some)]


def compare(function, *arguments, door="compile", launches=None, exact=False, **tolerance):
    """Runs `function` fused, holds the results against those of eager in float64, or against eager's own if
    they are to be `exact`, and counts the launches of a call."""
    tsfuser.reset()
    fused, wanted = through(function, door, dynamic=False), listed(function(*arguments))
    wide = wanted if exact else listed(function(*(x.double() for x in arguments)))
    fused(*arguments)
    before = tsfuser.stats()["launches"]
    found = listed(fused(*arguments))
    launched = (tsfuser.stats()["launches"] - before) // (3 if door == "script" else 1)
    assert launched == launches if launches is not None else launched
    assert not tsfuser.stats()["fallbacks"]
    for ours, eager, best in zip(found, wanted, wide):
        assert (ours.dtype, ours.shape, ours.stride()) == (eager.dtype, eager.shape, eager.stride())
        if exact:
            assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
        else:
            assert_close(ours.double(), best.double(), equal_nan=True, **tolerance)


def noise(sizes, device, dtype=torch.float32, seed=0):
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype)


def sums(x):
    return torch.cumsum(x * 2, -1) + 1


def columns(x):
    return torch.cumsum(x * 2, 0) + 1


def products(x):
    return torch.cumprod(torch.cos(x), -1) + 1


def logarithms(x):
    return torch.logcumsumexp(x * 2, -1) + 1


def logarithms_of_columns(x):
    return torch.logcumsumexp(x * 2, 0) + 1


def products_of_columns(x):
    return torch.cumprod(torch.cos(x), 0) + 1


def extremes(x):
    y = x * 2
    largest, last = torch.cummax(y, -1)
    smallest, least = torch.cummin(y, -1)
    return largest, last, smallest + 1, least + 1


def extremes_of_columns(x):
    y = x * 2
    largest, last = torch.cummax(y, 0)
    smallest, least = torch.cummin(y, 0)
    return largest, last, smallest + 1, least + 1


ROWS = [sums, products, logarithms, extremes]
COLUMNS = [columns, products_of_columns, logarithms_of_columns, extremes_of_columns]


@pytest.mark.each_value
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("function", ROWS + COLUMNS, ids=lambda f: f.__name__)
def test_values_are_eagers(function, sizes, device):
    x = noise(sizes, device)
    compare(function, x, launches=1, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("function", ROWS + COLUMNS, ids=lambda f: f.__name__)
def test_scripted_programs(function, device):
    compare(function, noise((37, 50), device), door="script", launches=1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("function", ROWS[:3] + COLUMNS[:3], ids=lambda f: f.__name__)
def test_other_floats(function, dtype, device):
    """16 bits are accumulated in float, so that what is left is the rounding of the result."""
    x = noise((9, 300), device, dtype)
    wide, (found,) = function(x.double()), listed(through(function, "compile", dynamic=False)(x))
    size = wide.abs().max().item()
    assert_close(
        found.double(), wide, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps * size
    )
    assert tsfuser.stats()["launches"] == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool], ids=str)
def test_integers_are_added_up_in_int64(dtype, device):
    def function(x):
        return torch.cumsum(x, -1) * 2, torch.cumsum(x, 0) + 1, torch.cumprod(x, 1) * 2

    x = torch.randint(0, 2, (9, 300), device=device).to(dtype)
    compare(function, x, exact=True)


@pytest.mark.parametrize("asked", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
def test_the_dtype_that_is_asked_for(asked, device):
    def function(x):
        return torch.cumsum(x, 1, dtype=asked) * 2, torch.cumprod(x, -1, dtype=asked) + 1

    compare(function, noise((9, 50), device, torch.bfloat16), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int16,
                                   torch.int8, torch.uint8], ids=str)  # fmt: skip
@pytest.mark.parametrize("function", [extremes, extremes_of_columns], ids=lambda f: f.__name__)
@pytest.mark.parametrize("door", ["compile", "script"])
def test_of_equal_extremes_the_last_is_found(function, dtype, door, device):
    x = torch.randint(0 if dtype == torch.uint8 else -4, 5, (9, 300)).to(dtype)
    if dtype.is_floating_point:
        x[0, 3] = x[0, 5] = float("nan")
        x[1], x[1, 4] = float("-inf"), float("inf")
        x[2], x[2, 1], x[2, 4] = 0.0, -0.0, -0.0
        x[4] = -float("nan")
    compare(function, x.to(device), door=door, launches=1, exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_extremes_of_64_bits_are_left_to_torch(dtype, device):
    x = torch.randint(-4, 5, (9, 30), device=device).to(dtype)
    found, wanted = listed(through(extremes, "compile", dynamic=False)(x)), listed(extremes(x))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("function", ROWS[:3] + COLUMNS[:3], ids=lambda f: f.__name__)
def test_nan_and_infinities(function, device):
    x = noise((6, 700), device).abs()
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), float("-inf")
    x[3, 3], x[3, 600] = float("inf"), float("-inf")
    compare(function, x, rtol=1e-4, atol=1e-3)


def test_a_running_product_of_zeros_is_zero(device):
    x = noise((4, 600), device).cos()
    x[1, 5], x[2] = 0.0, 0.0
    compare(lambda x: torch.cumprod(x * 1.0, 1) + 0.0, x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dim_of_any_layout(dim, device):
    def function(x):
        return torch.cumsum(x * 2, dim) + 1

    x = noise((8, 24, 50), device)
    for laid in (x, x.transpose(1, 2), x.permute(2, 0, 1), x[:, ::3], x[1:, 3:, ::2], x[:1].expand(5, 24, 50),
                 x[..., :1].expand(8, 24, 7)):  # fmt: skip
        torch._dynamo.reset()
        compare(function, laid, rtol=1e-4, atol=1e-4)


def test_tensors_without_dims_and_without_elements(device):
    def function(x):
        y = x * 2
        return torch.cumsum(y, 0) + 1, torch.cumprod(y, -1), *torch.cummax(y, 0), torch.logcumsumexp(y, 0)

    for x in (
        torch.tensor(2.5),
        torch.zeros(0),
        torch.zeros(3, 0, 5),
        torch.zeros(3, 0),
        torch.zeros(0, 3),
        torch.ones(1),
    ):
        x, compiled = x.to(device), torch.compile(function, backend="tsfuser", dynamic=False)
        for ours, eager in zip(listed(compiled(x)), listed(function(x))):
            assert_close(ours, eager, check_stride=ours.numel() > 0)
    assert not tsfuser.stats()["fallbacks"]


# ---- neighbours


def kept(x):
    """What top-p sampling keeps."""
    p = torch.softmax(x, -1)
    before = p.cumsum(-1) - p
    return torch.where(before < 0.5, p, 0.0)


@pytest.mark.parametrize("sizes", [(37, 50), (5, 3000), (3, 40000)], ids=str)
def test_a_softmax_before_and_a_choice_behind_are_in_the_same_kernel(sizes, device):
    compare(kept, noise(sizes, device), launches=1, rtol=1e-4, atol=1e-5)


def test_statistics_over_a_row_are_in_the_same_kernel(device):
    def function(x):
        return torch.cumsum(x, -1) / x.sum(-1, keepdim=True), x.amax(-1)

    compare(function, noise((40, 600), device).abs(), launches=1, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [8, 40, 600, 5003, 20000])
def test_a_scan_that_results_before_and_behind_a_reduction_read(length, device):
    def function(x):
        y = torch.cumsum(x, 1)
        largest = torch.cummax(torch.tanh(x), 1)[0]
        return y + 1, y / x.sum(1, keepdim=True), largest * 2 - x.amax(1, True), largest

    rows = 40 if length < 5000 else 7  # the threads of fibers take turns
    compare(function, noise((rows, length), device).abs(), launches=1, rtol=1e-4, atol=1e-4)


def test_scans_one_behind_the_other_and_side_by_side(device):
    def function(x):
        y = torch.cumsum(x, 1) * 0.1
        return torch.cumsum(torch.tanh(y), 1) + y, torch.cumprod(torch.sigmoid(x), 1)

    compare(function, noise((40, 600), device), launches=1, rtol=1e-4, atol=1e-3)


def test_scans_along_several_dims_read_one_another_from_memory(device):
    def function(x):
        y = torch.cumsum(torch.cumsum(x, 0) * 2, 1)
        return y + 1, y.sum(0), torch.cumsum(x, 1).sum(1)

    compare(function, noise((40, 60), device), rtol=1e-4, atol=1e-3)


def test_an_op_reads_scans_along_two_dims(device):
    def function(x):
        return torch.cumsum(x, 0) * torch.cumsum(x, 1) + torch.cumprod(torch.cos(x), 1)

    compare(function, noise((40, 60), device), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sizes", [(5, 7), (300, 40), (9000, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("scanned", [torch.cumsum, torch.logcumsumexp])
def test_beside_a_result_that_all_rows_share(scanned, sizes, device):
    def function(x, y):
        product, mean = torch.sin(x * y), torch.exp(x.mean(0))
        below = scanned(scanned(product, 0) * 0.1, 0)
        return product, below, mean, below * mean

    compare(function, noise(sizes, device), noise(sizes, device, seed=1), rtol=1e-4, atol=1e-3)


def test_a_softmax_along_columns_and_its_scan(device):
    compare(lambda x: torch.softmax(x, 0).cumsum(0) * 2, noise((40, 60), device), rtol=1e-4, atol=1e-5)


def test_a_dim_that_others_see_as_two(device):
    def function(x):
        y = torch.cumsum(x * 2, 1)
        return y + 1, y.view(6, 4, 15) * 2, torch.cumsum(x.view(6, 4, 15).transpose(0, 1), 2)

    compare(function, noise((6, 60), device), rtol=1e-4, atol=1e-3)


def test_parts_of_a_scan_and_scans_of_parts(device):
    def function(x):
        y = torch.cumsum(x * 2, 1)
        z = torch.cumsum(torch.cat([x, x[:, :7] * 3], 1), 1)
        return y[:, 3:] - y[:, :-3], z + 1, torch.cumsum(x[:, 4:20] + 1, 1), torch.roll(y, 3, 1)

    compare(function, noise((6, 60), device), rtol=1e-4, atol=1e-3)


def test_places_of_tokens_in_their_experts(device):
    """An exclusive running sum over tokens."""

    def function(experts):
        chosen = torch.nn.functional.one_hot(experts, 8)
        return (torch.cumsum(chosen, 0) - chosen) * chosen

    experts = torch.randint(0, 8, (3000,), device=device)
    found = torch.compile(function, backend="tsfuser")(experts)
    assert torch.equal(found, function(experts))


# ---- gradients, and the other direction


def backwards(x):
    return torch.flip(torch.cumsum(torch.flip(x * 2, [-1]), -1), [-1]) * 3


def backwards_of_columns(x):
    return torch.flip(torch.cumsum(torch.flip(x * 2, [0]), 0), [0]) * 3


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("function", [backwards, backwards_of_columns], ids=lambda f: f.__name__)
def test_a_scan_from_the_end_is_one_kernel(function, sizes, device):
    compare(function, noise(sizes, device), launches=1, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("how", ["cumsum", "logcumsumexp", "cummax", "cummin", "cumprod"])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients(how, dim, device):
    space = {"torch": torch}
    end = "[0]" if how in ("cummax", "cummin") else ""
    exec(f"def function(x):\n    return torch.{how}(torch.sin(x), {dim}){end} * x\n", space)
    function, gradients = space["function"], []
    x = noise((23, 40), device)
    for called, leaf in ((torch.compile(function, backend="tsfuser"), x), (function, x.double())):
        leaf = leaf.clone().requires_grad_()
        (called(leaf) * torch.cos(leaf.detach())).sum().backward()
        gradients.append(leaf.grad.double())
    assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert tsfuser.stats()["launches"]


def test_the_backward_of_a_running_sum_is_one_kernel(device):
    def function(x):
        return torch.cumsum(x * 2, 1) * 3

    leaf = noise((23, 400), device).requires_grad_()
    with watch.watching():
        y = torch.compile(function, backend="tsfuser")(leaf)
        before = tsfuser.stats()["launches"]
        y.backward(torch.ones_like(y))
    assert tsfuser.stats()["launches"] == before + 1
    assert_close(leaf.grad, 6 * torch.arange(400, 0, -1.0, device=device).expand(23, 400))


def test_each_size_of_one_kernel(device):
    for function in (sums, columns, backwards, kept):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="tsfuser", dynamic=True)
        for sizes in ((9, 37), (2, 4096), (33, 129), (9, 36), (3, 9001)):
            x = noise(sizes, device)
            assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("fused_or_error")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_a_sum_in_small_integers_is_left_to_torch(dtype, device):
    def function(x):
        return torch.cumsum((x * 10).to(torch.int32) + 1, -1, dtype=dtype) + 1

    x = torch.randn(3, 5, device=device).abs()
    assert torch.equal(torch.compile(function, backend="tsfuser")(x), function(x))


@pytest.mark.usefixtures("fused_or_error")
def test_elements_of_a_scan_are_looked_up_in_memory(device):
    def function(x, index):
        return (x * 2).cumsum(-1).gather(-1, index) + 1

    x, index = torch.randn(4, 33, device=device), torch.zeros(4, 1, dtype=torch.long, device=device)
    torch.testing.assert_close(torch.compile(function, backend="tsfuser")(x, index), function(x, index))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.view(12, 9).t().contiguous() * 2,
        lambda x: x.view(12, 9).transpose(0, 1).relu().reshape(108),
        lambda x: (x.view(12, 9).t().exp(), x + 0.5),
    ],
)
def test_its_loops_stay_one_beside_a_view_that_is_walked_otherwise(device, other):
    """Both are of one tensor, read twice."""

    def function(x):
        x = x * 1.5
        return other(x), x.cumsum(0) * 2

    compare(function, noise((108,), device), rtol=1e-5, atol=1e-5)
    compare(lambda x: (other(x), x.cumsum(0) * 2), noise((108,), device), rtol=1e-5, atol=1e-5)
