"""Residual networks outside training: 16-bit results are as near to float64 as eager's.

The statistics of a batch norm that was never trained, a mean of 0 and a variance of 1, make it a product with
1 / sqrt(1 + eps), which is 1 in 16 bits. In float it is not, and decides how ties of the following sum are
rounded.
"""

import pytest
import torch

import tsfuser
from kit.support import groups, kinds, no_fallback, script

HALVES = [torch.float16, torch.bfloat16]
NORMS = {
    "batch_norm": "torch.batch_norm({0}, w, b, m, v, False, 0.1, 1e-5, True)",
    "instance_norm": "torch.instance_norm({0}, w, b, m, v, False, 0.1, 1e-5, True)",
    "native_batch_norm": "torch.native_batch_norm({0}, w, b, m, v, False, 0.1, 1e-5)[0]",
}


def untrained(channels, device, dtype):
    """Weight, bias, running mean and running variance of a batch norm."""
    return [torch.full([channels], value, device=device, dtype=dtype) for value in (1.0, 0.0, 0.0, 1.0)]


def fused(function, *inputs):
    """The results of a fused call, and the kinds of all groups."""
    with tsfuser.fuser(), no_fallback(), torch.no_grad():
        for _ in range(3):
            result = function(*inputs)
    return result, {kind for group in groups(function) for kind in kinds(group)}


@pytest.mark.each_value
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_residual_sum_behind_an_untrained_norm_is_rounded_as_eager_does(device, dtype, norm, parameters):
    source = f"def f(x, y, w, b, m, v):\n    return torch.relu({NORMS[norm].format('x')} + y)\n"
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 6, 16, 16, generator=generator).to(device, dtype) for _ in range(2))
    rest = untrained(6, device, parameters or dtype)
    result, found = fused(script(source), x, y, *rest)
    assert {"aten::add", f"aten::{norm}"} <= found
    assert torch.equal(result, script(source)(x, y, *rest))


STACK = f"""
def block(x, w, b, m, v, k):
    y = torch.relu({NORMS["batch_norm"].format("torch.conv2d(x, k)")})
    return torch.relu({NORMS["batch_norm"].format("torch.conv2d(y, k)")} + x)

def f(x, w, b, m, v, kernels: List[Tensor]):
    for k in kernels:
        x = block(x, w, b, m, v, k)
    return x
"""


@pytest.mark.parametrize("trained", [False, True])
def test_a_stack_of_blocks_is_as_near_to_float64_as_eagers(target, device, trained):
    generator = torch.Generator().manual_seed(0)
    kernels = [torch.randn(32, 32, 1, 1, generator=generator) * (2 / 32) ** 0.5 for _ in range(16)]
    parameters = untrained(32, "cpu", torch.float32)
    if trained:
        parameters = [p + torch.rand(32, generator=generator) - 0.5 for p in parameters]
    x = torch.randn(8, 32, 7, 7, generator=generator).relu()

    def of(dtype):
        return [
            x.to(device, dtype),
            *(p.to(device) for p in parameters),
            [k.to(device, dtype) for k in kernels],
        ]

    exact = script(STACK)(x.double(), *(p.double() for p in parameters), [k.double() for k in kernels])
    inputs = of(torch.bfloat16)
    result, found = fused(script(STACK), *inputs)
    assert {"aten::add", "aten::batch_norm"} <= found
    mine, eager = (
        ((y.double().cpu() - exact).norm() / exact.norm()).item() for y in (result, script(STACK)(*inputs))
    )
    assert mine <= 1.1 * eager
