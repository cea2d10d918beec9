"""Slices move in front of the op whose result they are a slice of: no more is computed than somebody
reads."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.compiled_models import MODELS
from kit.support import assert_matches
from tsfuser.frontends.dynamo.rewrites.parts import Part, _before_view, compute_parts
from tsfuser.frontends.dynamo.rewrites.simplify import simplify

pytestmark = pytest.mark.graphs


def moved(function, *sizes, dtype=torch.float32):
    """The nodes that compute or slice of the function's FX graph, as `name sizes`, with the slices moved, if
    it gives what it gave."""
    values = [torch.randn(s).to(dtype) for s in sizes]
    module = make_fx(function, tracing_mode="fake")(*values)
    simplify(module)
    before = copy.deepcopy(module)
    compute_parts(module)
    module.graph.lint()
    for found, expected in zip(module(*values), before(*values)):
        assert_matches(found, expected, ops=8)  # torch's kernels differ between a vector and its tail
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    names = {n: n.target._schema.name.removeprefix("aten::") for n in nodes if hasattr(n.target, "_schema")}
    views = ("view", "transpose", "permute", "t", "split", "split_with_sizes")
    return [f"{name} {[*map(int, n.meta['val'].shape)]}" for n, name in names.items() if name not in views]


def test_what_a_cat_leaves_of_a_shuffle():
    def backward(g, x):
        y = torch.ops.aten.silu_backward(g, x)
        return (torch.tanh(y.view(8, 4, 2).transpose(1, 2).reshape(8, 8)[:, 4:]),)

    halves = ["slice [8, 4]", "slice [8, 4]", "silu_backward [8, 4]"]
    assert moved(backward, (8, 8), (8, 8)) == [*halves, "clone [8, 1, 4]", "tanh [8, 4]"]
    assert moved(backward, (8, 8), (8, 8), dtype=torch.bfloat16)[:3] == halves


MOVED = {
    "two slices": (
        lambda x: (torch.relu(x.exp()[2:, 1:]),),
        ((8, 6),),
        ["slice [8, 5]", "slice [6, 5]", "exp [6, 5]", "relu [6, 5]"],
    ),
    "rows, and a weight for all of them": (
        lambda x, w: (torch.relu((x * w).exp()[2:]),),
        ((8, 6), (6,)),
        ["slice [6, 6]", "mul [6, 6]", "exp [6, 6]", "relu [6, 6]"],
    ),
    "a column of weights": (
        lambda x, w: (torch.relu((x * w)[2:5]),),
        ((8, 6), (8, 1)),
        ["slice [3, 6]", "slice [3, 1]", "mul [3, 6]", "relu [3, 6]"],
    ),
    "the same operand twice, and a diamond": (
        lambda x: (torch.relu(((e := x.exp()) * e + e.sin())[:, 1:6:2]),),
        ((8, 6),),
        ["slice [8, 3]", *(f"{op} [8, 3]" for op in ("exp", "mul", "sin", "add", "relu"))],
    ),
    "one operand of a cat": (
        lambda x, y: (torch.relu(torch.cat([x.exp(), y.sin()], 1)[:, 4:6]),),
        ((8, 3), (8, 5)),
        ["slice [8, 2]", "sin [8, 2]", "relu [8, 2]"],
    ),
    "all operands of a cat": (
        lambda x, y: (torch.relu(torch.cat([x.exp(), y], 1)[3:]),),
        ((8, 3), (8, 5)),
        ["slice [5, 3]", "slice [5, 5]", "exp [5, 3]", "cat [5, 8]", "relu [5, 8]"],
    ),
    "another order of dims": (
        lambda x: (torch.relu(x.exp().permute(2, 0, 1)[:, :, -1:]),),
        ((2, 3, 4),),
        ["slice [2, 1, 4]", "exp [2, 1, 4]", "relu [4, 2, 1]"],
    ),
    "dims that become one": (
        lambda x: (torch.relu(x.exp().view(12, 5)[4:8]),),
        ((3, 4, 5),),
        ["slice [1, 4, 5]", "exp [1, 4, 5]", "relu [4, 5]"],
    ),
    "a dim that becomes two": (
        lambda x: (torch.relu(x.exp().view(3, 4, 5)[1:]), x),
        ((12, 5),),
        ["slice [8, 5]", "exp [8, 5]", "relu [2, 4, 5]"],
    ),
    "not what others read": (
        lambda x: (torch.relu(((e := x.exp()).sin())[2:]), e * 2),
        ((8, 6),),
        ["exp [8, 6]", "slice [6, 6]", "sin [6, 6]", "relu [6, 6]", "mul [8, 6]"],
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_the_slice_comes_first(case):
    function, sizes, nodes = MOVED[case]
    assert sorted(moved(function, *sizes)) == sorted(nodes)


def gates(z):
    a, b = z.chunk(2, -1)
    return (torch.sigmoid(a) * torch.tanh(b.t()).t(),)


SPLIT = {
    "a split and a slice that nobody reads": (
        lambda x: (x.exp().chunk(2), x.sin()[2:], torch.relu(x.cos()[2:][1:]))[2:],
        ((8, 6),),
        ["cos [5, 6]"],
    ),
    "a sum": (lambda x, w: gates(x + w), ((8, 6), (6,)), ["add [8, 3]"] * 2),
    "a chain": (lambda x, w: gates((x + w).sin()), ((8, 6), (8, 1)), ["add [8, 3]", "sin [8, 3]"] * 2),
    "unequal parts": (
        lambda x: (torch.relu((p := x.exp().split([1, 5], 1))[0]) * torch.tanh(p[1]),),
        ((8, 6),),
        ["exp [8, 1]", "exp [8, 5]"],
    ),
    "an empty part": (
        lambda x, y: (torch.relu((p := (x + y).split([1, 0], 1))[0]), torch.tanh(p[1])),
        ((8, 1), (8, 1)),
        ["add [8, 1]", "tanh [8, 0]"],
    ),
    "a product": (lambda x: gates(x @ x), ((6, 6),), ["mm [6, 6]"]),
    "what others read": (lambda x: (*gates(y := x.exp()), y), ((8, 6),), ["exp [8, 6]"]),
    "a part that is returned": (
        lambda x: ((p := x.exp().chunk(2))[0].cos(), p[1]),
        ((8, 6),),
        ["exp [8, 6]"],
    ),
    "a part that is read twice": (
        lambda x: ((p := x.exp().chunk(2))[0].cos() * p[0] * p[1],),
        ((8, 6),),
        ["exp [8, 6]"],
    ),
    "a part for a product": (
        lambda x: ((p := x.exp().chunk(2))[0].cos() @ p[1].t(),),
        ((8, 6),),
        ["exp [8, 6]"],
    ),
}


@pytest.mark.parametrize("case", SPLIT)
def test_what_is_split_is_computed_by_part(case):
    function, sizes, nodes = SPLIT[case]
    ops = {node.split()[0] for node in nodes}
    assert sorted(node for node in moved(function, *sizes) if node.split()[0] in ops) == sorted(nodes)


UNMOVED = {
    "what is returned": lambda x: (x.exp()[2:],),
    "a view that is returned": lambda x: (x.exp()[2:].view(12, 3),),
    "a product": lambda x: (torch.relu((x @ x.t())[2:]),),
    "a sum": lambda x: (torch.relu(x.sum(1)[2:]),),
    "a slice of an input": lambda x: (torch.relu(x[2:]),),
    "dims that are cut": lambda x: (torch.relu(x.exp().view(48)[5:11]),),
    "random numbers": lambda x: (torch.relu(torch.ops.aten.bernoulli.p(x, 1.0)[2:]),),
    "operands of other sizes side by side": lambda x: (torch.relu(torch.cat([x.exp(), x.sin()])[4:12]),),
    "what was there before a write": lambda x: ((y := x.exp(), x.copy_(x * 2), torch.relu(y[2:]))[2],),
    "all": lambda x: (torch.relu(torch.ops.aten.slice.Tensor(x.exp(), 0, 0, 8)),),
}


@pytest.mark.parametrize("case", UNMOVED)
def test_what_stays(case):
    function, x = UNMOVED[case], torch.randn(8, 6)
    module = make_fx(function)(x)
    before = str(module.graph)
    compute_parts(module)
    assert str(module.graph) == before


def test_sizes_that_vary(forgotten):
    """Of the dims that are not cut."""
    graphs = []

    def backend(module, inputs):
        compute_parts(module)
        module.graph.lint()
        graphs.append(module)
        return module

    def function(x, y):
        return torch.relu((x * y).view(-1, 4, 3)[:, 1:])

    run = torch.compile(function, backend=aot_autograd(fw_compiler=backend), dynamic=False)
    for rows in (5, 7, 9):
        x, y = (torch.randn(rows, 12) for _ in range(2))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
        assert torch.equal(run(x, y), function(x, y))
    (graph,) = graphs
    (product,) = (n for n in graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    rows, columns = product.meta["val"].shape
    assert isinstance(rows, torch.SymInt) and columns == 9


def test_parts_of_views_are_those_of_their_elements():
    """Of all views of 24 elements."""
    sizes = [(24,), (2, 12), (12, 2), (4, 6), (2, 3, 4), (4, 1, 6), (2, 2, 6), (3, 8), (1, 24), (2, 3, 2, 2)]
    found = 0
    for before in sizes:
        x = torch.arange(24).view(before)
        for after in sizes:
            for dim in range(len(after)):
                for start in range(after[dim]):
                    for step in range(1, after[dim] - start + 1):
                        for length in range(1, (after[dim] - start - 1) // step + 2):
                            part = Part(dim, start, length, step)
                            if length == after[dim]:
                                continue
                            where = _before_view(before, after, part)
                            expected = x.view(after).narrow(dim, start, after[dim] - start)
                            index = torch.arange(0, length * step, step)
                            expected = expected.index_select(dim, index).flatten()
                            if where is not None:
                                found += 1
                                index = torch.arange(where.start, where.stop, where.step)
                                made = x.index_select(where.dim, index)
                                assert torch.equal(made.flatten(), expected), (before, after, part, where)
    assert found > 1000


@pytest.mark.usefixtures("forgotten", "fused_or_error")
def test_a_shuffle_is_one_group_each_way_and_saves_nothing(device):
    """The backward computes the half of it that a parameter has been in."""
    make, example = MODELS["shuffle"]
    torch.manual_seed(1)
    model = make().to(device)
    exact = copy.deepcopy(model).double()
    run = torch.compile(model, backend="tsfuser", fullgraph=True)

    def gradients(function, module, x):
        y = function(x)
        return [y.detach(), *torch.autograd.grad(y, list(module.parameters()), torch.cos(y.detach()))]

    for n in (4, 4, 5, 7):
        x = example(n).to(device)
        found, eager = gradients(run, model, x), gradients(model, model, x)
        for values in zip(found, eager, gradients(exact, exact, x.double())):
            assert_matches(*values, ops=1 << 10)
    report = tsfuser.explain(run, example(4).to(device))
    assert "silu_backward" in str(report)


@pytest.mark.usefixtures("forgotten", "fused_or_error")
def test_gradients_of_what_is_joined_and_cut(device):
    def function(x, y, w):
        z = torch.cat([F.silu(x) * w, torch.tanh(y)], 1)
        a, b = z.view(-1, 2, 6).transpose(1, 2).reshape(-1, 12).chunk(2, 1)
        return (torch.sigmoid(a) * b.exp()).sum(0) + F.gelu(z[:, 4:8]).sum()

    run = torch.compile(function, backend="tsfuser", fullgraph=True)
    for rows in (3, 3, 6, 9):
        sizes = (rows, 7), (rows, 5), (7,)
        values = [torch.randn(s, device=device, requires_grad=True) for s in sizes]
        exact = [v.detach().double().requires_grad_() for v in values]
        for pick in ([0, 1, 2], [1], [0, 2]):
            results = []
            for which, given in ((run, values), (function, values), (function, exact)):
                leaves = [given[k] for k in pick]
                args = [v if k in pick else v.detach() for k, v in enumerate(given)]
                results.append(torch.autograd.grad(which(*args).sin().sum(), leaves))
            for found in zip(*results):
                assert_matches(*found, ops=1 << 10)


def channel(x):
    y = torch.relu(x)[:, 1:2]
    return (torch.cat([y.sin(), y.cos()], 1)[:, 1:],)


def channels(x):
    a, b = torch.relu(x)[:, :2].split(1, 1)
    return (torch.cat([a.sin(), b.cos()], 1)[:, 1:],)


def channel_of_cast(x):
    y = x.float()[:, 1:2]
    return (torch.cat([y.sin(), y.cos()], 1)[:, 1:],)


@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("function", (channel, channels, channel_of_cast))
def test_one_channel_of_images_in_channels_last_leads_to_such_images(function):
    """relu(x[:, 1:2]) alone would lead to row-major ones, but what AOTAutograd has traced is promised."""
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    (found,), (eager,) = torch.compile(function, backend="tsfuser", fullgraph=True)(x), function(x)
    assert found.stride() == eager.stride()
    torch.testing.assert_close(found, eager)


@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_size_of_a_slice_in_a_list_of_its_group(dynamic):
    """The backward expands to the sizes of the slice, and multiplies by it."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, 1, 1, dtype=torch.float64)

    def function(x):
        y = F.relu(x * 1.5)[:, :, 1:]
        scale = torch.sigmoid(F.conv2d(y.mean((2, 3), keepdim=True), weight))
        return (y * scale).sum((2, 3))

    run = torch.compile(function, backend="tsfuser", dynamic=dynamic)
    for n in (2, 3):
        x = torch.randn(n, 4, 6, 6, dtype=torch.float64, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        results = run(x), function(twin)
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(*results)
        torch.testing.assert_close(x.grad, twin.grad)
