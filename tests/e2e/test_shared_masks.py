"""Attentions that share a mask of bools share what is made of it (csrc_stubs/torchscript/shared_masks.cpp):
results and gradients are eager's, bit for bit, whatever the mask is."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, script, train

pytestmark = [pytest.mark.graphs, pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
TWICE = f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    y = {ATTENTION}(q, k, v, attn_mask=m)
    return {ATTENTION}(torch.tanh(y), k, v, attn_mask=m)
"""
#: What keeps the attentions from sharing.
APART = {
    "one attention": f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    return {ATTENTION}(torch.tanh(q), k, v, attn_mask=m)
""",
    "other masks": f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    y = {ATTENTION}(q, k, v, attn_mask=m)
    return {ATTENTION}(torch.tanh(y), k, v, attn_mask=m.logical_not())
""",
    "written between": f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    m = m.clone()
    y = {ATTENTION}(q, k, v, attn_mask=m)
    m[0] = True
    return {ATTENTION}(torch.tanh(y), k, v, attn_mask=m)
""",
    "written by another name": f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    m = m.clone()
    row = m[0]
    y = {ATTENTION}(q, k, v, attn_mask=m)
    row.fill_(True)
    return {ATTENTION}(torch.tanh(y), k, v, attn_mask=m)
""",
    "no mask": f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    y = {ATTENTION}(q, k, v)
    return {ATTENTION}(torch.tanh(y), k, v) + m.sum()
""",
}


def operands(device, dtype=torch.float32, rows=5, keys=7, width=16):
    generator = torch.Generator().manual_seed(rows * keys)
    sizes = [(2, 3, n, width) for n in (rows, keys, keys)]
    return [torch.randn(s, generator=generator).to(device, dtype) for s in sizes]


def masks(device, rows=5, keys=7):
    """Name -> a mask; with rows of which nothing is left, and others of which all is."""
    generator = torch.Generator().manual_seed(7)
    flags = torch.rand(2, 3, rows, keys, generator=generator) < 0.6
    flags[:, :, 0] = False
    flags[:, 0, -1] = True
    wide = flags.to(device)
    return {
        "whole": wide,
        "matrix": wide[0, 0],
        "one head": wide[:, :1],
        "expanded": wide[:1, :1].expand(2, 3, rows, keys),
        "of keys": wide[:, :1, -1:],
        "transposed": wide.transpose(2, 3).contiguous().transpose(2, 3),
        "numbers": wide.float().mul(-2.5),
        "all": torch.ones_like(wide),
        "nothing": torch.zeros_like(wide),
    }


def is_shared(scripted, inputs):
    text = str(scripted.graph_for(*inputs))
    counts = [text.count(f"tsfuser::{name}") for name in ("additive_mask", "mask_of_attention")]
    assert counts in ([0, 0], [1, 2])
    return counts[0] == 1


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", masks("cpu"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_results(device, name, dtype):
    eager, scripted = plain(TWICE), script(TWICE)
    with tsfuser.fuser():
        for rows, keys in [(5, 7)] * 3 + [(1, 1), (16, 3), (5, 7)]:
            mask = masks(device, rows, keys)[name]
            inputs = operands(device, dtype, rows, keys)
            mask = mask.to(dtype) if mask.is_floating_point() else mask
            assert_same(scripted(*inputs, mask), eager(*inputs, mask))
        assert is_shared(scripted, (*inputs, mask))


@pytest.mark.parametrize("name", ["whole", "expanded", "numbers", "nothing"])
def test_training(device, name):
    eager, scripted = plain(TWICE), script(TWICE)
    with tsfuser.fuser():
        mask = masks(device)[name]
        inputs = [x.requires_grad_() for x in operands(device)]
        out, gradients = train(lambda *xs: scripted(*xs, mask), inputs)
        want, expected = train(lambda *xs: eager(*xs, mask), inputs, calls=1)
        for found in zip([out, *gradients], [want, *expected]):
            assert_matches(*found, found[1].double(), ops=100)
        assert is_shared(scripted, (*inputs, mask))


def test_a_group_makes_it(device):
    source = f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor, n: Tensor):
    both = (m > 0.3) & (n > 0.4)
    y = {ATTENTION}(q, k, v, attn_mask=both)
    return {ATTENTION}(torch.tanh(y), k, v, attn_mask=both)
"""
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser():
        inputs = [*operands(device), torch.rand(5, 7, device=device), torch.rand(7, device=device)]
        for _ in range(4):
            assert_same(scripted(*inputs), eager(*inputs))
        text = str(scripted.graph_for(*inputs))
    assert text.index("with prim::CudaFusionGroup") < text.index("tsfuser::additive_mask")


@pytest.mark.parametrize("name", APART)
def test_apart(device, name):
    eager, scripted = plain(APART[name]), script(APART[name])
    with tsfuser.fuser():
        inputs = [*operands(device), masks(device)["matrix"]]
        for _ in range(4):
            assert_same(scripted(*inputs), eager(*inputs))
        assert not is_shared(scripted, inputs)


def test_the_mask_may_be_written_before_the_backward(device):
    """Eager saves what it has made of the mask."""
    eager, scripted = plain(TWICE), script(TWICE)
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (scripted, eager):
                inputs = [x.requires_grad_() for x in operands(device)]
                mask = masks(device)["whole"].clone()
                out = function(*inputs, mask)
                mask.fill_(True)
                out.sum().backward()
                found.append([out.detach(), *(x.grad for x in inputs)])
            for mine, its in zip(*found):
                assert_matches(mine, its, its.double(), ops=100)


def test_under_autocast(device):
    eager, scripted = plain(TWICE), script(TWICE)
    inputs = [*operands(device), masks(device)["whole"]]
    with tsfuser.fuser(), torch.autocast(torch.device(device).type, torch.bfloat16):
        for _ in range(4):
            assert_same(scripted(*inputs), eager(*inputs))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, 6, dtype=torch.bool),
        torch.ones(5, 7, dtype=torch.int64),
        torch.ones(5, 7, dtype=torch.float64),
    ],
    ids=["sizes", "integers", "dtype"],
)
def test_rejected(device, mask):
    """What eager rejects, in the first call and in later ones."""
    eager, scripted = plain(TWICE), script(TWICE)
    inputs, good, bad = operands(device), masks(device)["matrix"], mask.to(device)
    with tsfuser.fuser():
        for given in (bad, good, good, good, bad):
            if given is good:
                assert_same(scripted(*inputs, given), eager(*inputs, given))
                continue
            with pytest.raises(RuntimeError):
                eager(*inputs, given)
            with pytest.raises(RuntimeError):
                scripted(*inputs, given)


