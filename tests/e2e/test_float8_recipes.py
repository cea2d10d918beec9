"""Recipes that scale tensors to floats of 8 bits (examples/float8.py): the largest magnitudes, the scales and
the casts are one kernel, with the bits of eager."""

import importlib.util

import pytest
import torch

import tsfuser
from kit.support import ROOT, fuse, groups, kinds

_spec = importlib.util.spec_from_file_location("float8", ROOT / "examples" / "float8.py")
float8 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(float8)

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


def sample(device, dtype=torch.bfloat16):
    """Rows of all magnitudes, one of zeros and one with what is not finite."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(7))
    x *= 2.0 ** (torch.arange(128) % 40 - 20)[:, None]
    x[5] = 0.0
    return x.to(dtype).to(device)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def in_one_kernel(function, target, *args):
    """What a later call returns, which launches one kernel. For a block of the CPU, which is one thread,
    squares and results in two orders are two."""
    tsfuser.reset()
    result, stats = function(*args), tsfuser.stats()
    assert not stats["fallbacks"] and stats["launches"] <= (2 if target == "cpu" else 1), stats
    return result


@pytest.mark.parametrize("recipe", float8.RECIPES, ids=lambda r: r.__name__)
def test_a_compiled_recipe_is_one_kernel(recipe, target, device):
    x = sample(device)
    compiled = torch.compile(recipe, backend="tsfuser")
    compiled(x)
    assert_same(in_one_kernel(compiled, target, x), recipe(x))


@pytest.mark.parametrize("recipe", float8.SCRIPTED, ids=lambda r: r.__name__)
def test_a_scripted_recipe_is_one_kernel(recipe, target, device):
    x = sample(device)
    scripted = fuse(recipe, x)
    with tsfuser.fuser():
        assert_same(in_one_kernel(scripted, target, x), recipe(x))
    made = {kind for group in groups(scripted) for kind in kinds(group)}
    assert {"aten::abs", "aten::amax", "aten::to"} <= made
    assert ("aten::clone" in made) is (recipe is float8.tensorwise_both)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes(dtype, target, device):
    x = sample(device, dtype)
    for recipe in (float8.rowwise, float8.mx):
        compiled = torch.compile(recipe, backend="tsfuser")
        compiled(x)
        assert_same(in_one_kernel(compiled, target, x), recipe(x))


def test_numbers_that_are_not_finite(device):
    x = sample(device)
    x[3, 7], x[4, 8], x[9, 200] = float("inf"), float("nan"), -float("inf")
    for recipe in (float8.rowwise, float8.blocks_of_128, float8.mx):
        assert_same(torch.compile(recipe, backend="tsfuser")(x), recipe(x))


def test_the_power_below_by_a_cast_or_by_bits():
    x = sample("cpu", torch.float32)
    assert_same(float8.mx(x), float8.mx_by_bits(x))


def test_a_product_of_matrices_takes_them(device):
    """What a recipe returns is what `torch._scaled_mm` wants: near to the product of the operands."""
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch has that product on GPUs from compute capability 8.9 on")
    a, b = (torch.randn(64, 256, device=device, dtype=torch.bfloat16) for _ in "ab")
    compiled = torch.compile(float8.tensorwise, backend="tsfuser")
    (x, x_scale), (y, y_scale) = compiled(a), compiled(b)
    product = torch._scaled_mm(x, y.t(), scale_a=x_scale, scale_b=y_scale, out_dtype=torch.float32)
    exact = a.double() @ b.double().t()
    assert (product.double() - exact).norm() / exact.norm() < 2.0**-4
