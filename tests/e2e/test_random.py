"""Random ops in groups: reproducible, independent, of the right distribution."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from kit.distribution import SHAPES, SIGMAS, close, correlation, ones, set_state, state_of
from kit.support import counted, fuse, groups, kinds, no_fallback


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


def uniforms(device, shape, dtype=torch.float32):
    """Numbers of rand_like, fused."""
    x = torch.zeros(shape, device=device, dtype=dtype)
    scripted = fuse(noise, x)
    torch.manual_seed(7)
    with counted() as rise:
        result = scripted(x)
    assert rise["launches"] == 1 and rise["fallbacks"] == {}
    return result


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
    x = ones((1024,), device)
    scripted = fuse(noise, x)
    torch.manual_seed(3)
    mine, eager = scripted(x), torch.rand(1024, device=device)
    torch.manual_seed(3)
    assert torch.equal(mine, scripted(x)) and torch.equal(eager, torch.rand(1024, device=device))
    assert not (mine == eager).any()


def test_a_state_put_back_gives_the_same_numbers(device):
    x, y = torch.randn(2, 33, 65, device=device)
    scripted = fuse(drop, x, y)
    begin, first = state_of(device), scripted(x, y)
    middle, second = state_of(device), scripted(x, y)
    set_state(device, middle)
    assert torch.equal(second, scripted(x, y))
    set_state(device, begin)
    assert torch.equal(first, scripted(x, y)) and torch.equal(middle, state_of(device))


def test_a_fork_of_the_generator_leaves_no_trace(device):
    x, y = torch.randn(2, 33, 65, device=device)
    scripted = fuse(drop, x, y)
    state = state_of(device)
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        inside = scripted(x, y)
    assert torch.equal(state, state_of(device)) and torch.equal(inside, scripted(x, y))


def test_threads_draw_different_numbers(device):
    """Together four threads draw what one would, and no call what another draws."""
    x, y = ones((64, 65), device), torch.zeros(64, 65, device=device)
    scripted = fuse(drop, x, y)
    torch.manual_seed(3)
    expected = [scripted(x, y) != 0 for _ in range(16)]
    after, found = state_of(device), []
    torch.manual_seed(3)

    def calls():
        for _ in range(4):
            found.append(scripted(x, y) != 0)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(after, state_of(device)) and len(found) == 16
    assert all(sum(torch.equal(mask, other) for other in found) == 1 for mask in expected)


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


@pytest.mark.each_value
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


# ---- layouts and shapes


def test_numbers_do_not_depend_on_gaps_alignment_and_the_order_of_dims(device):
    """A tensor cut out of a larger one, at an odd address, or expanded gets the numbers of a dense one; one
    of another order of dims gets them in the order of its memory, as in eager."""
    x = torch.randn(3, 5, 6, 7, device=device)
    shifted = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    cut = torch.zeros(3, 5, 6, 9, device=device)[..., 1:8].copy_(x)
    expanded = x[:, :1].expand(x.shape)
    last, swapped = x.to(memory_format=torch.channels_last), x.transpose(1, 3).contiguous().transpose(1, 3)
    walks = []
    for same in (x, shifted, cut, expanded, last, swapped):
        scripted = fuse(noise, same)
        torch.manual_seed(5)
        out = scripted(same)
        assert out.stride() == (same + 1.0).stride()
        walks.append(torch.as_strided(out, (out.numel(),), (1,)))
    assert all(torch.equal(walks[0], other) for other in walks[1:])
