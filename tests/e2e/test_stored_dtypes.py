"""Dtypes in which torch has no arithmetic, or not on all devices: unsigned integers, floats of 8 bits, packed
floats of 4 bits. In groups they are inputs, results and casts, bit for bit as in eager; what eager cannot do
with them raises as in eager."""

import itertools

import pytest
import torch

import tsfuser
from kit.support import fuse, groups, kinds, no_fallback
from tsfuser.ir.dtypes import DTYPES

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu
)  # fmt: skip
STORED = UNSIGNED + FLOAT8
SOME = (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e8m0fnu)

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


def compiled(function, *args):
    """What a compiled function gives, all of whose ops are fused, without a call that runs unfused."""
    tsfuser.reset()
    made = torch.compile(function, backend="tsfuser", dynamic=False)
    result, stats = made(*args), tsfuser.stats()
    assert stats["launches"] and not stats["fallbacks"], stats
    assert ", 0 not fused" in str(tsfuser.explain(made, *args))
    return result


def bits(x):
    """All bytes of a tensor."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours, theirs):
    ours, theirs = (x if isinstance(x, (tuple, list)) else (x,) for x in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(bits(a), bits(b))


def values(dtype, device, rows=12, columns=64):
    """All patterns of 8 bits, or as many random numbers of all sizes."""
    count = rows * columns
    if dtype.itemsize == 1:
        made = torch.arange(count, device=device).to(torch.uint8).view(dtype)
    else:
        wide = torch.randint(0, 2**62, (count,), generator=torch.Generator().manual_seed(1))
        made = (wide >> torch.arange(count) % 63).to(dtype).to(device)
    return made.view(rows, columns)


def numbers(device, dtype=torch.float32):
    """Numbers of all sizes up to 2**15, none negative, so that every dtype has them or rounds them."""
    made = torch.rand(12, 64, generator=torch.Generator().manual_seed(2)) * 2.0 ** (torch.arange(64) % 24 - 8)
    return made.to(dtype).to(device)


@pytest.mark.parametrize("dtype", STORED)
def test_casts_from_and_to_other_dtypes(dtype, device):
    def program(x, y):
        return x.to(torch.float32) * 2.0, x.to(torch.int32), x.to(torch.float64), (y + 1.0).to(dtype)

    x, y = values(dtype, device), numbers(device)
    assert_same(compiled(program, x, y), program(x, y))


@pytest.mark.parametrize("dtype", SOME)
def test_copies_keep_every_bit(dtype, device):
    def program(x, y):
        made = (y * 2.0).to(dtype)
        return torch.cat([x, made[:, :5]], 1), made.t().contiguous()

    x, y = values(dtype, device), numbers(device)
    try:
        theirs = program(x, y)
    except NotImplementedError as error:  # torch 2.11 on CUDA, of one dtype
        pytest.skip(str(error))
    assert_same(compiled(program, x, y), theirs)


@pytest.mark.parametrize("dtype", SOME)
def test_numbers_become_elements(dtype, device):
    """Fillings and paddings, rounded as eager rounds them."""

    def program(x, y):
        padded = torch.nn.functional.pad(x, (1, 2), value=2.0)
        return (
            padded.to(torch.float32) + 1.0,
            y + 1.0,
            torch.full_like(y, 3.3, dtype=dtype).to(torch.float32) * y,
        )

    x, y = values(dtype, device), numbers(device)
    assert_same(compiled(program, x, y), program(x, y))


@pytest.mark.parametrize("number", [1e9, -1e9])
def test_a_number_beyond_a_dtype_raises_as_in_eager(number, device):
    def program(x):
        return torch.full_like(x, number, dtype=torch.float8_e4m3fn).to(torch.float32) + x

    x = numbers(device)
    expected, found = (error_of(f, x) for f in (program, torch.compile(program, backend="tsfuser")))
    assert "without overflow" in str(expected) and "without overflow" in str(found)


@pytest.mark.parametrize("dtype", SOME)
def test_comparisons_for_equality(dtype, device):
    def program(x, y):
        return (x == y) | (x != 2), x.isnan()

    x, y = (
        values(dtype, device),
        values(dtype, device).flip(0) if dtype.itemsize > 1 else values(dtype, device),
    )
    assert_same(compiled(program, x, y), program(x, y))


@pytest.mark.parametrize("dtype", FLOAT8[:2])
def test_a_choice_of_floats_of_8_bits(dtype, device):
    def program(x, y):
        return torch.where(y > 1.0, x, 2.0), torch.where(y > 1.0, x, x.t().contiguous().t())

    x, y = values(dtype, device), numbers(device)
    assert_same(compiled(program, x, y), program(x, y))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_result_that_is_cast_back_is_rounded(dtype, device):
    """As its reader sees it in eager, not as it was computed."""

    def program(x):
        rounded = (x * 3.0).to(dtype)
        return rounded, rounded.to(torch.float32) - x

    x = numbers(device)
    assert_same(compiled(program, x), program(x))


@pytest.mark.parametrize("dtype", (*FLOAT8, torch.float4_e2m1fn_x2))
def test_bits_of_a_byte(dtype, device):
    """`view(dtype)` of a value that is computed in the group, and of one that is read."""

    def program(x, y):
        made = ((y * 10.0).to(torch.uint8) | 1).view(dtype)
        return x.view(torch.uint8) + 1, made.view(torch.int8) >> 1

    x, y = values(dtype, device), numbers(device) / 2.0**12
    assert_same(compiled(program, x, y), program(x, y))


@pytest.mark.parametrize("wide, narrow", [(torch.float32, torch.uint32), (torch.float64, torch.uint64)])
def test_bits_of_a_computed_float(wide, narrow, device):
    def program(x):
        return (x * 3.0).view(narrow).to(torch.int64) >> 20

    x = numbers(device, wide)
    assert_same(compiled(program, x), program(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_as_a_float_of_16_bits(dtype, device):
    """All patterns, of which groups compute the lowest bit."""

    def program(x):
        return (x | 1).view(dtype).to(torch.float32) * 2.0

    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(256, 256)
    ours, theirs = compiled(program, x), program(x)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint32])
def test_gradients_go_through_casts(dtype, device):
    """The backward casts the gradient, too, as in eager."""

    def program(x):
        return (x * 2.0).to(dtype).to(torch.float32) * x

    x = numbers(device).requires_grad_()
    gradients = [
        torch.autograd.grad(f(x).sum(), x)[0] for f in (program, torch.compile(program, backend="tsfuser"))
    ]
    assert_same(*gradients)
    assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"]


@pytest.mark.parametrize("dtype", SOME)
def test_odd_sizes_and_layouts(dtype, device):
    """No element, one, an odd number; transposed, expanded and with gaps."""

    def program(x, y):
        return x.to(torch.float32) + y, (y + 1.0).to(dtype)

    made = torch.compile(program, backend="tsfuser", dynamic=True)
    whole, other = values(dtype, device), numbers(device)
    for take in (
        lambda t: t[:0], lambda t: t[:1, :1], lambda t: t[:7, 3:20], lambda t: t.t(), lambda t: t[:, ::3],
        lambda t: t[:1].expand(5, 64), lambda t: t[0, 0],
    ):  # fmt: skip
        assert_same(made(take(whole), take(other)), program(take(whole), take(other)))
    assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"]


@pytest.mark.parametrize("dtype", (torch.uint64, torch.float8_e4m3fn, torch.float4_e2m1fn_x2))
def test_check_compares_them(dtype, device):
    def program(x):
        y = torch.sigmoid(x * 3.0) * 9.0
        return y.to(torch.uint8).view(dtype) if dtype == torch.float4_e2m1fn_x2 else y.to(dtype)

    made = torch.compile(program, backend="tsfuser")
    report = tsfuser.check(made, numbers(device))
    assert report.compared and report.difference is None


@pytest.mark.parametrize("dtype", SOME)
def test_scripted_casts(dtype, device):
    def program(x, y, dtype: int):
        return torch.relu(x.to(torch.float32) + 1.0), (y * 2.0).to(dtype)

    code = DTYPES[str(dtype)[6:]].code
    x, y = values(dtype, device), numbers(device)
    with no_fallback():
        scripted = fuse(program, x, y, code)
    assert_same(scripted(x, y, code), program(x, y, dtype))
    assert sum(kinds(group).count("aten::to") for group in groups(scripted)) == 2


def error_of(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("dtype", (torch.uint32, torch.float8_e4m3fn, torch.float8_e8m0fnu))
def test_what_eager_cannot_do_raises_as_in_eager(dtype, device):
    x = values(dtype, device)
    programs = (
        lambda x: x + x,
        lambda x: x * 2 - 1,
        lambda x: x < x,
        lambda x: x.clamp(0, 1),
        lambda x: x.amax(1),
    )
    for program in programs:
        expected, found = (error_of(f, x) for f in (program, torch.compile(program, backend="tsfuser")))
        assert str(expected).splitlines()[0] in str(found)


@pytest.mark.parametrize("dtype", SOME)
def test_no_common_dtype(dtype, device):
    x = values(dtype, device)
    for other in (torch.float32, torch.int64, torch.float8_e5m2):
        y = torch.ones(12, 64, device=device).to(other)
        try:
            expected = torch.where(x == x, x, y)
        except RuntimeError:
            error_of(torch.compile(lambda x, y: torch.where(x == x, x, y), backend="tsfuser"), x, y)
        else:
            assert_same(
                torch.compile(lambda x, y: torch.where(x == x, x, y), backend="tsfuser")(x, y), expected
            )


def test_promotion_is_torchs():
    from tsfuser.errors import Refusal
    from tsfuser.ir.dtypes import promote

    known = [d for d in DTYPES.values() if d.converts]
    for a, b in itertools.product(known, known):
        try:
            expected = torch.promote_types(getattr(torch, a.name), getattr(torch, b.name))
        except RuntimeError:
            with pytest.raises(Refusal):
                promote(a, b)
        else:
            assert promote(a, b).name == str(expected)[6:]
