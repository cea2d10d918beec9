"""Random ops in groups: reproducible, independent, of the right distribution, and the same mask in forward and backward.

Statistics are over fixed seeds, so a test passes always or never. Bounds are 5 standard deviations: a right generator fails one test of 2 million.
"""

import math
from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from support import assert_matches, counted, fresh, fuse, groups, kinds, no_fallback, train
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import tsfuser

SIGMAS = 5
SHAPES = [(1 << 16,), (257, 333), (64, 7, 129), (8, 16, 24, 20), (4099, 3), (3, 8191)]


@pytest.fixture(autouse=True)
def fused_only():
    torch.manual_seed(1234)
    with no_fallback():
        yield


def drop(x, y):
    return F.dropout(x + y, 0.3, True) * 2.0


def noise(x):
    return torch.rand_like(x + 1.0) * 1.0


def two(x, y):
    return F.dropout(x + y, 0.5, True), F.dropout(x + y, 0.5, True)


def bias_dropout_add(x, bias, residual):
    return F.dropout(x + bias, 0.1, True) + residual


def ones(shape, device, dtype=torch.float32):
    return torch.ones(shape, device=device, dtype=dtype)


def uniforms(device, shape, dtype=torch.float32):
    """Numbers of rand_like, fused."""
    x = torch.zeros(shape, device=device, dtype=dtype)
    scripted = fuse(noise, x)
    torch.manual_seed(7)
    with counted() as rise:
        result = scripted(x)
    assert rise["launches"] == 1 and rise["fallbacks"] == {}
    return result


def close(measured, expected, deviation, count):
    """Whether the mean of `count` numbers of standard deviation `deviation` is where it should be."""
    assert abs(measured - expected) <= SIGMAS * deviation / math.sqrt(count), (measured, expected, count)


