"""torch.compile: what copies, repeats or replaces parts of a tensor is one kernel with what is around it."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.rewrites import copies

aten = torch.ops.aten

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


def part(x, y):
    z = x * 2
    z[:, 1:3] = y[:, :2] + 1
    return z * 3


def last_row(x, y):
    z = x * 2
    z[-1] = y[0].sin()
    return z + 1


def columns_of_channels_last(x, y):
    z = x.reshape(2, 3, 2, 2).to(memory_format=torch.channels_last) * 2
    z[:, :, :, 1:] = y[:2, :1] + 1
    return z * 3


def several_parts(x, y):
    z = x * 2
    z[:2] = y[:2]
    z[2:4] = y[:2] + 1
    z[5, 1:] = 7
    return z * 3


def every_second(x, y):
    z = x * 2
    z[:, ::2] = y[:, :2] + 1
    return z * 3


def nothing(x, y):
    z = x * 2
    z[3:3] = y[:0]
    return z * 3


def whole(x, y):
    z = torch.empty_like(x)
    z.copy_(y[0] * 2)
    return z + 1, z.view(-1) * 2


def other_dtype(x, y):
    z = torch.empty(6, 4, dtype=torch.float64, device=x.device)
    z.copy_(y * 2)
    return z


def constants(x, y):
    table = torch.tensor([1.0, 2, 3, 4], device=x.device)
    return x * table + torch.tensor(3.0), torch.tensor([1, 2, 3])


def repeats(x, y):
    return (x * 2).repeat(2, 3) + 1, y[0].sin().repeat(2, 1, 2), (x + 1).t().repeat(1, 2) * 2


def places(x, y):
    return torch.round(x * 20, decimals=2) + 1, torch.round(x * 200, decimals=-1) + 1


PROGRAMS = [
    part, last_row, columns_of_channels_last, several_parts, every_second, nothing, whole, other_dtype,
    constants, repeats, places,
]  # fmt: skip
UNFUSED = (several_parts, every_second, nothing, columns_of_channels_last)


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_programs_that_copy(function, device):
    x, y = (torch.randn(6, 4, device=device) for _ in range(2))
    run = torch.compile(function, backend="tsfuser")
    for _ in range(2):
        ours, plain = run(x, y), function(x, y)
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (ours, plain))):
            assert_matches(a, b, ops=16)
    found = tsfuser.stats()
    assert found["left_to_python"] == {} and found["fallbacks"] == {}
    assert function in UNFUSED or found["launches"] > 0


def test_gradients_go_through_parts(device):
    def function(x, y):
        return (part(x, y) * last_row(x, y)).sum()

    found = []
    for run in (torch.compile(function, backend="tsfuser"), function):
        torch.manual_seed(0)
        args = [torch.randn(6, 4, device=device, requires_grad=True) for _ in range(2)]
        found.append(torch.autograd.grad(run(*args), args))
    for ours, plain in zip(*found):
        assert_matches(ours, plain, ops=64)


def test_a_constant_that_is_returned_is_another_one_in_each_call():
    run = torch.compile(lambda x: (torch.tensor([1.0, 2.0]), x * 2 + 1), backend="tsfuser")
    first, _ = run(torch.ones(3))
    first.zero_()
    assert run(torch.ones(3))[0].tolist() == [1.0, 2.0]


def test_a_part_of_an_input_is_written_in_place(device):
    def function(cache, x):
        cache[:, 1:3] = x * 2 + 1
        return cache.sum()

    ours, plain = torch.zeros(4, 6, device=device), torch.zeros(4, 6, device=device)
    x, run = torch.randn(4, 2, device=device), torch.compile(function, backend="tsfuser")
    for _ in range(2):
        assert_matches(run(ours, x), function(plain, x), ops=32)
        assert_matches(ours, plain, ops=4)
    assert "slice_scatter" not in str(tsfuser.explain(run, ours, x))


def test_arguments_of_a_part_may_be_given_by_name(device):
    def function(x, y):
        z = x * 2
        return torch.slice_scatter(z, y, 1, 2, 4) + torch.select_scatter(z, y[:, 0], 1, -1)

    x, y = torch.randn(4, 6, device=device), torch.randn(4, 2, device=device)
    graph = make_fx(function, tracing_mode="fake")(x, y).graph
    for node in graph.nodes:
        names = {
            aten.slice_scatter.default: ("dim", "start", "end"),
            aten.select_scatter.default: ("dim", "index"),
        }
        if node.target in names:
            node.kwargs = dict(reversed(list(zip(names[node.target], node.args[2:]))))
            node.args = node.args[:2]
            assert copies.part_replaced(node)
    assert_matches(torch.fx.GraphModule(torch.nn.Module(), graph)(x, y), function(x, y), ops=8)
