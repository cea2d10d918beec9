"""Casts of which views read parts: what is cast is what is read, by the group that reads it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit import compiled_models
from kit.support import assert_matches
from tsfuser.frontends.dynamo.rewrites.simplify import simplify

aten = torch.ops.aten


def halves(y):
    a, b = y.chunk(2, 1)
    return torch.relu(a).sum() + torch.exp(b)


MOVED = {
    "slice": lambda y: y[:, 1:3] @ torch.ones(2, 5),
    "select": lambda y: y[1] + 1,
    "halves": halves,
    "parts of other sizes": lambda y: sum(p.sin().sum() for p in y.split([1, 2, 1, 2], 1)),
    "unbind": lambda y: sum((k + 1) * p.exp() for k, p in enumerate(y.unbind(0))),
    "diagonal": lambda y: y.diagonal().exp(),
    "a part of a part": lambda y: y[1:3][:, :2].t().reshape(-1) @ torch.ones(4),
    "no group reads one of them": lambda y: y[:2, :4] @ torch.ones(4, 5) + y[2:, :5].exp(),
    "views of parts": lambda y: y[:, :3].t().reshape(-1).exp() + y[:, 3:].unsqueeze(0).flatten().sin(),
}
LEFT = {
    "all of it is read, too": lambda y: y[:, :3].exp().sum() + y.sum(),
    "a part is returned": lambda y: y[:, :3],
    "a part of a part is returned": lambda y: (y[:, :3].t(), y[:, 3:].exp()),
    "more is read than there is": lambda y: y[:, 1:].exp() + y[:, :-1].sin(),
    "no group reads two parts": lambda y: y[:, :3] @ y[:, 3:].t(),
    "the gaps are read": lambda y: y[:, :3].as_strided((4, 2), (3, 2)).exp(),
    "all is a part": lambda y: y[:].exp(),
}


def traced(function, x, mode="fake"):
    """The graph before and after, and how many elements each of its casts gives."""
    before = make_fx(function, tracing_mode=mode)(x)
    after = copy.deepcopy(before)
    simplify(after)
    casts = [n.meta["val"].numel() for n in after.graph.nodes if n.target is aten._to_copy.default]
    return before, after, casts


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("case", [*MOVED, *LEFT])
def test_a_cast_goes_behind_the_views_that_read_parts(case, mode):
    body = {**MOVED, **LEFT}[case]
    x = torch.randn(4, 6).bfloat16()
    before, after, casts = traced(lambda x: body(x.float()), x, mode)
    if case in LEFT:
        assert list(map(int, casts)) == [24]
    else:
        assert casts and all(int(n) < 24 for n in casts) and sum(map(int, casts)) <= 24
    for found, expected in zip(*(torch.utils._pytree.tree_leaves(m(x)) for m in (after, before))):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    for node in after.graph.nodes:  # what is noted of a node is what it gives
        if isinstance(node.meta.get("val"), torch.Tensor) and mode == "fake":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            if node.op == "call_function":
                assert node.target(*args, **kwargs).stride() == node.meta["val"].stride()


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.float32, memory_format=torch.contiguous_format),
        lambda x: x.to("meta", torch.float32),
    ],
)
def test_a_cast_that_does_more_stays(cast):
    x = torch.randn(4, 6).bfloat16()
    _, after, _ = traced(lambda x: cast(x)[:, :2].exp(), x)
    (node,) = (n for n in after.graph.nodes if n.target is aten._to_copy.default)
    assert node.args[0].op == "placeholder"


@pytest.mark.parametrize("write", [torch.Tensor.copy_, torch.Tensor.add_])
def test_what_changes_behind_the_cast_is_cast_before(write):
    def function(x, other):
        y = x.float()
        write(x, other)
        return y[:, :2].exp()

    args = torch.randn(4, 6).bfloat16(), torch.randn(4, 6).bfloat16()
    traced = make_fx(function, tracing_mode="fake")(*args)
    simplify(traced)
    ours, plain = ([a.clone() for a in args] for _ in range(2))
    assert torch.equal(traced(*ours), function(*plain)) and torch.equal(ours[0], plain[0])


def stored(before):
    """How many tensors each group gives, of those that came after the first `before`."""
    graphs = [tsfuser._C.group_graph(k) for k in range(before, tsfuser.stats()["groups"])]
    return [len(list(graph.outputs())) for graph in graphs]


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("dynamic", [False, True])
def test_halves_that_different_groups_read(dynamic, device):
    """The first group gives no more than the half that the convolution reads."""

    def function(g, w):
        y = g.float()
        a, b = y[:, :4], y[:, 4:]
        z = F.conv2d((b.relu() * factor).bfloat16(), w)
        return torch.tanh(z.float() + a) * factor

    factor = 4 if dynamic else 2  # else the groups would be those of the test before
    run, known = torch.compile(function, backend="tsfuser", dynamic=dynamic), tsfuser.stats()["groups"]
    w = torch.randn(4, 4, 1, 1, device=device).bfloat16()
    for n, size in ((2, 6), (3, 5)) if dynamic else ((2, 6),):
        g = torch.randn(n, 8, size, size, device=device).bfloat16()
        exact = torch.tanh(F.conv2d(g[:, 4:].double().relu() * factor, w.double()) + g[:, :4].double())
        assert_matches(run(g, w), function(g, w), exact * factor, ops=10)
    given = stored(known)
    assert len(given) > 1 and set(given) == {1}


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error")
def test_a_wider_copy_is_left_to_the_group_that_reads_it(device):
    """And what is written is the narrow tensor, as in eager."""

    def function(x, w):
        y = torch.exp(x)
        wide = y.float()
        z = (y @ w).float()
        return torch.sin(wide + z), y

    run, known = torch.compile(function, backend="tsfuser"), tsfuser.stats()["groups"]
    x, w = (torch.randn(8, 8, device=device).bfloat16() for _ in range(2))
    for found, expected in zip(run(x, w), function(x, w)):
        assert_matches(found, expected, ops=10, precision=torch.bfloat16)
    assert set(stored(known)) == {1}


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error")
def test_a_block_of_a_u_net_trains_as_in_eager(device):
    torch.manual_seed(0)
    model = compiled_models.UNet(8).to(device)
    run, found = torch.compile(model, backend="tsfuser"), []
    for n in (2, 3):
        x = torch.randn(n, 8, 8, 8, device=device)
        for each, wide in ((run, False), (model, False), (copy.deepcopy(model).double(), True)):
            leaf = (x.double() if wide else x).requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=not wide):
                loss = each(leaf).square().sum()
            found.append(torch.autograd.grad(loss, leaf)[0])
        assert_matches(*found[-3:], ops=100, precision=torch.bfloat16)
