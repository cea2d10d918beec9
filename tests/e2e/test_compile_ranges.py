"""Ranges of numbers that are known when a graph is compiled are not made in each call."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from tsfuser.frontends.dynamo.rewrites.ranges import make_ranges

pytestmark = pytest.mark.graphs


def made(function, *args, mode="fake"):
    """Whether no range is left of `function`, whose results are as before, twice."""
    module = make_fx(function, tracing_mode=mode)(*args)
    assert "arange" in str(module.graph)
    make_ranges(module)
    module.graph.lint()
    for _ in range(2):
        results = module(*args)
        assert_close(results, function(*args), rtol=0, atol=0)
        for result in results if isinstance(results, tuple) else [results]:
            result.add_(1)  # whoever has called may do so
    return "arange" not in str(module.graph)


def test_known_ranges_are_made_once():
    x = torch.randn(3, 5)
    assert made(lambda x: x * torch.arange(5), x)
    assert made(lambda x: x * torch.arange(1, 6).unsqueeze(0).view(5) + torch.arange(0, 10, 2), x)
    assert made(lambda x: x * torch.arange(0.5, 3, 0.5, dtype=torch.float64), x)


def test_what_leaves_the_graph_is_made_in_each_call():
    x = torch.randn(5)
    assert not made(lambda x: (x + 1, torch.arange(5)), x)
    assert not made(lambda x: (x + torch.arange(5), torch.arange(5)[None].transpose(0, 1)), x[None].sum(0))

    assert not made(lambda x: (lambda p: (x * p, p.view(5, 1)))(torch.arange(5)), x)


def test_what_is_written_is_made_in_each_call():
    def function(x):
        positions = torch.arange(5)
        positions.add_(1)
        return x * positions

    assert not made(function, torch.randn(5))


@pytest.mark.parametrize("length, expected", [(1 << 13, True), ((1 << 13) + 1, False), (0, False)])
def test_long_ranges_take_no_memory_between_calls(length, expected):
    assert made(lambda x: x + torch.arange(length), torch.randn(1)) == expected


def test_ends_that_vary_are_no_constants():
    assert not made(lambda x: x * torch.arange(x.size(0)), torch.randn(5), mode="symbolic")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can make the range there")
def test_a_device_that_only_tracing_knows_is_left_alone():
    with FakeTensorMode():
        module = make_fx(lambda x: x * torch.arange(5, device="cuda"))(torch.empty(5, device="cuda"))
    make_ranges(module)
    assert "arange" in str(module.graph)


def positions_of(x, rates):
    angles = torch.arange(x.size(0), device=x.device)[:, None] * rates
    return (x * angles.cos()).tanh()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_makes_no_known_range(device, dynamic):
    torch._dynamo.reset()
    function = torch.compile(positions_of, backend="tsfuser", dynamic=dynamic)
    rates = torch.rand(4, device=device)
    for length in (7, 9):
        x = torch.randn(length, 4, device=device, requires_grad=True)
        with torch.inference_mode():
            assert_close(function(x, rates), positions_of(x, rates))
        function(x, rates).sum().backward()
        given, x.grad = x.grad, None
        positions_of(x, rates).sum().backward()
        assert_close(given, x.grad)
        with torch.profiler.profile() as profile:
            function(x, rates)
        assert any(e.name == "aten::arange" for e in profile.events()) == dynamic
