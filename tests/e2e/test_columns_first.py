"""Reductions over pixels and the few channels of a group, in channels last: column by column first."""

import pytest
import torch
import torch.nn.functional as F

from kit.support import assert_matches, counted, no_fallback
from tsfuser.schedule import columns_first

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


@pytest.fixture
def divided(target, monkeypatch):
    """The reductions that become two. Small tensors count as large ones."""
    made, rewritten = [], columns_first._rewritten

    def spied(fusion, chosen):
        found = rewritten(fusion, chosen)
        made.append(len(found.ops) - len(fusion.ops))
        return found

    monkeypatch.setattr(columns_first, "_rewritten", spied)
    monkeypatch.setattr(columns_first, "LARGE", 1)
    return made


def group_norm(groups):
    return lambda x, w, b: F.silu(F.group_norm(x, groups, w, b))


def images(*sizes, device, dtype=torch.float32, offset=0.0):
    torch.manual_seed(0)
    x = torch.randn(sizes) + offset
    w, b = torch.randn(2, sizes[1])
    x = x.to(memory_format=torch.channels_last)
    return [t.to(dtype).to(device).requires_grad_() for t in (x, w, b)]


def trained(function, tensors, dtype=None):
    tensors = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    result = function(*tensors)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result.backward(gradient.to(result.dtype).to(result.device))
    return [result.detach(), *(t.grad for t in tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes, groups", [((2, 12, 9, 11), 4), ((1, 15, 32, 8), 5), ((3, 30, 16, 16), 5)])
def test_a_group_norm_in_channels_last(device, target, divided, dtype, sizes, groups):
    function = group_norm(groups)
    tensors = images(*sizes, device=device, dtype=dtype)
    run = torch.compile(function, backend="tsfuser")
    with no_fallback():
        for _ in range(2):
            found = trained(run, tensors)
    eager, exact = trained(function, tensors), trained(function, tensors, torch.float64)
    for mine, theirs, wanted in zip(found, eager, exact):
        assert_matches(mine, theirs, wanted, ops=200)
    assert bool(divided) == (target != "cpu")


def test_a_mean_far_from_0_leaves_the_variance(device, divided):
    function, tensors = group_norm(4), images(2, 12, 16, 16, device=device, offset=1000.0)
    with no_fallback():
        found = trained(torch.compile(function, backend="tsfuser"), tensors)
    eager, exact = trained(function, tensors), trained(function, tensors, torch.float64)
    for mine, theirs, wanted in zip(found, eager, exact):
        assert_matches(mine, theirs, wanted, ops=2000)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_group(device, divided, special):
    function, tensors = group_norm(4), images(2, 12, 9, 9, device=device)
    with torch.no_grad():
        tensors[0][1, 4, 2, 3] = special
        found = torch.compile(function, backend="tsfuser")(*tensors)
    eager = function(*tensors).detach()
    assert torch.equal(found.isfinite(), eager.isfinite())
    assert not found[1, 3:6].isfinite().any() and found[0].isfinite().all()


@pytest.mark.parametrize(
    "sizes, groups",
    [((2, 12, 9, 9), 1), ((2, 12, 9, 9), 12), ((2, 64, 9, 9), 2), ((1, 12, 1, 1), 4), ((0, 12, 4, 4), 4)],
)
def test_other_sizes_stay_right(device, divided, sizes, groups):
    """One group; one channel a group; many; one pixel; no image."""
    function, tensors = group_norm(groups), images(*sizes, device=device)
    with no_fallback(), torch.no_grad():
        found = torch.compile(function, backend="tsfuser")(*tensors)
        assert_matches(found, function(*tensors), function(*(t.double() for t in tensors)), ops=100)


def test_sums_over_the_same_columns_share_a_pass(device, target, divided):
    """By pixels and channels of a group, and by images and pixels: the data are read once for both."""

    def function(x):
        y = x.float() * 2
        parts = y.unflatten(1, (4, 3))
        return parts.sum((2, 3, 4)), y.sum((0, 2, 3))

    x = images(4, 12, 20, 20, device=device)[0].detach()
    run = torch.compile(function, backend="tsfuser")
    with no_fallback():
        run(x)
        with counted() as rise:
            found = run(x)
    for mine, theirs, wanted in zip(found, function(x), function(x.double())):
        assert_matches(mine, theirs, wanted, ops=2000)
    assert rise["launches"] <= 3 or target == "cpu"


def test_small_data_and_long_rows_are_one_pass(device, monkeypatch):
    monkeypatch.setattr(columns_first, "_rewritten", lambda *given: pytest.fail("divided"))
    for sizes, groups in [((2, 12, 9, 11), 4), ((1, 128, 96, 96), 2)]:
        x, w, b = (t.detach() for t in images(*sizes, device=device))
        with no_fallback():
            torch.compile(group_norm(groups), backend="tsfuser")(x, w, b)
