"""Rows shorter than a memory access (`schedule/short_rows.py`): values are eager's for all dtypes, sizes,
strides and addresses; what a stack, a bias or a join makes of them."""

import re

import pytest
import torch

import tsfuser
from kit.support import fused_as_eager
from tsfuser.schedule import short_rows

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

ROTATED = (
    "torch.stack((x[..., ::2] * y - x[..., 1::2] * z, x[..., ::2] * z + x[..., 1::2] * y), -1).flatten(-2)"
)
PROGRAMS = {  # of x[2, 3, 5, 16], y and z[5, 8]
    "rotated": ROTATED,
    "halves": "torch.stack((x[..., :8] * y, x[..., 8:] + z), -1) * 2.0",
    "four": "torch.stack((x[..., :8] * y, x[..., 8:] + z, y.relu() + x[..., ::2], x[..., 1::2] * y), -1)",
    "joined": "torch.cat((torch.stack((x[..., :8] * y, x[..., 8:]), -1), x.unflatten(-1, (8, 2))), -2)",
    "shifted": "torch.stack((x[..., 2::2] * y[:, :7], x[..., 1:-1:2]), -1).relu()",
    "reversed": "torch.stack((x[..., 1::2] * y, x[..., ::2] * z), -1) + x.unflatten(-1, (8, 2)).relu()",
    "scaled": "x.unflatten(-1, (8, 2)) * y[0, :2] + z[:, :1, None]",
    "also in front": "torch.cat((torch.stack((x[..., ::2] * y, x[..., 1::2]), -1), "
    "(z * 2.0)[None, None, :, :, None]"
    ".expand(2, 3, 5, 8, 2)), 1)",
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def example(device, shape, dtype=torch.bfloat16):
    made = (torch.randn(s, dtype=torch.float64) * 4 for s in (shape, *[(shape[-2], shape[-1] // 2)] * 2))
    return [x.to(dtype).to(device) for x in made]


@pytest.mark.parametrize("program", PROGRAMS)
def test_values(program, device):
    fused_as_eager(PROGRAMS[program], *example(device, (2, 3, 5, 16)))


@pytest.mark.parametrize("shape", [(2, 4, 5, 16), (2, 1, 6, 8), (3, 2, 1, 64), (4, 3, 5, 8)])
def test_a_thread_may_have_several_rows_of_one_angle(shape, device, monkeypatch):
    """Large tensors make enough threads for that; here those of any size do."""
    monkeypatch.setattr(short_rows, "BUSY", 1 << 30)
    x, y, z = example(device, shape)
    fused_as_eager(ROTATED, x, y, z)
    fused_as_eager(ROTATED, x.transpose(1, 2).contiguous().transpose(1, 2), y, z)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64, torch.complex64, torch.int8, torch.bool]
)
def test_dtypes(dtype, device):
    text = ROTATED if dtype != torch.bool else "torch.stack((x[..., ::2] & y, x[..., 1::2] | z), -1)"
    fused_as_eager(text, *example(device, (2, 3, 5, 16), dtype))


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 5, 24), (2, 1, 5, 8), (1, 1, 1, 8), (3, 2, 3, 10), (2, 3, 1, 2), (0, 3, 5, 16), (2, 3, 5, 0)],
)
def test_sizes(shape, device):
    fused_as_eager(ROTATED, *example(device, shape))


def test_one_kernel_serves_other_sizes(device):
    x, y, z = example(device, (2, 3, 5, 16))
    scripted = fused_as_eager(ROTATED, x, y, z)
    for shape in ((4, 7, 9, 32), (1, 2, 3, 64), (2, 3, 5, 22)):
        fused_as_eager(ROTATED, *example(device, shape), scripted=scripted)


def test_strides_and_addresses(device):
    x, y, z = example(device, (2, 3, 5, 16))
    apart = torch.randn(2, 3, 5, 20, device=device).bfloat16()
    swapped = torch.randn(2, 5, 3, 16, device=device).bfloat16().transpose(1, 2)
    columns = torch.randn(2, 3, 16, 5, device=device).bfloat16().transpose(2, 3)
    for other in (apart[..., 4:], apart[..., 2:18], apart[..., 1:17], swapped, columns, x.flip(0)[:, :, :1]):
        fused_as_eager(ROTATED, other.expand(2, 3, 5, 16), y, z)
    fused_as_eager(ROTATED, x, torch.randn(5, 9, device=device).bfloat16()[:, 1:], z)
    fused_as_eager(ROTATED, x, y, torch.randn(8, 5, device=device).bfloat16().t())


def test_explain_says_which_loads_share_accesses(target, device):
    if target == "cpu":
        pytest.skip("a compiler makes the vectors")
    tensors = example(device, (2, 3, 5, 16))
    found = tsfuser.explain(fused_as_eager(ROTATED, *tensors), *tensors)
    [kernel] = found.kernels
    shared = r"short rows: row 2, group 4, unroll 1, .*parts \w+ \w+ [01], \w+ \w+ [01]"
    assert re.search(shared, str(kernel)), kernel
