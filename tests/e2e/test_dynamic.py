"""Shapes that change between calls: one plan serves a class, and a class is compiled once."""

import pytest
import torch

from kit.support import assert_matches, counted, fuse, groups, no_fallback


@pytest.fixture(autouse=True)
def fused_only():
    with no_fallback():
        yield


def program(x, y):
    return (x + y).sigmoid() * x


def check(scripted, x, y):
    assert_matches(scripted(x, y), program(x, y), program(x.double(), y.double()), ops=3)


def test_a_new_shape_of_a_known_class_compiles_nothing(device):
    scripted = fuse(program, torch.randn(16, 64, device=device), torch.randn(64, device=device))
    with counted() as rise:
        for rows, columns in ((3, 64), (16, 128), (200, 32), (5, 256)):
            check(scripted, torch.randn(rows, columns, device=device), torch.randn(columns, device=device))
    assert rise["class_hits"] == 4 and rise["plans_built"] == 0 and rise["kernels_compiled"] == 0


def test_a_known_shape_is_an_exact_hit(device):
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    scripted = fuse(program, x, y)
    with counted() as rise:
        for _ in range(5):
            scripted(x, y)
    assert rise["exact_hits"] == 5 and rise["class_hits"] == 0 and rise["launches"] == 5


def test_random_shapes_need_few_plans(device):
    """30 shapes with odd and even sizes: vector widths differ, so a few classes, not 30."""
    generator = torch.Generator().manual_seed(5)
    scripted = fuse(program, torch.randn(16, 64, device=device), torch.randn(64, device=device))
    with counted() as rise:
        for _ in range(30):
            rows, columns = torch.randint(2, 300, (2,), generator=generator).tolist()
            check(scripted, torch.randn(rows, columns, device=device), torch.randn(columns, device=device))
    assert rise["plans_built"] <= 8
    assert rise["fallbacks"] == {}


def test_a_broadcast_that_appears_later_is_right(device):
    """The profile saw no size 1: the guard sends such a call to the fallback, which gives the right
    result."""
    scripted = fuse(program, torch.randn(16, 64, device=device), torch.randn(16, 64, device=device))
    for left, right in (
        ((16, 1), (16, 64)),
        ((1, 64), (16, 64)),
        ((16, 64), (1, 1)),
        ((1, 1), (1, 1)),
        ((1, 1), (1, 64)),
    ):
        for _ in range(2):
            check(scripted, torch.randn(left, device=device), torch.randn(right, device=device))


def test_guard_off_serves_whatever_comes(device):
    """nvFuser's own tests ran like this: the group itself must be right for all sizes, strides and size-1
    patterns."""
    scripted = fuse(program, torch.randn(16, 64, device=device), torch.randn(16, 64, device=device))
    assert len(groups(scripted)) == 1
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    try:
        with counted() as rise:
            for left, right in (
                ((16, 1), (16, 64)),
                ((1, 64), (16, 64)),
                ((8, 8), (1, 1)),
                ((0, 4), (1, 4)),
                ((5, 7), (5, 7)),
            ):
                check(scripted, torch.randn(left, device=device), torch.randn(right, device=device))
            x = torch.randn(64, 16, device=device)
            check(scripted, x.t(), torch.randn(16, 64, device=device))
            check(scripted, x.t(), x.t())
            check(scripted, x[::2, ::2], x[1::2, 1::2])
        assert rise["exact_hits"] + rise["class_hits"] + rise["plans_built"] == 8
        with pytest.raises(RuntimeError):
            scripted(torch.randn(3, 4, device=device), torch.randn(5, 4, device=device))
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


def test_sizes_that_do_not_broadcast_raise_as_in_eager(device):
    scripted = fuse(program, torch.randn(16, 64, device=device), torch.randn(16, 64, device=device))
    with pytest.raises(RuntimeError, match="must match the size|broadcast"):
        scripted(torch.randn(3, 64, device=device), torch.randn(5, 64, device=device))


def test_reset_forgets_plans_and_counts(device):
    import tsfuser

    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    scripted = fuse(program, x, y)
    tsfuser.reset()
    stats = tsfuser.stats()
    assert [
        stats[n] for n in ("plans_built", "exact_hits", "class_hits", "kernels_compiled", "disk_hits")
    ] == [0] * 5
    assert stats["fallbacks"] == {}
    check(scripted, x, y)
    check(scripted, x, y)
    stats = tsfuser.stats()
    assert (stats["plans_built"], stats["exact_hits"], stats["kernels_compiled"], stats["disk_hits"]) == (
        1,
        1,
        0,
        1,
    )
