"""Pooling to a given size in groups, where that divides the tensor's, with what is around it."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tsfuser
from kit.support import assert_matches, fuse
from tsfuser.frontends.dynamo.joint_graph import pool_offsets

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error")]

MEANS = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
EXTREMES = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}

#: The tensor's sizes, and those of the result: windows of a few elements, of many, of one, of all.
SIZES = {
    "few": ((2, 3, 8, 9), (4, 3)),
    "many": ((2, 3, 24, 21), (2, 3)),
    "one element": ((2, 3, 8, 9), (8, 9)),
    "all": ((2, 3, 8, 9), (1, 1)),
    "rows": ((2, 3, 8, 9), (8, 1)),
    "no batch": ((3, 8, 9), (2, 9)),
    "one image": ((1, 1, 6, 6), (3, 2)),
    "one dim": ((2, 3, 12), (4,)),
    "one dim to one": ((2, 3, 40), (1,)),
    "volumes": ((2, 3, 4, 6, 5), (2, 3, 1)),
    "large volumes": ((2, 3, 8, 8, 6), (2, 1, 1)),
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def operand(sizes, device, dtype=torch.float32, last=False):
    x = torch.randn(sizes, dtype=dtype, device=device)
    return x.to(memory_format=LAST[x.dim()]) if last else x


def step(function, x):
    x = x.detach().requires_grad_()
    before = tsfuser.stats()["launches"]
    result = function(x)
    gradient = torch.linspace(-1, 2, result.numel(), device=x.device).view(result.shape).to(result)
    (grad,) = torch.autograd.grad(result, x, gradient)
    return result.detach(), grad, tsfuser.stats()["launches"] - before


@pytest.mark.each_value(("case", "dtype"))
@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_means_and_their_gradients(device, case, dtype, last):
    sizes, wanted = SIZES[case]
    if last and len(sizes) not in LAST:
        pytest.skip("it has no such format")
    pool = MEANS[len(wanted)]

    def program(x):
        return pool(x * 2.0, wanted).sin()

    x = operand(sizes, device, dtype, last)
    out, grad, launches = step(torch.compile(program, backend="tsfuser", dynamic=False), x)
    expected, of_x, _ = step(program, x)
    reference, exact, _ = step(program, x.double())
    assert_matches(out, expected, reference, ops=100)
    assert_matches(grad, of_x, exact, ops=100)
    assert out.stride() == expected.stride() and launches <= 6


@pytest.mark.each_value(("case", "dtype"))
@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_the_largest_elements_and_their_places(device, case, dtype, last):
    """Of equal elements the first, of several NaN the last; windows of -inf alone have their first place."""
    sizes, wanted = SIZES[case]
    if last and len(sizes) not in LAST:
        pytest.skip("it has no such format")
    pool = EXTREMES[len(wanted)]

    def program(x):
        values, places = pool(x * 2.0, wanted, return_indices=True)
        return values + 1.0, places

    x = operand(sizes, device, dtype, last).mul(2).round_()
    flat = x.permute([0, *range(2, x.dim()), 1]).flatten() if last else x.view(-1)
    flat[3:5], flat[-60:-40] = float("nan"), float("-inf")
    if last:
        x = flat.view([sizes[0], *sizes[2:], sizes[1]]).movedim(-1, 1)
    found = torch.compile(program, backend="tsfuser", dynamic=False)(x)
    for one, other in zip(found, program(x)):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("sizes, wanted", [((2, 3, 8, 9), (4, 3)), ((2, 3, 7, 9), (7, 9)), ((2, 3, 12), 4)])
def test_gradients_of_the_largest(device, monkeypatch, sizes, wanted, last):
    """They read a byte per window, as those of max_pool2d, where groups gather them."""
    monkeypatch.setattr(pool_offsets, "gathers_well", lambda *given: True)
    if last and len(sizes) not in LAST:
        pytest.skip("it has no such format")
    pool, saved = EXTREMES[len(sizes) - 2], []

    def program(x):
        return pool(x * 2.0, wanted).sin()

    x = operand(sizes, device, last=last).mul(2).round_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        found = step(torch.compile(program, backend="tsfuser", dynamic=False), x)
    for one, other in zip(found[:2], step(program, x)):
        assert_close(one, other)
    assert torch.int8 in saved and torch.int64 not in saved


@pytest.mark.parametrize("case", SIZES)
def test_scripted(device, case):
    sizes, wanted = SIZES[case]
    mean, largest = MEANS[len(wanted)], EXTREMES[len(wanted)]

    def program(x):
        y = x * 2.0
        return mean(y, wanted).sin() + largest(y, wanted)

    x = operand(sizes, device)
    with torch.no_grad():
        scripted = fuse(torch.jit.trace(program, x), x)
        before = tsfuser.stats()["launches"]
        with tsfuser.fuser():
            result = scripted(x)
        assert_matches(result, program(x), program(x.double()), ops=100)
    assert tsfuser.stats()["launches"] > before


def test_scripted_training(device):
    def program(x):
        return F.adaptive_avg_pool2d(x.sin() * 2.0, (4, 3)).tanh()

    x = operand((2, 3, 8, 9), device)
    traced = torch.jit.trace(program, x)
    with tsfuser.fuser():
        for _ in range(3):
            found = step(traced, x)
    for one, other in zip(found[:2], step(program, x)):
        assert_matches(one, other, ops=100)
    assert found[2] > 0


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@pytest.mark.parametrize("sizes, wanted", [((2, 3, 8, 9), (3, 5)), ((2, 3, 4, 4), (8, 8))])
def test_sizes_that_do_not_divide_are_left_to_torch(device, pool, sizes, wanted):
    def program(x):
        return pool(x.sin() * 2.0, wanted).cos() * 2.0

    x = operand(sizes, device)
    found = step(torch.compile(program, backend="tsfuser"), x)
    for one, other in zip(found[:2], step(program, x)):
        assert_close(one, other)
    assert found[2] >= 2


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_a_compiled_graph_of_all_sizes_runs_with_those_that_do_not_divide(device, pool):
    def program(x):
        return pool(x.sin() * 2.0, (4, 3)).cos() * 2.0

    compiled = torch.compile(program, backend="tsfuser", dynamic=True)
    for rows in (8, 7, 12):
        x = operand((2, 3, rows, 9), device)
        for one, other in zip(step(compiled, x)[:2], step(program, x)):
            assert_close(one, other)


@pytest.mark.parametrize("sizes", [(0, 3, 8, 9), (2, 0, 8, 9)])
def test_no_images(device, sizes):
    def program(x):
        return F.adaptive_avg_pool2d(x * 2.0, (4, 3)).sin()

    with torch.no_grad():
        x = operand(sizes, device)
        try:
            expected = program(x)
        except RuntimeError as error:
            with pytest.raises(type(error)):
                torch.compile(program, backend="tsfuser")(x)
        else:
            assert torch.compile(program, backend="tsfuser")(x).shape == expected.shape


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_what_eager_rejects_raises(device, pool):
    scripted = torch.jit.trace(lambda x: pool(x * 2.0, (2, 3)).sin(), operand((2, 3, 8, 9), device))
    x = operand((2, 3, 0, 9), device)
    with pytest.raises(RuntimeError, match="non-zero size"):
        pool(x, (2, 3))
    with tsfuser.fuser(), pytest.raises(RuntimeError, match="non-zero size"):
        scripted(x)