def test_tensors_without_data():
    """Of a device that has no autocast."""
    eager, scripted = plain(TWICE), script(TWICE)
    inputs = [*operands("cpu"), masks("cpu")["matrix"]]
    with tsfuser.fuser():
        for device in ("meta", "cpu", "cpu", "cpu", "meta"):
            given = [x.to(device) for x in inputs]
            found, expected = scripted(*given), eager(*given)
            assert found.device == expected.device and found.shape == expected.shape


def test_grouped_heads_and_a_scale(device):
    source = f"""def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    y = {ATTENTION}(q, k, v, attn_mask=m, scale=0.3, enable_gqa=True)
    return {ATTENTION}(torch.tanh(y), k, v, attn_mask=m, scale=0.3, enable_gqa=True)
"""
    eager, scripted = plain(source), script(source)
    q, k, v = operands(device)
    with tsfuser.fuser():
        for name in ("whole", "matrix"):
            inputs = [q, k[:, :1], v[:, :1], masks(device)[name]]
            for _ in range(4):
                assert_same(scripted(*inputs), eager(*inputs))
            assert is_shared(scripted, inputs)


def test_the_state_of_the_generator_is_left(device):
    """How torch converts masks is found out without random numbers."""
    scripted, inputs = script(TWICE), [*operands(device, torch.bfloat16), masks(device)["whole"]]
    with tsfuser.fuser():
        torch.manual_seed(3)
        scripted(*inputs)
        after = torch.rand(3), torch.rand(3, device=device)
        torch.manual_seed(3)
        assert_same(after[0], torch.rand(3))
        assert_same(after[1], torch.rand(3, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_made_once(device, dtype):
    eager, scripted = plain(TWICE), script(TWICE)
    inputs = [*operands(device, dtype), masks(device)["matrix"]]
    with tsfuser.fuser():
        for _ in range(4):
            scripted(*inputs)
        made = []
        for function in (eager, scripted):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                function(*inputs)
            made.append(sum(event.name == "aten::where" for event in profile.events()))
    assert made[0] == 2 * made[1] > 0