def correlation(a, b):
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return ((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()).item()


def test_a_seed_reproduces_and_another_one_differs(device):
    x, y = torch.randn(2, 33, 65, device=device)
    scripted = fuse(drop, x, y)

    def run(seed):
        torch.manual_seed(seed)
        return scripted(x, y), scripted(x, y)

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_one_group_of_one_kernel(device):
    x, y = torch.randn(2, 33, 65, device=device)
    scripted = fuse(drop, x, y)
    assert [kinds(g) for g in groups(scripted)] == [["aten::add", "aten::dropout", "aten::mul"]]
    with counted() as rise:
        scripted(x, y)
    assert rise["launches"] == 1


def state_of(device):
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def test_the_state_of_the_generator_advances(device):
    x, y = torch.randn(2, 33, 65, device=device)
    scripted = fuse(two, x, y)
    before = state_of(device)
    scripted(x, y)
    after = state_of(device)
    assert not torch.equal(before, after)
    if device == "cuda":  # 4 for each of two ops: the state is seed and offset, 64 bits each
        assert (after.view(torch.int64) - before.view(torch.int64)).tolist() == [0, 8]


def test_other_random_ops_go_on_after_a_group(device):
    """Eager numbers after a fused call depend on the seed alone, and are not those that it used."""
    x, y = ones((1024,), device), torch.zeros(1024, device=device)
    scripted = fuse(noise, x)
    torch.manual_seed(3)
    mine, eager = scripted(x), torch.rand(1024, device=device)
    torch.manual_seed(3)
    assert torch.equal(mine, scripted(x)) and torch.equal(eager, torch.rand(1024, device=device))
    assert not (mine == eager).any()


def test_a_group_without_elements_draws_nothing(device):
    x = torch.zeros(0, 5, device=device)
    scripted = fuse(drop, torch.zeros(4, 5, device=device), torch.zeros(4, 5, device=device))
    before = state_of(device)
    assert scripted(x, x).shape == (0, 5)
    assert torch.equal(before, state_of(device))


def test_a_plan_without_random_ops_draws_nothing(device):
    x = torch.randn(4, 5, device=device)
    scripted = fuse(without_randomness, x)
    before = state_of(device)
    scripted(x)
    assert torch.equal(before, state_of(device))


def without_randomness(x):
    return (x + 1.0) * 2.0


# ---- distribution


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniforms(device, shape, dtype):
    u = uniforms(device, shape, dtype)
    assert u.dtype is dtype and u.shape == shape
    assert u.min() >= 0 and u.max() < 1
    u, n = u.double().flatten(), u.numel()
    steps = {torch.float16: 2048, torch.bfloat16: 256}.get(dtype, 1 << 24)  # multiples of 1 / steps
    close(u.mean().item(), (1 - 1 / steps) / 2, math.sqrt(1 / 12), n)
    close((u - 0.5).square().mean().item(), 1 / 12, math.sqrt(1 / 180), n)
    bins = 32
    counts = torch.histc(u.float(), bins, 0, 1).tolist()
    for count in counts:
        close(count / n, 1 / bins, math.sqrt((bins - 1) / bins**2), n)


def normal_noise(x):
    return torch.randn_like(x + 1.0) * 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_normals(device, dtype):
    """Mean, variance, and the share of each of 24 slices."""
    x = torch.zeros(257, 333, device=device, dtype=dtype)
    z = fuse(normal_noise, x)(x)
    assert z.dtype is dtype and torch.isfinite(z).all()
    z = z.double().flatten()
    n = z.numel()
    close(z.mean().item(), 0, 1, n)
    close(z.square().mean().item(), 1, math.sqrt(2), n)
    if dtype in (torch.float32, torch.float64):  # the edges are numbers of the 16-bit dtypes
        edges = torch.linspace(-3, 3, 25, dtype=torch.float64)
        below = [(z < edge).double().mean().item() for edge in edges]
        for share, edge in zip(below, edges.tolist()):
            expected = 0.5 * (1 + math.erf(edge / math.sqrt(2)))
            close(share, expected, math.sqrt(expected * (1 - expected)), n)


def test_numbers_do_not_repeat(device):
    """2^16 numbers of 53 bits are all different; of 24 bits, some 128 meet."""
    assert uniforms(device, (1 << 16,), torch.float64).unique().numel() == 1 << 16
    assert uniforms(device, (1 << 16,)).unique().numel() > (1 << 16) - 128 - SIGMAS * 12


@pytest.mark.parametrize("distance", range(1, 9))
def test_neighbours_are_independent(device, distance):
    u = uniforms(device, (1 << 16,))
    assert abs(correlation(u[distance:], u[:-distance])) < SIGMAS / math.sqrt(u.numel())


@pytest.mark.parametrize("dim", range(4))
def test_dims_are_independent(device, dim):
    u = uniforms(device, (16, 24, 32, 9))
    a, b = u.narrow(dim, 1, u.size(dim) - 1), u.narrow(dim, 0, u.size(dim) - 1)
    assert abs(correlation(a, b)) < SIGMAS / math.sqrt(a.numel())


def test_calls_are_independent(device):
    x = torch.zeros(1 << 16, device=device)
    scripted = fuse(noise, x)
    calls = [scripted(x) for _ in range(4)]
    for k, u in enumerate(calls):
        for other in calls[:k]:
            assert abs(correlation(u, other)) < SIGMAS / math.sqrt(u.numel())
            assert (u == other).sum() < 10


def test_ops_of_one_function_are_independent(device):
    """Equal dropouts are not merged."""
    x, y = ones((257, 333), device), torch.zeros(257, 333, device=device)
    scripted = fuse(two, x, y)
    with counted() as rise:
        a, b = scripted(x, y)
    assert rise["launches"] == 1
    assert abs(correlation(a, b)) < SIGMAS / math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keep_rate(device, shape, p):
    scripted = fuse(dropped, ones(shape, device), p)
    out = scripted(ones(shape, device), p)
    kept = out != 0
    close(kept.double().mean().item(), 1 - p, math.sqrt(p * (1 - p)), out.numel())
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 2 / (1 - p)))


def dropped(x, p: float):
    return F.dropout(x + x, p, True)


# ---- layouts and shapes


def test_numbers_are_of_the_element_not_of_its_place_in_memory(device):
    """The same tensor in other strides, and cut out of a larger one at an odd address, is dropped alike."""
    x = torch.randn(3, 5, 6, 7, device=device)
    shifted = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    outs = []
    for same in (x, x.to(memory_format=torch.channels_last), x.transpose(1, 3).contiguous().transpose(1, 3), shifted):
        scripted = fuse(noise, same)
        torch.manual_seed(5)
        outs.append(scripted(same))
        assert outs[-1].stride() == (same + 1.0).stride()
    assert all(torch.equal(outs[0], other) for other in outs[1:])


def test_channels_last_keep_rate(device):
    x = ones((8, 32, 15, 17), device).to(memory_format=torch.channels_last)
    out = fuse(dropped, x, 0.25)(x, 0.25)
    close((out != 0).double().mean().item(), 0.75, math.sqrt(3 / 16), out.numel())
    assert out.is_contiguous(memory_format=torch.channels_last)


def beside(x, row):
    return F.dropout(row + 0.0, 0.5, True) + x


def test_a_small_dropout_is_broadcast_as_one(device):
    """All rows see the mask of the row."""
    x, row = torch.zeros(65, 129, device=device), ones((129,), device)
    out = fuse(beside, x, row)(x, row)
    assert torch.equal(out, out[:1].expand(65, 129))
    assert 0 < (out[0] == 0).sum() < 129


