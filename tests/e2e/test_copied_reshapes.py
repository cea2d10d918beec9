"""Reshapes that copy are made by the groups that compute what they copy
(tsfuser/graph/copied_reshapes.py)."""

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.opsweep import plain
from kit.support import assert_matches, groups, kinds, no_fallback, script, train
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.copied_reshapes import ORDERED, RESHAPED

pytestmark = pytest.mark.graphs

#: What is made of x[B, H, W, C] and w[C], and reshaped as no view of it.
COPIES = {
    "windows": "y = torch.layer_norm(x, [c], w)\n"
    "    return y.view(b, h // 2, 2, k // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)",
    "windows, rolled": "y = torch.roll(torch.tanh(x * w), [1, -1], [1, 2])\n"
    "    return y.view(b, h // 2, 2, k // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)",
    "an image again": "y = torch.tanh(x * w).reshape(b, h // 2, k // 2, 2, 2, c)\n"
    "    return y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, k, c)",
    "transposed": "return torch.sigmoid(x * w).transpose(1, 3).reshape(b, -1)",
    "flat, with dims of 1": "return torch.sigmoid(x * w).unsqueeze(2).transpose(0, 3).reshape(-1)",
    "padded": "y = torch.nn.functional.pad(torch.sigmoid(x * w), [0, 0, 0, 0])\n"
    "    return y.transpose(1, 2).reshape(b, -1, c)",
    "of a softmax": "return torch.softmax(x * w, 1).transpose(1, 2).reshape(-1, c) * 1.5",
    "repeated": "y = torch.tanh(x * w).permute(0, 3, 1, 2)[:, :, None, :, :]\n"
    "    return y.expand(b, c, 3, h, k).reshape(b, c * 3, h, k)",
    "repeated, of a product": "y = torch.matmul(x.transpose(2, 3), x)[:, :, None]\n"
    "    return y.expand(b, h, 2, c, c).reshape(b, h * 2, c, c)",
    "of a product": "y = torch.matmul(x.transpose(2, 3), x)\n    return y.transpose(1, 2).reshape(b, -1)",
    "in order": "return torch.tanh(x * w).transpose(1, 2).contiguous()",
    "in order, and viewed": "y = torch.sigmoid(x * w).permute(0, 3, 1, 2).contiguous()\n"
    "    return y.view(b, -1, h * k)",
    "channels last": "y = torch.sigmoid(x * w).transpose(1, 2)\n"
    "    return y.contiguous(memory_format=torch.channels_last)",
    "channels shuffled": "y = torch.cat([torch.tanh(x * w), x], 3).view(b, h, k, 2, c).transpose(3, 4)\n"
    "    return y.contiguous().view(b, h, k, 2 * c)",
    "in order, of a softmax": "return torch.softmax(x * w, 1).transpose(1, 2).contiguous() * 1.5",
}
#: Where the result of the reshape, or of a view of it, is only read.
INSIDE = {
    "of an input": "y = x.transpose(1, 2).reshape(b, -1, c)\n    return torch.matmul(y, w), y * 2.0",
    "of an input, a view of it is read": "y = x.transpose(1, 3).reshape(b, -1, h).transpose(1, 2)\n"
    "    return torch.matmul(y, y.transpose(1, 2)), x * w",
    "of a branch's result": "y = torch.tanh(x * w)\n    if b > 2:\n        y = y.unsqueeze(0)\n"
    "    y = y.transpose(-3, -2).reshape(b, -1, c)\n    return torch.matmul(y, w), y.exp()",
    "of a part that a branch gives": "y = torch.tanh(x * w)\n    if b > 0:\n        y = y[:, :, :, 1:]\n"
    "    y = y.transpose(1, 2).reshape(b, h * k, c - 1)\n    return torch.matmul(y, w[1:]), y.exp()",
    "in order, of an input": "y = x.transpose(1, 2).contiguous()\n    return torch.matmul(y, w), y * 2.0",
    "in order, and others read the operand": "z = torch.tanh(x * w)\n"
    "    y = z.transpose(1, 2).contiguous()\n    return torch.matmul(y, w), torch.matmul(z, w), z.exp()",
    "others read the operand": "z = torch.tanh(x * w)\n    y = z.transpose(1, 2).reshape(b, -1, c)\n"
    "    return torch.matmul(y, w), torch.matmul(z, w), z.exp()",
    "others read the operand, and it is returned": "z = torch.tanh(x * w)\n"
    "    return z.transpose(1, 2).reshape(b, -1, c), z.exp(), torch.matmul(z, w)",
}
#: Where a copy could be told from a view.
OTHERS = {
    "the operand is returned": "y = torch.tanh(x * w)\n    return y.transpose(1, 2).reshape(b, -1, c), y",
    "a view of it is returned": "y = torch.tanh(x * w).transpose(1, 2)\n    return y.reshape(b, -1, c), y",
    "of an input": "return x.transpose(1, 2).reshape(b, -1, c), x * w",
    "of an input, and a view is returned": "y = x.transpose(1, 2).reshape(b, -1, c)\n"
    "    return y.transpose(0, 1), torch.matmul(y, w)",
    "of an input, in a branch": "y = x\n    if b > 0:\n"
    "        y = x.transpose(1, 2).reshape(b, -1, c)\n    return y, torch.matmul(y, w)",
    "of an input, in a list": "y = x.transpose(1, 2).reshape(b, -1, c)\n    return [y, torch.matmul(y, w)]",
    "of an input, appended to a list": "y = [x * w]\n    y.append(x.transpose(1, 2).reshape(b, -1, c))\n"
    "    return y",
    "of an input that is written to": "y = x.transpose(1, 2).reshape(b, -1, c)\n    x.add_(1.0)\n"
    "    return torch.matmul(y, w), x",
    "of a view of an input": "return x[1:].transpose(1, 2).reshape(-1, c), x * w",
    "written to": "y = torch.tanh(x * w).transpose(1, 2).reshape(b, -1, c)\n    y.add_(1.0)\n    return y, x",
    "its operand is written to": "z = torch.tanh(x * w)\n    y = z.transpose(1, 2).reshape(b, -1, c)\n"
    "    z.add_(1.0)\n    return y, z",
    "a view that repeats": "y = torch.tanh(x * w)[:, None]\n"
    "    return y.expand(b, 2, h, k, c).reshape(b, 2, h * k, c), x",
    "a view": "y = torch.tanh(x * w).reshape(b, -1, c)\n    return y, y * 2.0",
    "in order, and the operand is returned": "y = torch.tanh(x * w).transpose(1, 2)\n"
    "    return y.contiguous(), y",
    "an input in order": "return x.transpose(1, 2).contiguous(), x * w",
    "in order, and written to": "y = torch.tanh(x * w).transpose(1, 2).contiguous()\n"
    "    y.add_(1.0)\n    return y, x",
    "in order, and its operand is written to": "z = torch.tanh(x * w)\n"
    "    y = z.transpose(1, 2).contiguous()\n    z.add_(1.0)\n    return y, z",
    "there already": "y = torch.tanh(x * w)\n    return y.contiguous(), y",
}


