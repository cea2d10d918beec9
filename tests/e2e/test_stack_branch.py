"""A stack of sources one of which lies the other way: each place reads the source that it is made of."""

import pytest
import torch

from kit.support import assert_matches, no_fallback

pytestmark = pytest.mark.usefixtures("forgotten")


def stacked(a, b, c):
    y = torch.stack((a, b.transpose(-2, -1), c)).permute(1, 3, 0, 2, 4).contiguous()
    return y, y.float().sum((0, 1))


@pytest.mark.parametrize("n, h, t, d", [(2, 3, 40, 64), (2, 2, 37, 24), (1, 3, 33, 7), (3, 1, 16, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values(device, n, h, t, d, dtype):
    torch.manual_seed(0)
    a, c = (torch.randn(n, h, t, d, dtype=dtype, device=device) for _ in range(2))
    b = torch.randn(n, h, d, t, dtype=dtype, device=device)
    with no_fallback():
        found = torch.compile(stacked, backend="tsfuser")(a, b, c)
    y, s = stacked(a, b, c)
    assert torch.equal(found[0], y)
    assert_matches(found[1], s, y.double().sum((0, 1)), ops=n * t)