def both_sums(x, row):
    y = F.dropout(x + 1.0, 0.5, True)
    return y.sum(0), (y * row).sum(1)


@pytest.mark.parametrize("shape", [(67, 131), (2048, 8), (5, 4096)], ids=str)
def test_all_kernels_of_a_plan_see_the_same_mask(device, shape):
    """Sums over different dims need several kernels, which draw the numbers again: here 0 or 4, weighted by the column."""
    x, row = ones(shape, device), torch.arange(1.0, shape[1] + 1, device=device)
    scripted = fuse(both_sums, x, row)
    assert len(groups(scripted)) == 1
    with counted() as rise:
        columns, rows = scripted(x, row)
    assert rise["launches"] > 1
    assert 0.4 < columns.sum().item() / (4 * x.numel()) < 0.6
    assert (columns.double() * row).sum().item() == rows.double().sum().item()  # integers: exact


def with_output(x, row):
    y = F.dropout(x + 1.0, 0.5, True)
    return y * row, y.sum(0), y.sum(1), y


def test_sums_are_those_of_the_output(device):
    x, row = torch.randn(67, 131, device=device), torch.randn(131, device=device)
    scaled, columns, rows, y = fuse(with_output, x, row)(x, row)
    assert_matches(scaled, y * row)
    assert_matches(columns, y.sum(0), ops=8)
    assert_matches(rows, y.sum(1), ops=8)


def normalised(x, bias, residual):
    y = F.dropout(x + bias, 0.2, True) + residual
    return F.layer_norm(y, [x.size(-1)]), y


@pytest.mark.parametrize("columns", [37, 128, 1000, 20000])
def test_dropout_before_a_normalisation(device, columns):
    """Every pass over the row sees the same mask."""
    x, residual = torch.randn(2, 6, columns, device=device)
    bias = torch.randn(columns, device=device)
    out, y = fuse(normalised, x, bias, residual)(x, bias, residual)
    kept = y != residual
    assert 0.6 < kept.double().mean() < 0.95
    assert_matches(out, F.layer_norm(y, [columns]), F.layer_norm(y.double(), [columns]), ops=16)


# ---- special probabilities, modes and dtypes


@pytest.mark.parametrize("constant", [True, False])
def test_probability_zero_and_one(device, constant):
    x = torch.randn(33, 65, device=device)
    for p, expected in ((0.0, x + x), (1.0, torch.zeros_like(x))):
        if constant:
            out = fuse(never if p == 0 else always, x)(x)
        else:
            out = fuse(dropped, x, 0.5)(x, p)
        assert torch.equal(out, expected)


def never(x):
    return F.dropout(x + x, 0.0, True)


def always(x):
    return F.dropout(x + x, 1.0, True)


def with_mode(x, training: bool):
    return F.dropout(x + x, 0.5, training) * 3.0


def test_evaluation_is_exact_and_draws_nothing(device):
    x = torch.randn(33, 65, device=device)
    scripted = fuse(with_mode, x, False)
    before = state_of(device)
    with counted() as rise:
        assert torch.equal(scripted(x, False), (x + x) * 3.0)
    assert rise["launches"] == 1 and torch.equal(before, state_of(device))
    out = scripted(x, True)  # the other mode is another class of calls
    assert 0 < (out == 0).sum() < out.numel()
    assert torch.equal(scripted(x, False), (x + x) * 3.0)


def native(x, train: Optional[bool]):  # a constant None is an internal error in torch's own passes
    y, mask = torch.native_dropout(x + x, 0.5, train)
    return y * 1.0, mask


def test_native_dropout(device):
    x = torch.randn(33, 65, device=device)
    for train in (True, None):
        y, mask = fuse(native, x, train)(x, train)
        assert mask.dtype is torch.bool and 0 < mask.sum() < mask.numel()
        assert torch.equal(y, (x + x) * mask * 2.0)
    y, mask = fuse(native, x, False)(x, False)
    assert torch.equal(y, x + x) and mask.dtype is torch.bool and mask.all()


def test_not_a_number_stays_where_eager_has_it(device):
    x = torch.full((64, 64), math.inf, device=device)
    out = fuse(dropped, x, 0.5)(x, 0.5)
    assert (torch.isnan(out) | (out == math.inf)).all() and torch.isnan(out).any() and (out == math.inf).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(device, dtype):
    x = ones((257, 333), device, dtype)
    out = fuse(dropped, x, 0.1)(x, 0.1)
    assert out.dtype is dtype
    kept = out[out != 0]
    close((out != 0).double().mean().item(), 0.9, 0.3, out.numel())
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / 0.9))


