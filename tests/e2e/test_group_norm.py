"""Group norm and its derivative, against eager and against eager in double: channels that are split into
groups, and put together again."""

import pytest
import torch

from kit.reductions import Fused, check, tensor
from kit.support import counted

pytestmark = pytest.mark.usefixtures("single_nodes")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FORWARD = """
def f(x, w, b, groups: int):
    y = torch.group_norm(x * 2.0, groups, w, b, 1e-5)
    z, mean, rstd = torch.native_group_norm(x, w, b, x.size(0), x.size(1),
                                            x.numel() // (x.size(0) * x.size(1)), groups, 1e-5)
    return torch.relu(y) + x, z, mean, rstd
"""
BACKWARD = """
def f(dy, x, w, mean, rstd, groups: int, mask: List[bool]):
    n, c = x.size(0), x.size(1)
    a, b, c = torch.ops.aten.native_group_norm_backward(dy * 2.0, x, mean, rstd, w, n, c,
                                                        x.numel() // (n * c), groups, mask)
    return a, b, c
"""


def inputs(*sizes, device="cpu", dtype=torch.float32, memory_format=torch.contiguous_format):
    x = tensor(*sizes, device=device, dtype=dtype).contiguous(memory_format=memory_format)
    return x, *(tensor(sizes[1], device=device, dtype=dtype, seed=k) for k in (1, 2))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_any_number_of_groups(target, device, memory_format):
    if target == "cuda" and memory_format == torch.channels_last:
        pytest.skip("eager leaves another memory format there")
    function = Fused(FORWARD)
    for groups in (2, 6) if target == "cpu-fibers" else (1, 2, 3, 6):
        check(function, *inputs(4, 6, 5, 7, device=device, memory_format=memory_format), groups)
    assert {"aten::group_norm", "aten::native_group_norm"} <= function.kinds


@pytest.mark.parametrize(
    "sizes, groups",
    [((5, 4), 2), ((1, 1, 3), 1), ((3, 4, 1), 4), ((2, 66, 17), 33), ((2, 4, 3, 1, 5), 2)],
    ids=str,
)
def test_sizes(target, device, sizes, groups):
    if target == "cpu-fibers" and groups != 33:
        pytest.skip("on the other targets")
    check(Fused(FORWARD), *inputs(*sizes, device=device), groups)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dtypes(dtype):
    x, w, b = inputs(3, 6, 11, dtype=dtype)
    check(Fused(FORWARD), x, w, b, 3)
    if dtype.itemsize == 2:
        check(Fused(FORWARD), x, w.float(), b.float(), 3)


@pytest.mark.parametrize("name", ["permuted", "sliced", "expanded"])
def test_layouts(name):
    x = {
        "permuted": tensor(4, 5, 6, 3).permute(2, 0, 1, 3),
        "sliced": tensor(4, 8, 5, 12)[:, ::2, :, ::2],
        "expanded": tensor(4, 1, 5, 6).expand(4, 4, 5, 6),
    }[name]
    source = (
        "def f(x, w, b):\n    return torch.group_norm(x, 2, w, b, 1e-5), torch.group_norm(x, 2), x * 2.0\n"
    )
    check(Fused(source), x, *(tensor(4, seed=k) for k in (1, 2)))


def test_channels_are_split_for_everything_in_the_group(device):
    """What else runs over the channels: softmax and sums along them, another norm, a tensor of one number a
    channel."""
    source = """
def f(x, w, b):
    y = torch.group_norm(x, 3, w, b, 1e-5)
    z = torch.group_norm(y * x, 3)
    c = w * b + 1.0
    return torch.softmax(y, 1), torch.sum(z, [1]), torch.sum(z + y, [0, 2]) * c, c
"""
    check(Fused(source), *inputs(4, 6, 5, device=device), ops=64)


def test_a_new_number_of_channels_is_not_compiled_again():
    function = Fused("def f(x, w, b):\n    return torch.relu(torch.group_norm(x, 4, w, b, 1e-5)) + x\n")
    check(function, *inputs(4, 8, 4, 8))
    check(function, *inputs(4, 24, 4, 8))
    with counted() as rise:
        for channels in (16, 40, 32):
            check(function, *inputs(4, channels, 4, 8))
    assert rise["kernels_compiled"] == 0


def test_groups_that_do_not_fit_together_meet_in_memory(device):
    source = (
        "def f(x, w, b):\n    return torch.group_norm(torch.group_norm(x, 2, w, b, 1e-5) * 2.0, 3, "
        "w, b, 1e-5) + x\n"
    )
    check(Fused(source), *inputs(4, 6, 5, device=device), ops=64)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients(target, device, memory_format):
    if target != "cpu" and memory_format == torch.channels_last:
        pytest.skip("eager leaves another memory format there")
    x, w, _ = inputs(4, 6, 5, 7, device=device, memory_format=memory_format)
    dy = tensor(4, 6, 5, 7, device=device, seed=5).contiguous(memory_format=memory_format)
    for groups in (2, 6):
        _, mean, rstd = torch.native_group_norm(x, w, None, 4, 6, 35, groups, 1e-5)
        check(Fused(BACKWARD), dy, x, w, mean, rstd, groups, [True, True, True], ops=64)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_in_other_dtypes(dtype):
    x, w, _ = inputs(3, 6, 11, dtype=dtype)
    for weight in (w, w.float()) if dtype.itemsize == 2 else (w,):
        _, mean, rstd = torch.native_group_norm(x, weight, None, 3, 6, 11, 3, 1e-5)
        check(
            Fused(BACKWARD),
            tensor(3, 6, 11, dtype=dtype, seed=5),
            x,
            weight,
            mean,
            rstd,
            3,
            [True, True, True],
            ops=64,
        )
