"""What pads by nothing, or slices all, copies nothing (csrc_stubs/torchscript/whole_parts.cpp)."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import profile

import tsfuser
from kit.support import fresh

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

COPIES = {"aten::constant_pad_nd", "aten::slice_backward"}


def windows(x: Tensor, k: int, shift: bool) -> Tensor:
    """Pads to a multiple of `k` rows, and cuts what was padded."""
    h = x.shape[1]
    y = F.pad(torch.sigmoid(x) * 2.0, (0, 0, 0, (k - h % k) % k))
    if shift:
        y = torch.roll(y, 1, 1)
    z = torch.tanh(y * 3.0)
    if shift:
        z = torch.roll(z, -1, 1)
    return torch.sin(z[:, :h, :].contiguous() + 1.0)


def padded_then_written(x: Tensor, k: int, shift: bool) -> Tensor:
    y = torch.sigmoid(x) * 2.0
    z = F.pad(y, (0, k - 4))
    if shift:
        z.mul_(3.0)
    return torch.sin(y) + z.sum()


def written_then_read(x: Tensor, k: int, shift: bool) -> Tensor:
    y = torch.sigmoid(x) * 2.0
    z = F.pad(y, (0, k - 4))
    if shift:
        y.mul_(3.0)
    return torch.sin(z) + y.sum()


def written_by_another_name(x: Tensor, k: int, shift: bool) -> Tensor:
    """`type_as` hands its operand on, which its schema does not say."""
    y = torch.sigmoid(x) * 2.0
    z = F.pad(y, (0, k - 4))
    s = z.type_as(x)
    if shift:
        s.mul_(3.0)
    return torch.sin(y) + z.sum() + s.sum()


def returned(x: Tensor, k: int, shift: bool) -> tuple[Tensor, Tensor]:
    y = torch.sigmoid(x) * 2.0
    return y, F.pad(y, (0, k - 4))


def gaps(x: Tensor, k: int, shift: bool) -> Tensor:
    y = F.pad((torch.sigmoid(x) * 2.0)[:, ::2], (0, k - 4))
    if shift:
        y = torch.roll(y, 1, 1)
    return y.view(-1) * 2.0


def without_gradients(x: Tensor, k: int, shift: bool) -> Tensor:
    y = torch.sigmoid(x) * 2.0
    with torch.no_grad():
        z = F.pad(y, (0, k - 4))[:, :, :4]
    return y * z


def ran(function, x, k, shift, trained):
    x = x.clone().requires_grad_(trained)
    out = function(x, k, shift)
    outs = list(out) if isinstance(out, tuple) else [out]
    if trained:
        sum((o * o).sum() for o in outs).backward()
    pointers = {o.data_ptr() for o in outs}
    return [*(o.detach() for o in outs), *([x.grad] if trained else [])], len(pointers) == len(outs)


PROGRAMS = [windows, padded_then_written, written_then_read, returned, gaps, without_gradients]


@pytest.mark.parametrize(
    "function, trained", [*product(PROGRAMS, [False, True]), (written_by_another_name, False)]
)
def test_results_are_those_of_eager(device, function, trained):
    torch.manual_seed(0)
    made = fresh(function)
    with tsfuser.fuser():
        for shift, k, rows in [(False, 4, 8)] * 3 + [(True, 4, 8), (False, 5, 8), (True, 5, 7)]:
            x = torch.randn(3, rows, 4, device=device)
            found, apart = ran(made, x, k, shift, trained)
            expected, _ = ran(function, x, k, shift, trained)
            assert apart
            for a, b in zip(found, expected):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b)


def test_nothing_is_copied_where_nothing_is_padded(device):
    made = fresh(windows)
    with tsfuser.fuser():
        for _ in range(3):
            ran(made, torch.randn(3, 8, 4, device=device), 4, True, True)
        with profile() as seen:
            ran(made, torch.randn(3, 8, 4, device=device), 4, True, True)
        assert not COPIES & {event.name for event in seen.events()}
        x = torch.randn(3, 7, 4, device=device)
        with profile() as seen:
            found, _ = ran(made, x, 4, True, True)
        assert not COPIES & {event.name for event in seen.events()}  # the group pads
    for a, b in zip(found, ran(windows, x, 4, True, True)[0]):
        torch.testing.assert_close(a, b)


def all_of_two_dims(x):
    return torch.sigmoid(torch.relu(x * 2)[:, :]) + 1


def test_a_slice_of_a_dim_that_is_not_there_raises():
    scripted = fresh(all_of_two_dims)
    with tsfuser.fuser():
        for _ in range(4):
            scripted(torch.randn(4, 5))
        with pytest.raises((IndexError, RuntimeError), match="Dimension out of range"):
            scripted(torch.randn(5))