def in_place(x):
    y = x + 1.0
    return F.dropout(y, 0.5, True, True) * 2.0


def test_dropout_in_place(device):
    x = ones((64, 64), device)
    scripted = fuse(in_place, x)
    assert [kinds(g) for g in groups(scripted)] == [["aten::add", "aten::dropout", "aten::mul"]]
    out = scripted(x)
    assert set(out.unique().tolist()) == {0.0, 8.0} and torch.equal(x, ones((64, 64), device))


# ---- training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_backward_has_the_mask_of_the_forward(device, dtype):
    x, bias, residual = (torch.rand(s, device=device).to(dtype) for s in ((37, 65), (65,), (37, 65)))
    x, bias, residual = (x + 8).requires_grad_(), bias.requires_grad_(), residual.requires_grad_()  # what is kept is seen
    scripted = fresh(bias_dropout_add)
    with tsfuser.fuser():
        train(scripted, (x, bias, residual))
        with counted() as rise:
            out, (gx, gbias, gresidual) = train(scripted, (x, bias, residual), calls=1)
    assert rise["launches"] in (2, 3) and rise["fallbacks"] == {}  # a sum that is split is two kernels
    assert len(groups(scripted)) == 2
    forward, backward = sorted(groups(scripted), key=lambda g: "aten::native_dropout" not in kinds(g))
    assert "aten::native_dropout" in kinds(forward) and "aten::native_dropout_backward" in kinds(backward)
    kept = gx != 0
    dropped_here = out == residual
    assert torch.equal(kept, ~dropped_here)
    assert 0.8 < kept.double().mean() < 0.97
    scale, wide = kept.double() / 0.9, [v.detach().double() for v in (x, bias, residual)]
    assert_matches(gx, (gresidual * scale).to(dtype), gresidual.double() * scale)
    total = (gresidual.double() * scale).sum(0)
    assert_matches(gbias, total.to(dtype), total, ops=8)
    exact = (wide[0] + wide[1]) * scale + wide[2]
    assert_matches(out, exact.to(dtype), exact, ops=3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, reentrant):
    """The forward that is run again in the backward drops the same elements."""

    def gradient(function, *inputs):
        for x in inputs:
            x.grad = None
        out = function(*inputs)
        out.backward(torch.ones_like(out))
        return out.detach(), [x.grad for x in inputs]

    def again(function, *inputs):
        with set_checkpoint_early_stop(False):  # it raises an exception through the function, which TorchScript does not pass on
            return checkpoint(function, *inputs, use_reentrant=reentrant, preserve_rng_state=True)

    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((37, 65), (65,), (37, 65))]
    scripted = fresh(bias_dropout_add)
    with tsfuser.fuser():
        if not reentrant:  # this kind compares what is saved, which changes once, when torch has profiled the function
            train(scripted, inputs)
        for _ in range(4):
            out, (gx, _, _) = gradient(lambda *xs: again(scripted, *xs), *inputs)
    assert torch.equal(gx != 0, out != inputs[2])
    torch.manual_seed(11)
    plain, expected = gradient(scripted, *inputs)
    torch.manual_seed(11)
    repeated, found = gradient(lambda *xs: again(scripted, *xs), *inputs)
    assert torch.equal(plain, repeated) and all(torch.equal(a, b) for a, b in zip(expected, found))


def test_sizes_only_outputs_leave_no_dropout_behind(device):
    """Autodiff asks for the sizes of the dropped values and of the mask; they are not stored for that."""
    x, bias, residual = (torch.randn(s, device=device, requires_grad=True) for s in ((37, 65), (65,), (37, 65)))
    scripted = fresh(bias_dropout_add)
    with tsfuser.fuser():
        train(scripted, (x, bias, residual))
    [forward] = [g for g in groups(scripted) if "aten::native_dropout" in kinds(g)]
    assert forward.outputsSize() == 2, forward  # the result and the mask


def two_trained(x, y):
    return F.dropout(x + y, 0.5, True) - F.dropout(x + y, 0.5, True)


def test_equal_dropouts_are_not_merged_in_training(device):
    x, y = (torch.ones(257, 333, device=device, requires_grad=True) for _ in range(2))
    scripted = fresh(two_trained)
    with tsfuser.fuser():
        for _ in range(4):
            x.grad = None
            out = scripted(x, y)
            out.sum().backward()
    assert len(groups(scripted)) == 2
    assert torch.equal(x.grad * 2, out)  # 2 * (first mask - second mask), twice
    close((out == 0).double().mean().item(), 0.5, 0.5, out.numel())