def made_here(group):
    """Whether the group makes such a copy."""
    return bool({RESHAPED, ORDERED} & set(kinds(group)))


def functions(body):
    head = "def f(x: Tensor, w: Tensor):\n    b, h, k, c = x.size()\n"
    return plain(f"{head}    {body}\n"), script(f"{head}    {body}\n")


def operands(device, sizes, layout="row-major"):
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(s, generator=generator).to(device) for s in (sizes, sizes[-1:]))
    if layout == "turned":
        x = x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    elif layout == "channels first":
        x = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    elif layout == "gaps":
        x = torch.stack([x, x], 1)[:, 0]
    elif layout == "repeated":
        x = x[:, :1].expand(x.shape)
    return x, w


@pytest.mark.parametrize("name", COPIES)
def test_a_group_makes_the_copy(device, name):
    eager, scripted = functions(COPIES[name])
    with tsfuser.fuser(), no_fallback():
        for sizes in [(4, 8, 6, 32)] * 4 + [(2, 2, 4, 64), (1, 4, 2, 8), (3, 6, 2, 5)]:
            for layout in ("row-major", "turned", "channels first"):
                x, w = operands(device, sizes, layout)
                exact = eager(x.double(), w.double())
                assert_matches(scripted(x, w), eager(x, w), exact, ops=200)
    assert any(made_here(g) for g in groups(scripted))


