"""Results lie in memory as eager's do, also where eager's rule is not that of elementwise ops."""

import pytest
import torch
from support import fuse, groups, kinds, no_fallback, relevant_strides, script

CASES = (
    "(x * 2).masked_fill(x > 0.5, 1.0) + 0", "torch.pow(2.0, x * 2)", "torch.float_power(2.0, x * 2)",
    "torch.nn.functional.logsigmoid(x * 2)", "torch.erfc(v.expand(1, 3, 2, 2)) * 2",
    "torch.erfc(v.expand_as(w)) * 2", "torch.exp(v.expand(3, 2)) * 2",
    "torch.exp(w[0, 0, 0, 0].expand(2, 2)) * 2",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_strides_are_those_of_eager(device, case):
    source = f"def f(x, v, w):\n    return {case}\n"
    x, v = torch.rand(5, 3, device=device).t(), torch.rand(2, device=device)
    given = (x, v, torch.rand(1, 3, 2, 2, device=device))
    scripted, space = fuse(script(source), *given), {"torch": torch}
    exec(source, space)
    with no_fallback():
        mine, plain = scripted(*given), space["f"](*given)
    assert groups(scripted)
    assert relevant_strides(mine) == relevant_strides(plain)
    torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("name", ["view_as", "reshape_as"])
def test_a_view_as_a_tensor_of_another_rank_is_fused(device, name):
    source = f"def f(x, y):\n    return x.{name}(y) + y\n"
    x, y = torch.rand(3, 4, device=device), torch.rand(2, 2, 3, device=device)
    scripted = fuse(script(source), x, y)
    assert [kinds(group) for group in groups(scripted)] == [[f"aten::{name}", "aten::add"]]
    assert torch.equal(scripted(x, y), x.view(2, 2, 3) + y)
