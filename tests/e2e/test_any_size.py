"""`tsfuser.compile`: one graph for all sizes, traced once."""

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.testing import assert_close

import tsfuser
from tsfuser.frontends.dynamo import watch

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)
        self.scale = 0.75

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def graphs():
    return counters["stats"]["unique_graphs"]


def step(run, x):
    leaf = x.clone().requires_grad_()
    out = run(leaf)
    out.square().sum().backward()
    return out.detach(), leaf.grad


def test_a_second_size_needs_no_new_graph_and_no_kernel(device):
    module = Block().to(device)
    run, known = tsfuser.compile(module), graphs()
    step(run, torch.randn(4, 10, 16, device=device))
    kernels = tsfuser.stats()["kernels_compiled"]
    for sizes in ((6, 10), (2, 31), (33, 7), (4, 10)):
        x = torch.randn(*sizes, 16, device=device)
        for ours, eager in zip(step(run, x), step(module, x)):
            assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert graphs() - known == 1
    assert tsfuser.stats()["kernels_compiled"] == kernels


def test_sizes_of_one_and_none_are_right(device):
    run = tsfuser.compile(lambda x: torch.softmax(x * 2, -1).sum(0))
    for sizes in ((3, 5), (1, 5), (3, 1), (0, 5), (7, 9)):
        x = torch.randn(sizes, device=device)
        assert_close(run(x), torch.softmax(x * 2, -1).sum(0))


def test_a_program_with_floats_is_traced_once(monkeypatch):
    """TorchDynamo's own `dynamic=True` makes symbols of them, and then has to begin again."""
    module, x = Block(), torch.randn(4, 16)
    arrived, traced = watch.arrived, []
    monkeypatch.setattr(watch, "arrived", lambda module: traced.append(module) or arrived(module))
    found = []
    for run in (tsfuser.compile(module), torch.compile(module, backend="tsfuser", dynamic=True)):
        torch._dynamo.reset()
        traced.clear()
        assert_close(run(x), module(x))
        found.append(len(traced))
    assert found == [1, 2]


def test_new_values_of_a_float_are_one_more_graph():
    known = graphs()
    run = tsfuser.compile(lambda x, scale: (x * scale).cos())
    x = torch.randn(5, 7)
    for k in range(12):
        assert_close(run(x, 0.5 + k / 4), (x * (0.5 + k / 4)).cos())
    assert graphs() - known == 2


def test_a_number_that_varies_is_in_the_first_graph():
    known = graphs()
    run = tsfuser.compile(lambda x, n: (x[:n] * n).cos())
    x = torch.randn(19, 7)
    for n in (4, 9, 17, 2):
        assert_close(run(x, n), (x[:n] * n).cos())
    assert graphs() - known == 1


def test_a_decorator_with_and_without_options():
    @tsfuser.compile
    def plain(x):
        return x.sin() * 2 + 1

    @tsfuser.compile(fullgraph=True, options={"recompute": False})
    def chosen(x):
        return x.sin() * 2 + 1

    class Model:
        @tsfuser.compile
        def call(self, x):
            return x.sin() * 2 + 1

    for n in (3, 4):
        x = torch.randn(n, 5)
        for run in (plain, chosen, Model().call):
            assert_close(run(x), x.sin() * 2 + 1)


def test_torchs_configuration_is_as_before_also_behind_an_exception():
    from torch._dynamo import config

    def fails(x):
        if x.numel():
            raise ValueError("of the program")
        return x

    with pytest.raises(ValueError, match="of the program"):
        tsfuser.compile(fails)(torch.ones(3))
    tsfuser.compile(lambda x: x.sin() + 1)(torch.ones(3))
    assert config.specialize_float is False and config.assume_static_by_default is True


def test_warm_compiles_what_the_first_call_needs():
    module = Block()
    run = tsfuser.compile(module)
    tsfuser.warm(run, (torch.randn(4, 16, requires_grad=True),), training=True)
    kernels = tsfuser.stats()["kernels_compiled"]
    step(run, torch.randn(5, 16))
    assert tsfuser.stats()["kernels_compiled"] == kernels
    assert "fused in 3 groups" in str(tsfuser.explain(run, torch.randn(6, 16)))


def test_what_torch_does_not_compile_runs_as_it_is():
    run = tsfuser.compile(torch.compiler.disable(lambda x: x.sin() + 1))
    x = torch.randn(3)
    assert_close(run(x), x.sin() + 1)


def test_mistakes_are_torchs_or_the_backends():
    with pytest.raises(TypeError):
        tsfuser.compile(lambda x: x, dynamic=False)
    with pytest.raises(Exception, match="no mode 'max'"):
        tsfuser.compile(lambda x: x.sin() * 2, mode="max")(torch.ones(3))
    with pytest.raises(Exception, match="recompute"):
        tsfuser.compile(lambda x: x.sin() * 2, options={"recomput": True})(torch.ones(3))