@pytest.mark.parametrize("name", [name for name in INSIDE if "branch" in name])
@pytest.mark.usefixtures("kept_branches")
def test_a_copy_of_what_a_branch_gives(device, name):
    test_a_copy_that_stays_inside(device, name)


@pytest.mark.parametrize("name", INSIDE)
def test_a_copy_that_stays_inside(device, name):
    """Whose memory may be an input's: with gaps, and with repeated elements."""
    eager, scripted = functions(INSIDE[name])
    with tsfuser.fuser(), passes.watching() as seen:
        for sizes in [(4, 8, 6, 32)] * 4 + [(2, 2, 4, 64), (1, 4, 2, 8), (3, 6, 2, 5)]:
            for layout in ("row-major", "turned", "channels first", "gaps", "repeated"):
                x, w = operands(device, sizes, layout)
                wide = eager(x.double(), w.double())
                for mine, theirs, exact in zip(scripted(x, w), eager(x, w), wide):
                    assert_matches(mine, theirs, exact, ops=400)
    made = [group for o in seen for group in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    assert "of a part" in name or any(made_here(group) for group in made)


@pytest.mark.parametrize("name", [name for name in COPIES if "of a product" not in name])
def test_training(device, name):
    eager, scripted = functions(COPIES[name])
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        for sizes in [(4, 8, 6, 32)] * 2 + [(2, 2, 4, 64), (3, 6, 2, 5)]:
            inputs = [t.requires_grad_() for t in operands(device, sizes)]
            exact = train(eager, [t.detach().double().requires_grad_() for t in inputs], calls=1)
            out, gradients = train(scripted, inputs)
            want, expected = train(eager, inputs, calls=1)
            for found in zip([out, *gradients], [want, *expected], [exact[0], *exact[1]]):
                assert_matches(*found, ops=400, strides=False)
    made = [group for o in seen for group in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    # the backward of the others reads what is reshaped, too
    assert any(made_here(group) for group in made) or name not in ("windows", "an image again")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("layout", ["row-major", "turned"])
def test_memory_is_shared_as_in_eager(device, name, layout):
    eager, scripted = functions(OTHERS[name])
    with tsfuser.fuser():
        for sizes in [(4, 8, 6, 32)] * 4 + [(1, 2, 4, 8), (4, 1, 6, 32)]:
            seen = []
            for function in (eager, scripted):
                x, w = operands(device, sizes, layout)
                made = function(x, w)
                memory = [t.untyped_storage().data_ptr() for t in (*made, x, w)]
                seen.append(([memory.index(place) for place in memory], [t.stride() for t in made], made))
            assert seen[0][:2] == seen[1][:2]
            for mine, theirs in zip(seen[1][2], seen[0][2]):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert layout == "turned" or not any(made_here(g) for g in groups(scripted))


@pytest.mark.parametrize("name", ["y + x", "(y.unsqueeze(0) * x).exp()"])
def test_a_copy_that_is_read_often_stays_one(device, name):
    """As a bias for each image: its readers would read it out of order, for each of them."""
    source = (
        "def f(x: Tensor, w: Tensor):\n    y = torch.tanh(w).permute(2, 0, 1).contiguous()\n"
        f"    return {name}\n"
    )
    eager, scripted = plain(source), script(source)
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(s, generator=generator).to(device) for s in ((6, 4, 40, 40), (40, 40, 4)))
    with tsfuser.fuser():
        for _ in range(4):
            out = scripted(x, w)
    assert_matches(out, eager(x, w), eager(x.double(), w.double()), ops=50)
    assert groups(scripted) and not any(made_here(g) for g in groups(scripted))


#: Values for each head of groups of heads: an attention reads the copy, or the program gets it.
REPEATED = {
    "an attention": "return attend(q, r, r)",
    "an attention, with computed keys": "return attend(q, r * 2.0, r)",
    "it is returned": "return r",
    "an attention, and others read them": "return attend(q, r, r) * r.sum()",
    "it is written to": "r.mul_(0.5)\n    return attend(q, r, r)",
}


@pytest.mark.parametrize("name", REPEATED)
def test_training_with_values_that_heads_share(device, name):
    source = (
        "def attend(q: Tensor, k: Tensor, v: Tensor):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n\n"
        "def f(x: Tensor, w: Tensor, q: Tensor, n: int):\n    b, t = x.size(0), x.size(1)\n"
        "    y = torch.matmul(x, w).view(b, t, -1, 16).transpose(1, 2)[:, :, None]\n"
        "    r = y.expand(b, y.size(1), n, t, 16).reshape(b, -1, t, 16)\n"
        f"    {REPEATED[name]}\n"
    )
    unit, eager = torch.jit.CompilationUnit(source), {"torch": torch, "Tensor": torch.Tensor}
    exec(source, eager)
    with tsfuser.fuser(), passes.watching() as seen:
        for b, t, h, n in [(2, 32, 2, 4)] * 4 + [(2, 32, 2, 1), (1, 8, 1, 3), (3, 5, 4, 2), (2, 32, 1, 8)]:
            if h == 1 and "written" in name:  # eager raises
                continue
            generator = torch.Generator().manual_seed(b + t)
            x, w, q = (
                torch.randn(s, generator=generator).to(device).requires_grad_()
                for s in ((b, t, 24), (24, h * 16), (b, h * n, t, 16))
            )
            leaves = [x, w, q] if "attend" in REPEATED[name] else [x, w]
            wide = [leaf.detach().double().requires_grad_() for leaf in (x, w, q)]
            found = []
            for function, given in ((unit.f, (x, w, q)), (eager["f"], (x, w, q)), (eager["f"], wide)):
                result = function(*given, n)
                ends = given[: len(leaves)]
                found.append([result, *torch.autograd.grad(result.square().sum(), ends)])
            for mine, theirs, exact in zip(*found):
                size = exact.abs().max().clamp(min=1)  # of such terms small sums are made, too
                assert_matches(mine / size, theirs / size, exact / size, ops=800, strides=False)
    made = [group for o in seen for group in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    alone = [g for g in made if RESHAPED in kinds(g) and "aten::expand" in kinds(g)]
    if "written" not in name and not (name == "it is returned" and by_joint_graphs()):
        assert bool(alone) == name.startswith("an attention")


def test_training_with_one_head_for_all(device):
    """Its values are repeated in a view, as in eager: nothing is to be fused, and nothing to be warned of."""
    source = (
        "def f(x: Tensor, w: Tensor, q: Tensor):\n    b, t = x.size(0), x.size(1)\n"
        "    y = torch.matmul(x, w).view(b, t, 1, 16).transpose(1, 2)[:, :, None]\n"
        "    r = y.expand(b, 1, 8, t, 16).reshape(b, -1, t, 16)\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, r, r)\n"
    )
    eager, scripted = plain(source), script(source)
    x, w, q = (torch.randn(s, device=device) for s in ((2, 64, 24), (24, 16), (2, 8, 64, 16)))
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(4):
            out, gradients = train(scripted, [t.requires_grad_() for t in (x, w, q)], calls=1)
    made = [group for o in seen for group in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    assert not any(RESHAPED in kinds(group) for group in made)
    torch.testing.assert_close((out, gradients), train(eager, [x, w, q], calls=1), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_product(device):
    """The values of an attention: their gradient is summed to the sizes that they have already."""
    body = "n, t, c = v.size()\n    y = torch.matmul(v, w).view(n, t, 4, c // 4).transpose(1, 2)\n"
    body += "    return torch.matmul(torch.softmax(s, -1), y) * 2.0\n"
    source = f"def f(s: Tensor, v: Tensor, w: Tensor):\n    {body}"
    scripted, eager = script(source), plain(source)
    generator = torch.Generator().manual_seed(4)
    sizes = [(3, 4, 16, 16), (3, 16, 128), (128, 128)]
    inputs = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in sizes]
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        got, gradients = train(scripted, inputs)
    want, expected = train(eager, inputs, calls=1)
    exact, exact_gradients = train(eager, [x.detach().double().requires_grad_() for x in inputs], calls=1)
    for actual, theirs, true in zip([got, *gradients], [want, *expected], [exact, *exact_gradients]):
        assert_matches(actual, theirs, true, ops=4000)
    found = [g for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True) if made_here(g)]
    assert any("aten::_grad_sum_to_size" in kinds(g) for g in found)
