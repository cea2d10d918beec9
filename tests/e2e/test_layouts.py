"""Results lie in memory as eager's do, also where eager's rule is not that of elementwise ops."""

import pytest
import torch

from kit.support import fuse, groups, kinds, no_fallback, relevant_strides, script

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


#: Of `x`, expanded, in float, and `y`, transposed, in double. On the CPU eager casts `x` before it looks at
#: strides: the copy is not expanded, and decides; `where` and `float_power` cast it on each device.
PROMOTED = (
    "x + y", "y + x", "torch.add(x, y, alpha=2)", "torch.logaddexp(x, y)", "torch.maximum(x, y)", "x < y",
    "torch.logical_and(x, y)", "torch.atan2(x, y)", "torch.pow(x * x + 1, y)",
    "torch.float_power(x * x + 1, y)",
    "torch.addcmul(x, y, y)", "torch.clamp(x, y)", "torch.where(z > 2, x, y)", "torch.where(y > 2, x, y)",
    "torch.xlogy(x, y)", "h + x", "h * y", "x.to(torch.float64) + y", "x.clone() + y",
    "torch.ones_like(x) + y",
)  # fmt: skip


def test_operands_of_other_dtypes_decide_about_strides_as_in_eager(device):
    source = f"def f(x, y, h, z):\n    return ({', '.join(PROMOTED)})\n"
    x = torch.rand(1, 1, 8, 4, device=device).expand(33, 1, 8, 4)
    y = torch.rand(4, 8, 1, 33, device=device, dtype=torch.float64).permute(3, 2, 1, 0)
    given = x, y, x[:1].half().expand(33, 1, 8, 4), torch.rand((), device=device)
    space = {"torch": torch}
    exec(source, space)
    scripted = fuse(script(source), *given)
    with no_fallback():
        found = {case: t.stride() for case, t in zip(PROMOTED, scripted(*given))}
    assert found == {case: t.stride() for case, t in zip(PROMOTED, space["f"](*given))}
    assert len(groups(scripted)) == 1


@pytest.mark.parametrize("call", ["threshold_backward(g, x, 0.25)", "leaky_relu_backward(g, x, 0.1, False)"])
def test_a_gradient_lies_in_memory_as_what_decides_its_sign(device, call):
    source = f"def f(g, x):\n    return torch.ops.aten.{call} * 2.0\n"
    g, x = torch.randn(5, 7, device=device), torch.randn(7, 5, device=device).t()
    space = {"torch": torch}
    exec(source, space)
    scripted = fuse(script(source), g, x)
    with no_fallback():
        mine, plain = scripted(g, x), space["f"](g, x)
    assert groups(scripted) and mine.stride() == plain.stride() == x.stride()
    torch.testing.assert_close(mine, plain)


#: (sizes, strides): dims of size 1 whose strides are those of no dense tensor.
ODD = (((4, 5, 1), (5, 1, 7)), ((1, 5, 1, 3), (2, 3, 40, 1)), ((5, 1, 4), (8, 1, 2)), ((1, 3), (1, 2)))


@pytest.mark.parametrize("sizes, strides", ODD)
def test_dims_of_size_1_lie_as_in_eager_beside_numbers_and_in_copies(device, sizes, strides):
    cases = ("x + 1.5", "x * s", "torch.sigmoid(x)", "x.clone()", "x.double()", "torch.zeros_like(x)",
             "torch.clamp(x, 0.1, 0.9)", "torch.pow(x, 2)", "torch.sin(i)",
             "x.unsqueeze(-1).view(x.size(0), -1) + 1.5")  # fmt: skip
    source = f"def f(x, i, s: float):\n    return ({', '.join(cases)})\n"
    x = torch.rand(99, device=device).as_strided(sizes, strides)
    given = x, torch.ones(99, device=device, dtype=torch.int32).as_strided(sizes, strides), 0.5
    space = {"torch": torch}
    exec(source, space)
    scripted = fuse(script(source.replace("x, i,", "x: Tensor, i: Tensor,")), *given)
    with no_fallback():
        found = {case: t.stride() for case, t in zip(cases, scripted(*given))}
    assert groups(scripted)
    assert found == {case: t.stride() for case, t in zip(cases, space["f"](*given))}


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_rms_norm_keeps_channels_last(device, layout):
    x = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=layout)
    scripted = script("def f(x):\n    return torch.rms_norm(x + 1.0, [5], None, 0.25)\n")
    with no_fallback():
        mine, plain = fuse(scripted, x)(x), torch.rms_norm(x + 1.0, [5], None, 0.25)
    assert groups(scripted) and mine.stride() == plain.stride() == x.stride()
    torch.testing.assert_close(mine, plain)


def test_dims_of_size_1_have_eagers_strides_too(device):
    """They decide about the layout of later results: torch takes this one for channels-last."""
    x = torch.randn(1, 5, 6, 1, device=device).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    scripted = script("def f(x):\n    return torch.sigmoid(x) * 2.0\n")
    with no_fallback():
        mine, plain = fuse(scripted, x)(x), torch.sigmoid(x) * 2.0
    assert mine.stride() == plain.stride() != x.stride()
    assert torch.cat([mine, mine], 3).stride() == torch.cat([plain, plain], 3).stride()


@pytest.mark.parametrize("name", ["view_as", "reshape_as"])
def test_a_view_as_a_tensor_of_another_rank_is_fused(device, name):
    source = f"def f(x, y):\n    return x.{name}(y) + y\n"
    x, y = torch.rand(3, 4, device=device), torch.rand(2, 2, 3, device=device)
    scripted = fuse(script(source), x, y)
    assert [kinds(group) for group in groups(scripted)] == [[f"aten::{name}", "aten::add"]]
    assert torch.equal(scripted(x, y), x.view(2, 2, 3) + y)
