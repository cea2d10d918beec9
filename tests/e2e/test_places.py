"""argmax, argmin, and max and min along a dim: the first of equal elements, NaN before all others; topk."""

import pytest
import torch
from torch.testing import assert_close

import tsfuser
from kit.support import through
from tsfuser.frontends.dynamo import watch

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8]


def elements(dtype, sizes, device="cpu", seed=0):
    """Few different ones, so that the extremes are there several times; in rows of floats also NaN,
    infinities and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0 if dtype == torch.uint8 else -4, 5, sizes, generator=generator).to(dtype)
    if dtype.is_floating_point and x.dim() == 2 and min(sizes) > 5:
        x[0, 3] = x[0, 5] = float("nan")
        x[1], x[1, 4] = float("-inf"), float("inf")
        x[2], x[2, 1], x[2, 4] = 0.0, -0.0, -0.0
        x[3] = -0.0
        x[3, 2] = 0.0
        x[4] = -float("nan")
    return x.to(device)


def same(ours, eager):
    """The same elements to the bit, but for the bits of NaN."""
    assert ours.dtype == eager.dtype
    assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    if eager.is_floating_point():
        assert torch.equal(ours.nan_to_num().signbit(), eager.nan_to_num().signbit())


def rows(x):
    y = x * 2
    values, places = y.max(1)
    return values, places + 1, y.min(1, keepdim=True), y.argmax(1), y.argmin(-1, True)


def columns(x):
    y = x * 2
    values, places = y.min(0, True)
    return values, places + 1, y.max(0), y.argmin(0), y.argmax(-2, True)


def whole(x):
    y = x * 2
    return y.argmax(), y.argmin() + 1, y.argmax(None, True)


def compare(function, x, door):
    tsfuser.reset()
    found, wanted = through(function, door)(x), function(x)
    for ours, eager in zip(found, wanted):
        for one, other in zip(*(([r] if torch.is_tensor(r) else r) for r in (ours, eager))):
            same(one, other)
    assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"]


@pytest.mark.parametrize("function", [rows, columns, whole], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("door", ["script", "compile"])
def test_elements_and_places_are_eagers(function, dtype, door, device):
    compare(function, elements(dtype, (9, 37), device), door)


@pytest.mark.parametrize("function", [rows, columns, whole], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 7), (7, 1), (2, 4099), (3, 70001), (5000, 3), (700, 300)], ids=str
)
def test_short_and_long_rows(function, sizes, device):
    compare(function, elements(torch.float32, sizes, device, seed=sizes[1]), "compile")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_layouts(dtype, device):
    x = elements(dtype, (24, 50), device)
    for laid in (x.t(), x[:, ::3], x[1:, 3:], x[:1].expand(9, 50), x.view(4, 6, 50).transpose(0, 1)[1]):
        compare(rows, laid, "compile")
        compare(columns, laid, "compile")


def test_an_element_of_16_bits_is_compared_as_eager_stores_it(device):
    """The products have more digits, by which another of those that are equal when stored is the largest."""
    x = (1 + torch.arange(64, device=device) / 128).bfloat16()
    y = (1 - torch.arange(64, device=device) / 256).bfloat16()

    def function(x, y):
        return (x[None] * y[:, None]).max(1)

    wanted = function(x, y)
    assert ((x[None].float() * y[:, None].float()).argmax(1) != wanted[1]).any()
    for ours, eager in zip(torch.compile(function, backend="tsfuser")(x, y), wanted):
        same(ours, eager)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_elements_of_64_bits_are_left_to_torch(dtype, device):
    x = elements(torch.float32, (9, 37), device).nan_to_num().to(dtype)
    for function in (rows, columns, whole):
        for ours, eager in zip(torch.compile(function, backend="tsfuser")(x), function(x)):
            for one, other in zip(*(([r] if torch.is_tensor(r) else r) for r in (ours, eager))):
                same(one, other)


@pytest.mark.parametrize("function", [rows, columns, whole], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)], ids=str)
def test_no_elements_are_as_in_eager(function, sizes, device):
    x = torch.zeros(sizes, device=device)
    compiled = torch.compile(function, backend="tsfuser")
    try:
        wanted = function(x)
    except (IndexError, RuntimeError):
        with pytest.raises((IndexError, RuntimeError)):
            compiled(x)
        return
    for ours, eager in zip(compiled(x), wanted):
        for one, other in zip(*(([r] if torch.is_tensor(r) else r) for r in (ours, eager))):
            same(one, other)


@pytest.mark.parametrize("dim, keepdim", [(1, False), (0, True), (-1, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_goes_to_the_first_of_equal_elements(dim, keepdim, dtype, device):
    def function(x):
        values, places = (x * 2).max(dim, keepdim)
        return values * (places - 3)

    x = elements(dtype, (9, 37), device)
    gradients = []
    with watch.watching() as (_, outcomes):
        for called in (torch.compile(function, backend="tsfuser"), function):
            leaf = x.clone().requires_grad_()
            called(leaf).sum().backward()
            gradients.append(leaf.grad)
    backward = str(outcomes[-1].programs[""][0].graph)
    assert backward.index("with prim::CudaFusionGroup") < backward.index("tsfuser::extreme_backward")
    same(*gradients)
    assert (gradients[0] == 0).any() and (gradients[0] < 0).any()


def test_a_scatter_to_zeros_is_eagers(device):
    """A gradient of -0.0 stays so; an index out of range is an error, as in eager."""

    def function(x, index, source):
        return torch.zeros_like(x).scatter(1, index, source * 2) * 3

    x, source = (
        torch.zeros(5, 7, device=device),
        torch.tensor([[1.0], [-0.0], [0.0], [-2.0], [3.0]], device=device),
    )
    index = torch.tensor([[0], [6], [3], [3], [5]], device=device)
    run = torch.compile(function, backend="tsfuser")
    same(run(x, index, source), function(x, index, source))
    if device == "cpu":
        with pytest.raises((IndexError, RuntimeError)):
            run(x, index + 3, source)


def test_places_are_right_for_each_size_of_one_kernel(device):
    compiled = torch.compile(rows, backend="tsfuser", dynamic=True)
    for sizes in ((9, 37), (2, 4096), (33, 129), (9, 36)):
        x = elements(torch.bfloat16, sizes, device)
        for ours, eager in zip(compiled(x), rows(x)):
            for one, other in zip(*(([r] if torch.is_tensor(r) else r) for r in (ours, eager))):
                same(one, other)


def permutations(rows, n, dtype, device):
    """Rows of n different numbers, as eager leaves open which of equal ones a topk finds."""
    generator = torch.Generator().manual_seed(n)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(rows)]).to(device, dtype)


def topk_of(k, dim, largest):
    """A function of its own for each, or TorchDynamo makes a symbol of `k`."""
    space = {"torch": torch}
    exec(f"def function(x):\n    return torch.topk(x * 2, {k}, {dim}, {largest})\n", space)
    return space["function"]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("n, k, dim", [(8, 2, 1), (33, 8, -1), (5, 5, 1), (1, 1, 1), (120, 3, 0), (7, 7, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str)
def test_topk(n, k, dim, largest, dtype, device):
    x = permutations(37, n, dtype, device)
    x = x.t().contiguous() if dim == 0 else x
    function = topk_of(k, dim, largest)
    for ours, eager in zip(torch.compile(function, backend="tsfuser", fullgraph=True)(x), function(x)):
        same(ours, eager)
        assert ours.stride() == eager.stride()
    assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"]


def test_topk_of_nan_infinities_and_equal_elements(device):
    """Of equal elements the places differ by device in eager, so the elements there are compared."""
    x = elements(torch.float32, (9, 37), device)
    for largest in (True, False):
        function = topk_of(8, 1, largest)
        (values, places), wanted = torch.compile(function, backend="tsfuser")(x), function(x)
        assert_close(values, wanted[0], rtol=0, atol=0, equal_nan=True)
        assert_close((x * 2).gather(1, places), values, rtol=0, atol=0, equal_nan=True)
        assert all(len(set(row)) == 8 for row in places.tolist())


def test_experts_are_chosen_and_weighted_in_one_group(device):
    def route(scores):
        weights, experts = torch.topk(torch.softmax(scores.float(), -1), 2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts

    scores, compiled = permutations(100, 8, torch.bfloat16, device) / 4, through(route, "compile")
    compiled(scores)
    before = tsfuser.stats()
    found, wanted = compiled(scores), route(scores)
    assert {k: tsfuser.stats()[k] - before[k] for k in ("groups", "exact_hits")} == {
        "groups": 0,
        "exact_hits": 1,
    }
    assert_close(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("k, n", [(0, 5), (9, 20), (6, 5), (2, 5000)])
def test_other_topks_are_left_to_torch(k, n, device):
    function, x = topk_of(k, 1, True), permutations(4, n, torch.float32, device)
    run = torch.compile(function, backend="tsfuser")
    if k > n:
        with pytest.raises(RuntimeError, match="not in range"):
            run(x)
        return
    for ours, eager in zip(run(x), function(x)):
        same(ours, eager)
