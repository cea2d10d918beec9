"""Shape ops: inside a group they are relabelings of axes; what leaves is the view that eager gives."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fuse, groups, kinds, no_fallback, script

pytestmark = pytest.mark.graphs

#: The targets of the larger sweeps: a kernel for fibers is compiled for five GPUs as well: a second each.
NATIVE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

# ---- one op at a time, with something computed on both sides

PROGRAMS = {
    "unsqueeze": "(x + 1.0).unsqueeze(1) * y.relu()",
    "unsqueeze at the end": "(x + 1.0).unsqueeze(-1).exp() * 2.0",
    "squeeze all": "(x * 2.0).sum(0, keepdim=True).squeeze().exp() * 0.5",
    "squeeze a dim": "x.sum(1, keepdim=True).squeeze(1) + y.relu().sum(1)",
    "squeeze dims": "torch.squeeze(x.unsqueeze(0) * 2.0, [0, 1]).relu()",
    "squeeze of a size that may be 1": "(x * 2.0).squeeze(0).relu()",
    "permute": "(x * 2.0).permute(1, 0) + y.permute([-1, 0]).relu()",
    "transpose": "(x * 2.0).transpose(0, -1) * 0.5",
    "t": "(x.t() + y.t()).relu()",
    "t of a vector": "(x * y).sum(0).t().exp() + y",
    "movedim": "((x + y).unsqueeze(0) * 2.0).movedim(0, -1).relu()",
    "movedim of two": "((x + y).unsqueeze(0) * 2.0).movedim([0, 1], [1, 2]).relu()",
    "swapaxes": "(x * 2.0).swapaxes(0, 1).relu() + (y * 3.0).swapdims(0, -1)",
    "expand": "(x[:, :1] * 2.0).expand(-1, y.size(1)).relu() + y",
    "expand with new dims": "(x * 2.0).expand(3, x.size(0), -1) - y",
    "expand a new axis only": "(x[:, :1] * 2.0).expand(x.size(0), 9).exp()",
    "expand to nothing": "(x[:, :1] * 2.0).expand(x.size(0), 0).exp()",
    "expand and reduce": "(x * 2.0).expand(3, x.size(0), x.size(1)).sum(0) - y",
    "expand_as": "(x[:, :1] * 2.0).expand_as(y).relu()",
    "a view of a view": "(x * 2.0).unsqueeze(0).permute(2, 0, 1).squeeze(1).relu() + y.t()",
    "contiguous": "(x * 2.0).contiguous().view(-1).relu().view(x.size(0), -1) + y.contiguous().view_as(y)",
    "contiguous after a transpose": "(x * 2.0).t().contiguous().view(-1, 1).relu() + y.sum()",
    "contiguous channels-last": "(x + y).unsqueeze(0).unsqueeze(0).contiguous(memory_format=2).relu() * 2.0",
    "contiguous channels": "(x.unsqueeze(0).unsqueeze(3) * 2.0).contiguous(memory_format=2).exp() * 0.5",
    "softmax of a transpose": "torch.softmax((x * 2.0).t(), -1) + y.t()",
    "sum over an expanded dim": "(x.unsqueeze(2) * y.unsqueeze(1)).sum(1)",
    "view that adds a dim": "(x * 2.0).view(x.size(0), 1, x.size(1)).relu() + y",
    "view that splits": "torch.cat([x, x], 1).view(-1, 2, x.size(1)).exp() * 2.0",
    "view of a product": "(torch.cat([x, x], 1) * 2.0).view(x.size(0), 2, x.size(1)).exp().sum(1) + y",
    "split softmax": "torch.softmax(torch.cat([x, x], 1) * 2.0, 1).reshape(x.size(0), 2, x.size(1)).exp()",
    "split and bias": "(torch.cat([x, x], 1) + torch.cat([y, y], 1)[:1]).view(-1, 2, x.size(1)).sum(0) * "
    "x.sum(0)",
    "unflatten": "(torch.cat([x, x], 0) * 2.0).unflatten(0, [2, -1]).relu() + y",
    "flatten of a view that adds a dim": "(x.unsqueeze(1).flatten(1) * 2.0).relu() + y",
    "flatten of a 0-dim tensor": "(x.sum() * 2.0).flatten() + y",
    "outer product of sums": "(x.sum(1) * 2.0).unsqueeze(1) * x.sum(1).unsqueeze(0)",
}


def operand(device, sizes, layout, dtype=torch.float32):
    rows, columns = sizes
    if layout == "row-major":
        return torch.randn(rows, columns, device=device).to(dtype)
    if layout == "permuted":
        return torch.randn(columns, rows, device=device).to(dtype).t()
    if layout == "expanded":
        return torch.randn(rows, 1, device=device).to(dtype).expand(rows, columns)
    return torch.randn(rows, 2 * columns + 1, device=device).to(dtype)[:, 1::2]  # strided and misaligned


def compare(text, *inputs, fused=True):
    """The program against eager: values, sizes and strides; and that views were in its groups."""
    scripted = script(f"def f(x, y):\n    return {text}\n")
    plain = script(f"def f(x, y):\n    return {text}\n")
    with torch.jit.fuser("fuser0"):
        eager = plain(*inputs)
        exact = plain(*(x if x.is_complex() else x.double() for x in inputs))
    with no_fallback():
        fuse(scripted, *inputs)
        result = scripted(*inputs)
    assert_matches(result, eager, exact, ops=40)
    inside = [kind for group in groups(scripted) for kind in kinds(group)]
    if fused and all(x.numel() for x in inputs):  # what has no elements is not reshaped in a group
        assert VIEWS & set(inside), f"no view was fused: {inside}"


VIEWS = {
    f"aten::{name}"
    for name in """
        unsqueeze squeeze permute transpose t movedim swapaxes swapdims expand expand_as view reshape flatten
        unflatten view_as contiguous
    """.split()
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_view_in_a_group(device, name):
    compare(PROGRAMS[name], operand(device, (5, 7), "row-major"), operand(device, (5, 7), "row-major"))


@pytest.mark.each_value
@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("sizes", [(1, 7), (5, 1), (0, 7), (4, 4)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_view_of_other_sizes(device, name, sizes):
    compare(PROGRAMS[name], operand(device, sizes, "row-major"), operand(device, sizes, "row-major"))


@pytest.mark.each_value
@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("layout", ["permuted", "expanded", "strided"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_view_of_tensors_in_other_layouts(device, name, layout):
    compare(PROGRAMS[name], operand(device, (5, 7), layout), operand(device, (5, 7), "row-major"))
    compare(PROGRAMS[name], operand(device, (5, 7), "row-major"), operand(device, (5, 7), layout))


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64])
def test_views_in_other_dtypes(device, dtype):
    x, y = (torch.randint(0, 2, (5, 7), device=device).to(dtype) for _ in range(2))
    for text in (
        "(x.t() == y.t()).unsqueeze(0)",
        "(x * y).t().unsqueeze(1) * x.t()",
        "(x * y).sum(0, True).expand(5, 7) * y",
    ):
        compare(f"({text}) * 1" if dtype is not torch.complex64 else f"({text}) * 1.0", x, y)


RESHAPES = {
    "merge": "(x.contiguous().view(-1) * 2.0).relu() + 1.0",
    "flatten": "(x.contiguous().flatten() * 2.0).relu() + 1.0",
    "merge and split": "(x.contiguous().view(2, -1) * 2.0).relu() + y.contiguous().reshape(2, -1)",
    "merge leading": "(x.contiguous().view(-1, 1) * 2.0).relu() * y.sum(0)",
    "merge and reduce": "torch.softmax(x.contiguous().view(3, -1) * 2.0, 1).sum(0) + 1.0",
}


@pytest.mark.parametrize("name", RESHAPES)
def test_dims_of_an_input_are_merged(device, name):
    x, y = torch.randn(6, 4, device=device), torch.randn(6, 4, device=device)
    compare(RESHAPES[name], x, y)


def test_reshapes_of_other_sizes_than_were_profiled(device):
    scripted = script(
        "def f(x, n: int):\n    m = x.size(1) // n\n"
        "    return (x.view(x.size(0), n, m) * 2.0).relu() + x.view(-1, n, m).exp()\n"
    )
    fuse(scripted, torch.randn(4, 12, device=device), 3)
    for sizes, n in (((4, 12), 4), ((5, 12), 3), ((5, 12), 1), ((5, 12), 12), ((1, 8), 2), ((3, 1), 1)):
        x = torch.randn(sizes, device=device)
        view = x.view(sizes[0], n, sizes[1] // n)
        assert_matches(scripted(x, n), (view * 2.0).relu() + view.exp(), ops=4)


def test_what_becomes_what_it_was_is_read_once(device):
    """A loss head views logits as sentences and as rows again: one kernel copies them and adds them up."""
    _is_one_kernel("x.reshape(2, -1, x.size(1)).reshape(-1, x.size(1)).sum(1), x * 1.0", device)


def test_what_is_read_as_it_is_and_split_is_read_once(device):
    _is_one_kernel("x.reshape(2, -1, x.size(1)).double().sum(2).view(-1).float(), x * 1.0", device)
    _is_one_kernel("x.view(2, 3, -1).mul(2.0).sum(2).view(-1) / 2.0, x * 1.0", device)


def _is_one_kernel(text, device):
    """The sums of rows and a copy of them."""
    x = torch.randn(6, 16, device=device)[:, :13]
    run = fuse(script(f"def f(x):\n    return {text}\n"), x)
    before = tsfuser.stats()["launches"]
    with tsfuser.fuser():
        sums, copy = run(x)
    assert tsfuser.stats()["launches"] - before == 1
    assert_matches(sums, x.sum(1), ops=16)
    assert torch.equal(copy, x)


# ---- a value that meets itself along another dim

MEETINGS = [
    "x + x.sum(1)",
    "x + x.t()",
    "(x * 2.0).relu() + (x * 2.0).relu().t()",
    "x.sum(1).unsqueeze(1) * x.sum(1) + x",
    "(x + y.sum(1)) * (y + 1.0)",
    "torch.softmax(x, 1) + torch.softmax(x, 1).t() + x.sum(1)",
    "(x + x.t()) * (y + y.t()).sum(0) + x.amax(1)",
]


@pytest.mark.parametrize("text", MEETINGS)
def test_two_dims_of_one_tensor_are_never_one_loop(device, text):
    x, y = torch.randn(6, 6, device=device), torch.randn(6, 6, device=device)
    compare(text, x, y, fused=False)


# ---- views that leave


def shares_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


LEAVING = [
    "p.t()",
    "p.unsqueeze(0)",
    "p.expand(2, 5, 7)",
    "p.permute(1, 0).squeeze()",
    "p.view(7, 5)",
    "p.flatten()",
    "p.reshape(-1)",
    "p.contiguous()",
    "p.unsqueeze(0).contiguous()",
    "p.t().to(torch.float32)",
    "p.t().type_as(p)",
]


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("text", LEAVING)
def test_a_view_that_leaves_is_one_of_the_other_result(device, text):
    body = f"p = (x * 2.0).relu()\n    v = {text}\n    return p, v, (v + 1.0).exp()"
    scripted = script(f"def f(x):\n    {body}\n")
    x = torch.randn(5, 7, device=device)
    with no_fallback():
        fuse(scripted, x)
        p, v, w = scripted(x)
    assert groups(scripted) and shares_memory(p, v) and not shares_memory(p, w)
    assert_matches(w, (v + 1.0).exp(), ops=4)
    p.add_(1.0)
    assert_matches(w, v.exp(), ops=4)


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("text", LEAVING)
def test_a_view_of_an_input_that_leaves_is_the_inputs_memory(device, text):
    text = text.replace("p", "x", 1).replace("xermute", "permute").replace("type_as(p)", "type_as(x)")
    scripted = script(f"def f(x):\n    v = {text}\n    return v, (v * 2.0).relu(), (v + 1.0).exp()\n")
    x = torch.randn(5, 7, device=device)
    with no_fallback():
        fuse(scripted, x)
        v, w, _ = scripted(x)
    assert groups(scripted) and shares_memory(x, v) and not shares_memory(x, w)
    assert_matches(w, (v * 2.0).relu(), ops=4)


def test_one_view_that_is_returned_twice_is_one_tensor(device):
    scripted = script("def f(x):\n    v = x.t()\n    return v, v, (v * 2.0).relu() + (v + 1.0).exp()\n")
    x = torch.randn(5, 7, device=device)
    fuse(scripted, x)
    a, b, c = scripted(x)
    assert a.data_ptr() == b.data_ptr() and shares_memory(a, x)
    assert scripted.graph_for(x).str().count("aten::t(") == 2  # one outside, one in the group


WRITTEN = [
    "v = x.t()\n    x.add_(1.0)\n    return (v * 2.0).relu()",
    "v = x.t()\n    w = (v * 2.0).relu()\n    x.add_(1.0)\n    return w + v",
    "v = x.contiguous()\n    w = (v * 2.0).relu()\n    x.add_(1.0)\n    return w + v",
    "v = x.t().contiguous()\n    w = (v * 2.0).relu()\n    x.add_(1.0)\n    return w + v",
    "p = x * 2.0\n    v = p.contiguous()\n    v.mul_(3.0)\n    return (p + 1.0).exp()",
    "p = x * 2.0\n    v = p.t().contiguous()\n    v.mul_(3.0)\n    return (p + 1.0).exp() + v.t()",
    "p = x * 2.0\n    v = p.unsqueeze(0)\n    w = (v + 1.0).exp()\n    p.mul_(3.0)\n    return w + v",
    "p = x * 2.0\n    p.t().add_(1.0)\n    return (p.t() + 1.0).exp()",
    "p = x.exp()\n    v = p.expand(2, 5, 7)\n    p.zero_()\n    return (v + 1.0) * 2.0",
]


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("body", WRITTEN)
def test_a_view_of_what_is_written_sees_the_write(device, body):
    plain, fused = (script(f"def f(x):\n    {body}\n") for _ in range(2))
    x = torch.randn(5, 7, device=device)
    with torch.jit.fuser("fuser0"):
        expected = plain(x.clone())
    with no_fallback():
        fuse(fused, x.clone())
        mine = x.clone()
        assert_matches(fused(mine), expected, ops=6)


def test_positive_hands_its_operand_on(device):
    scripted = script("def f(x):\n    return torch.positive(x), torch.positive(x + 1.0) * 2.0\n")
    x = torch.randn(5, 7, device=device)
    assert [kinds(group) for group in groups(fuse(scripted, x))] == [
        ["aten::add", "aten::positive", "aten::mul"]
    ]
    assert scripted(x)[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("target", NATIVE)
def test_contiguous_hands_on_what_is_so_and_copies_what_is_not(device):
    """By the layout of each call, not by that of the first ones."""
    scripted = script(
        "def f(x):\n    v = x.contiguous()\n    return v, (v.view(-1) * 2.0).relu(), v.exp() + 1.0\n"
    )
    x = torch.randn(5, 7, device=device)
    with no_fallback():
        fuse(scripted, x)
        for own in (x, x.t(), x[:, ::2], x[:0], x.t(), x):
            v, w, _ = scripted(own)
            assert shares_memory(v, own) == own.is_contiguous() or not own.numel()
            assert v.stride() == own.contiguous().stride()
            assert_matches(w, (own.contiguous().view(-1) * 2.0).relu(), ops=4)


def test_views_alone_are_no_group(device):
    scripted = script("def f(x):\n    return x.t().unsqueeze(0).expand(3, 7, 5).permute(1, 0, 2).squeeze()\n")
    assert groups(fuse(scripted, torch.randn(5, 7, device=device))) == []
