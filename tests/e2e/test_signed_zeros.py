"""The sign of a zero that an op chooses or makes is eager's.

Nothing is stated here where eager is not consistent on the CPU: where its vectorised loops differ from its
loops over single elements: of `maximum`, `minimum`, clamps between tensors, `lerp` of weight 1 and
`softshrink` the elements at the end of a tensor have other signs than those before. Of `amax`, `amin`, `max`
and `min` of a whole tensor the sign depends on the order in which eager combines the elements of a vector.
Of `fmax` and `fmin` in float16 eager returns the first operand or the second, by processor.
TorchScript takes the constants 0.0 and -0.0 of one graph for one, so no program here has both where it
matters.
"""

import pytest
import torch
from torch.nn import functional as F

from kit.support import fuse

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def bounded(x):
    """Eager's kernels for CUDA give 0 for the larger one of 0 and -0, those for the CPU the first one."""
    return (
        x.clamp(min=0.0), x.clamp(max=0.0), x.clamp(0.0, 3.0), x.clamp(-3.0, 0.0), x.clamp_min(0.0),
        x.clamp_max(0.0), F.hardtanh(x, 0.0, 3.0), F.hardtanh(x, -3.0, 0.0), torch.relu(x), F.relu6(x),
    )  # fmt: skip


def bounded_by_minus_zero(x):
    """By itself: TorchScript makes one constant of 0.0 and -0.0."""
    return (
        x.clamp(min=-0.0),
        x.clamp(max=-0.0),
        x.clamp(-3.0, -0.0),
        x.clamp_max(-0.0),
        F.hardtanh(x, -3.0, -0.0),
    )


def chosen(x):
    return (
        F.threshold(x, 0.0, 0.0), F.threshold(x, -1.0, 1.0), F.leaky_relu(x, 0.1),
        F.elu(x), F.celu(x), F.selu(x), torch.nan_to_num(x), F.hardshrink(x),
    )  # fmt: skip


def made(x):
    """Without gelu, for which oneDNN has a kernel for each kind of processor."""
    return (
        x.sign(), x.trunc(), x.round(), x.floor(), x.ceil(), x.frac(), -x, x + 0.0, x - 0.0,
        torch.rsub(x, 0.0), x * -2.0, x / -2.0, torch.remainder(x, 3.0),
        torch.remainder(x, -3.0), F.hardswish(x), F.silu(x), F.softsign(x),
    )  # fmt: skip


def of_two(x, y):
    return (
        torch.lerp(x, y, 0.25), torch.lerp(x, y, 0.75), torch.lerp(x, y, -0.0), torch.heaviside(x, y),
        torch.copysign(x, y), torch.atan2(x, y), x + y, x - y, x * y, torch.addcmul(x, x, y, value=-1),
        torch.add(x, y, alpha=-1), torch.where(x > 0, x, y),
    )  # fmt: skip


def number_of_two(x, y):
    return torch.fmax(x, y), torch.fmin(x, y)


def with_zero(x):
    y = x.clone()
    y[:, 3:5] = 0.0
    return (
        F.threshold(x, -1.0, 0.0), torch.where(x.signbit(), x, 0.0), x + 0.0, x - 0.0, torch.rsub(x, 0.0),
        x.masked_fill(x > 1.0, 0.0), F.pad(x, (1, 2), value=0.0), torch.full_like(x, 0.0) * 2.0, x * 0.0, y,
        torch.nan_to_num(x / x, 0.0), F.elu(x, 0.0), F.leaky_relu(x, 0.0), F.elu(x, -1.0), F.celu(x, -1.0),
    )  # fmt: skip


def with_minus_zero(x):
    y = x.clone()
    y[:, 3:5] = -0.0
    return (
        F.threshold(x, -1.0, -0.0), torch.where(x.signbit(), x, -0.0), x + -0.0, x - -0.0,
        torch.rsub(x, -0.0), x.masked_fill(x > 1.0, -0.0), F.pad(x, (1, 2), value=-0.0),
        torch.full_like(x, -0.0) * 2.0, x * -0.0, y, torch.nan_to_num(x / x, -0.0), F.elu(x, -0.0),
        F.leaky_relu(x, -0.0), F.elu(x, -1.0), F.celu(x, -1.0),
    )  # fmt: skip


def first_of_equal(x):
    return x.max(1).values, x.min(1).values, x.max(0).values, x.min(0).values, x.prod(1)


def signs(results):
    return [torch.signbit(r).cpu() for r in results]


def assert_signs_of_eager(function, *given):
    wanted = signs(function(*given))
    for door in (fuse(function, *given), torch.compile(function, backend="tsfuser")):
        found = signs(door(*given))
        wrong = [k for k, (ours, eager) in enumerate(zip(found, wanted)) if not torch.equal(ours, eager)]
        assert not wrong, f"results {wrong}"


def zeros(device, dtype, *shape):
    return torch.where(torch.rand(shape) < 0.5, 0.0, -0.0).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [bounded, bounded_by_minus_zero, chosen, made])
def test_an_op_gives_the_zero_that_eager_gives(function, dtype, device):
    assert_signs_of_eager(function, zeros(device, dtype, 3, 37))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_op_of_two_tensors_gives_the_zero_that_eager_gives(dtype, device):
    assert_signs_of_eager(of_two, zeros(device, dtype, 3, 37), zeros(device, dtype, 3, 37))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 37, 400])
def test_fmax_and_fmin_give_the_zero_that_eager_gives(length, dtype, device):
    assert_signs_of_eager(number_of_two, zeros(device, dtype, 3, length), zeros(device, dtype, 3, length))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_keeps_its_sign(dtype, device):
    """Also next to an equal program with the other zero."""
    x = zeros(device, dtype, 3, 37)
    x[0] = torch.randn(37)
    assert_signs_of_eager(with_zero, x)
    assert_signs_of_eager(with_minus_zero, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extremes_along_a_dim_are_the_first_of_equal_ones(dtype, device):
    if device != "cpu":
        pytest.skip("on CUDA the sign depends on the order in which eager's threads combine")
    assert_signs_of_eager(first_of_equal, zeros(device, dtype, 5, 9))


def test_nan_is_kept_by_bounds(device):
    nan = float("nan")
    x = torch.tensor([nan, -nan, 1.0, -1.0] * 9, device=device)
    for door in (fuse(bounded, x), torch.compile(bounded, backend="tsfuser")):
        for ours, eager in zip(door(x), bounded(x)):
            assert torch.equal(ours.isnan(), eager.isnan())
