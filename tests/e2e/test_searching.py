"""searchsorted and bucketize in groups: places among sorted elements, as eager finds them."""

import pytest
import torch

import tsfuser
from kit.support import fuse

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error")]

NAN, INF = float("nan"), float("inf")
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def values(device, dtype, *sizes):
    generator = torch.Generator(device).manual_seed(sum(sizes))
    return torch.randint(0, 60, sizes, device=device, generator=generator).to(dtype)


def check(program, *tensors, launches=1):
    """One launch finds what eager finds."""
    compiled = torch.compile(program, backend="tsfuser", dynamic=False)
    before = tsfuser.stats()["launches"]
    found, expected = compiled(*tensors), program(*tensors)
    assert tsfuser.stats()["launches"] - before == launches
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.each_value(("length", "dtype"))
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 8, 33, 1000])
def test_boundaries(device, length, dtype, right):
    edges = values(device, dtype, length).sort()[0]
    check(
        lambda x, edges: torch.bucketize(x + 1, edges, right=right) * 2, values(device, dtype, 3, 41), edges
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_row_or_a_row_each(device, side, narrow):
    def program(x, rows):
        return torch.searchsorted(rows, x * 2, out_int32=narrow, side=side) + 1

    for sizes in ((9,), (4, 9), (1, 9), (4, 0)):
        rows = values(device, torch.float32, *sizes).sort()[0]
        check(program, values(device, torch.float32, *sizes[:-1], 5), rows)
    check(program, values(device, torch.float32, 2, 3, 1), values(device, torch.float32, 2, 3, 6).sort()[0])
    check(program, values(device, torch.float32), values(device, torch.float32, 6).sort()[0])


def test_numbers_that_are_none_and_rows_that_are_not_sorted(device):
    """As torch's loop, which looks at the same places."""
    special = torch.tensor([NAN, -INF, INF, 0.0, -0.0, 3.0, 2.5], device=device)
    for row in (
        [1.0, 2.5, 3.0, NAN, NAN],
        [NAN, 1.0, 3.0],
        [-INF, 0.0, 0.0, 3.0, INF],
        [5.0, 1.0, 4.0, 2.0, 3.0, 9.0],
    ):
        for right in (False, True):
            check(
                lambda x, row, right=right: torch.searchsorted(row, x + 0.0, right=right) + 1,
                special,
                torch.tensor(row, device=device),
            )


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_operands_that_lie_anyhow(device):
    def program(x, rows):
        return torch.searchsorted(rows, x * 2.0) * 3

    rows, x = values(device, torch.float32, 4, 9).sort()[0], values(device, torch.float32, 6, 4)
    check(program, x.t(), rows.t().contiguous().t())
    check(program, x.t()[:, ::2], rows[:, 1:])
    check(program, x[:, :1].expand(6, 4).t(), rows[:1].expand(4, 9))
    assert torch.compile(program, backend="tsfuser")(x[:0].t(), rows).shape == (4, 0)


def test_values_are_compared_as_they_are_rounded(device):
    x, row = torch.full((9,), 1.0, device=device), torch.tensor([1.0, 1.0078125], device=device).bfloat16()

    def program(x, row):
        return torch.bucketize((x + 0.003).bfloat16(), row) + 1

    check(program, x, row)


def test_scripted(device):
    def program(x, edges):
        return torch.bucketize(x * 2.0, edges).float() + torch.searchsorted(edges, x, right=True)

    x, edges = values(device, torch.float32, 5, 7), values(device, torch.float32, 11).sort()[0]
    scripted = fuse(torch.jit.trace(program, (x, edges)), x, edges)
    before = tsfuser.stats()["launches"]
    with tsfuser.fuser():
        found = scripted(x, edges)
    assert torch.equal(found, program(x, edges)) and tsfuser.stats()["launches"] - before == 1


def test_no_gradient_passes(device):
    def program(x, edges):
        return x.sin() * torch.bucketize(x.cos(), edges)

    x, edges = values(device, torch.float32, 5, 7).requires_grad_(), torch.tensor([0.0, 0.5], device=device)
    compiled = torch.compile(program, backend="tsfuser")
    (found,), (expected,) = (torch.autograd.grad(f(x, edges).sum(), x) for f in (compiled, program))
    torch.testing.assert_close(found, expected)


def test_a_kernel_serves_rows_of_the_same_power_of_two(device):
    compiled = torch.compile(
        lambda x, row: torch.bucketize(x * 2.0, row) + 1, backend="tsfuser", dynamic=True
    )
    x = values(device, torch.float32, 5, 7)
    for length in (17, 18, 30, 31):
        row = values(device, torch.float32, length).sort()[0]
        assert torch.equal(compiled(x, row), torch.bucketize(x * 2.0, row) + 1)
        if length == 18:
            known = tsfuser.stats()["kernels_compiled"]
    assert tsfuser.stats()["kernels_compiled"] == known


def test_what_eager_rejects_raises(device):
    x, rows = values(device, torch.float32, 3, 5), values(device, torch.float32, 4, 9)
    scripted = torch.jit.trace(lambda x, rows: torch.searchsorted(rows, x * 2.0) + 1, (x, rows[:3]))
    with tsfuser.fuser(), torch.no_grad(), pytest.raises(RuntimeError, match="first N-1 dimensions"):
        for given in (rows[:3], rows[:3], rows):
            scripted(x, given)
    for other in (rows.double(), rows.long()):
        scripted(x, rows[:3])
        try:
            expected = torch.searchsorted(other[:3], x * 2.0) + 1
        except RuntimeError:
            with pytest.raises(RuntimeError):
                scripted(x, other[:3])
        else:
            assert torch.equal(scripted(x, other[:3]), expected)


@pytest.mark.filterwarnings("ignore::tsfuser.TsfuserWarning")
def test_a_sorter_is_left_to_torch(device):
    def program(x, row, order):
        return torch.searchsorted(row, x * 2.0, sorter=order) + 1

    row = values(device, torch.float32, 9)
    given = values(device, torch.float32, 3, 5), row, row.sort()[1]
    assert torch.equal(torch.compile(program, backend="tsfuser")(*given), program(*given))
