"""On CUDA each float is rounded to floats of 8 bits as torch rounds it there: all bit patterns. A GPU from
compute capability 8.9 on does it by an instruction, whose saturation and NaN are not torch's."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tsfuser
from tsfuser.ir.dtypes import DTYPES

FLOAT8 = [getattr(torch, name) for name in DTYPES if name.startswith("float8")]
PART = 1 << 28

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


@pytest.mark.parametrize("to", FLOAT8)
def test_every_float(to):
    def program(bits):
        x = bits.view(torch.float32)
        return x.to(to), x.isnan()

    compiled = torch.compile(program, backend="tsfuser")
    for first in range(-(2**31), 2**31, PART):
        bits = torch.arange(first, first + PART, dtype=torch.int32, device="cuda")
        ours, nan = compiled(bits)
        theirs = bits.view(torch.float32).to(to)
        wrong = (ours.view(torch.uint8) != theirs.view(torch.uint8)).nonzero().flatten()
        assert not len(wrong), [(hex(bits[i]), ours[i], theirs[i]) for i in wrong[:5]]
    assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"]


@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("to", FLOAT8)
def test_every_float_of_16_bits(to, wide):
    def program(x):
        return x.to(to), x.isnan()

    x = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(wide)
    ours, _ = torch.compile(program, backend="tsfuser")(x)
    assert tsfuser.stats()["launches"] and not tsfuser.stats()["fallbacks"]
    assert torch.equal(ours.view(torch.uint8), x.to(to).view(torch.uint8))
