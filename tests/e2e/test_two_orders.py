"""Results that are stored in two memory orders: one of them goes through tiles of shared memory."""

import pytest
import torch

from kit.support import assert_matches, counted, no_fallback
from tsfuser.schedule import rows, transpose, transposed_reduction

pytestmark = pytest.mark.usefixtures("forgotten")


@pytest.fixture
def tiled(target, monkeypatch):
    """The names of the results in tiles, of each proposal of the transpose schedule. Small tensors count as
    large ones. Where blocks have threads, some result has to be in a tile."""
    made, propose = [], transpose.propose

    def spied(*args):
        found = propose(*args)
        if not isinstance(found, str) and found.params.stored:
            made.append(found.params)
        return found

    monkeypatch.setattr(transpose, "propose", spied)
    monkeypatch.setattr(transpose, "LARGE", 1)
    yield made
    assert bool(made) == (target != "cpu")


def last(*sizes, device, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(sizes, device=device).to(dtype)
    return x.to(memory_format=torch.channels_last) if len(sizes) == 4 else x


def check(function, arguments, ops):
    compiled = torch.compile(function, backend="tsfuser")
    with no_fallback():
        found = compiled(*arguments)
    exact = function(*(a.double() if a.is_floating_point() else a for a in arguments))
    for own, eager, value in zip(found, function(*arguments), exact):
        assert_matches(own, eager, value, ops=ops)
    return compiled


def both(x):
    y = torch.relu(x * 2.0)
    return y, y.contiguous()


def row_major_first(x):
    y = torch.relu(x * 2.0)
    return y.contiguous(), y


def turned(x):
    y = torch.sigmoid(x) * 2.0
    return y, y.t().contiguous()


def beside_a_load(x, z):
    """`z` is row-major, as is one result."""
    y = x * 2.0 + z
    return y, y.contiguous(), y * x


def masked(x, g):
    """As gradients behind a relu: a mask of bytes, and the gradient in both orders."""
    mask = x > 0
    y = torch.where(mask, g, 0.0)
    return mask.contiguous(), y, y.contiguous()


IMAGES = {
    "whole tiles": (2, 64, 8, 16),
    "tiles that are cut": (2, 40, 5, 17),
    "narrow tiles": (1, 96, 4, 24),
    "odd": (3, 33, 7, 9),
    "as in ShuffleNet": (2, 58, 28, 28),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", IMAGES.values(), ids=IMAGES)
def test_channels_last_and_row_major(device, tiled, sizes, dtype):
    check(both, [last(*sizes, device=device, dtype=dtype)], 3)


@pytest.mark.parametrize("function", [row_major_first, beside_a_load, masked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_operands_and_results_in_both_orders(device, tiled, function, dtype):
    x = last(2, 40, 5, 18, device=device, dtype=dtype)
    more = [x.flip(0).contiguous()] if function is beside_a_load else [x * 3] if function is masked else []
    check(function, [x, *more], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(128, 64), (65, 130), (16, 300)])
def test_a_matrix_and_its_transpose(device, tiled, sizes, dtype):
    check(turned, [last(*sizes, device=device, dtype=dtype)], 6)


@pytest.mark.parametrize(
    "sizes", [(0, 64, 8, 8), (2, 0, 8, 8), (1, 1, 1, 1), (4, 1, 20, 20), (3, 64, 1, 1), (40, 3, 20, 1)]
)
def test_empty_and_thin_results(device, sizes):
    check(both, [last(*sizes, device=device)], 3)


def params_of_sums(monkeypatch, where):
    """A list that gets the parameters of sums over tiles. The module `where` takes small tensors, too."""
    made, choose = [], transposed_reduction.choose_transpose_params
    monkeypatch.setattr(where, "LARGE", 1)
    monkeypatch.setattr(
        transposed_reduction, "choose_transpose_params", lambda *a: made.append(choose(*a)) or made[-1]
    )
    return made


def summed(x):
    """The sums go over the dim along which one of the results lies."""
    y = torch.relu(x * 2.0)
    return y, y.contiguous(), y.float().sum((0, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 40, 5, 18), (5, 33, 24, 20)])
def test_results_beside_their_sums(device, target, monkeypatch, sizes, dtype):
    made = params_of_sums(monkeypatch, transpose)
    check(summed, [last(*sizes, device=device, dtype=dtype)], sizes[0] * sizes[2] * sizes[3])
    assert any(params and params.stored for params in made) == (target != "cpu")


def disagreeing(x, z):
    """Sums over the dim along which `z` lies, of products with `x`, which is channels-last."""
    return (x * z).float().sum((0, 2, 3)), (x.float() + z).sum((0, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 40, 5, 18), (5, 33, 24, 20)])
def test_sums_of_operands_that_disagree(device, target, monkeypatch, sizes, dtype):
    made = params_of_sums(monkeypatch, transposed_reduction)
    x = last(*sizes, device=device, dtype=dtype)
    for operands in ([x, x.flip(1).contiguous()], [x.flip(1).contiguous(), x]):
        check(disagreeing, operands, sizes[0] * sizes[2] * sizes[3])
    assert any(params and params.shared for params in made) == (target != "cpu")


def softmax(x):
    y = torch.softmax(x, 1)
    return y, y.t().contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_also_stored_as_columns(device, target, monkeypatch, dtype):
    """Another kernel stores the columns, from the rows."""
    monkeypatch.setattr(rows, "LARGE", 1)
    with counted() as rise:
        check(softmax, [last(70, 200, device=device, dtype=dtype)], 200)
    assert rise["launches"] == (1 if target == "cpu" else 2)


def in_place(x, z):
    """`z`, which is row-major, gets a value that is made from what a channels-last result is made from."""
    z.add_(x * 2.0)
    return x * 3.0


def test_a_tensor_that_is_written_in_place(device, tiled):
    x = last(2, 40, 5, 18, device=device)
    z = torch.randn(x.shape, device=device)
    mine, own = z.clone(), torch.compile(in_place, backend="tsfuser")
    with no_fallback():
        found = own(x, mine)
    assert_matches(found, in_place(x, z))
    assert_matches(mine, z, ops=2)
    assert tiled == [] or tiled[-1].stored


def test_other_sizes_need_no_new_kernel(device, tiled):
    compiled = torch.compile(both, backend="tsfuser", dynamic=True)
    images = [last(*sizes, device=device) for sizes in ((2, 130, 8, 16), (5, 138, 8, 24), (3, 258, 40, 8))]
    compiled(images[0])
    with counted() as rise, no_fallback():
        found = [compiled(x) for x in images]
    for own, x in zip(found, images):
        for a, b in zip(own, both(x)):
            assert_matches(a, b, ops=3)
    assert rise["plans_built"] == rise["kernels_compiled"] == 0


def normed(x, weight, bias):
    y = torch.relu(torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True))
    return y, y.contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_norm_of_many_elements(device, target, monkeypatch, dtype):
    """As in ShuffleNet, where `cat` reads what is row-major. It is large enough for the schedule."""
    made, propose = [], transpose.propose
    monkeypatch.setattr(transpose, "propose", lambda *a: made.append(propose(*a)) or made[-1])
    x, weight, bias = last(8, 20, 58, 58, device=device, dtype=dtype), *torch.randn(2, 20, device=device)
    check(normed, [x, weight, bias], 64)
    stored = [p.params.stored for p in made if not isinstance(p, str)]
    assert any(stored) == (target != "cpu")


def test_gradients(device, tiled):
    """Both results are read, and the gradients of both come in their own orders."""
    x = last(2, 40, 5, 18, device=device)

    def gradients(function, dtype):
        leaf = x.detach().to(dtype).requires_grad_()
        y, z = function(leaf)
        torch.autograd.backward((y, z), ((leaf * 3).detach(), (leaf - 1).detach().contiguous()))
        return [y.detach(), z.detach(), leaf.grad]

    with no_fallback():
        found = gradients(torch.compile(both, backend="tsfuser"), x.dtype)
    for own, eager, exact in zip(found, gradients(both, x.dtype), gradients(both, torch.float64)):
        assert_matches(own, eager, exact, ops=6)
