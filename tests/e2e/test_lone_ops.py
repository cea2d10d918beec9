"""A batch norm with which nothing else is differentiated is a differentiable graph of its own under autocast
for CUDA (csrc_stubs/torchscript/lone_ops.cpp): on a GPU, groups compute its forward and its backward. Here
the CPU is asked as if it were one."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import all_graphs, assert_matches, groups, incoming_gradient, kinds
from tsfuser.frontends.torchscript import passes
from tsfuser.graph import worth

pytestmark = pytest.mark.graphs
NORMS = {
    "plain": {},
    "no affine": {"affine": False},
    "no statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
}


@pytest.fixture(autouse=True)
def autocast(monkeypatch):
    """Autocast for CUDA, as `torch.autocast` sets it where there is a GPU; groups as there."""
    monkeypatch.setattr(worth, "_is_on_gpu", lambda value: True)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


class Projected(nn.Module):
    """The end of an inverted residual block: whether something is added depends on an attribute."""

    def __init__(self, added: bool, **norm):
        super().__init__()
        self.norm, self.added = nn.BatchNorm2d(8, **norm), added

    def forward(self, x, other):
        y = self.norm(x)
        if self.added:
            y += other
        return torch.sort(y, 0)[0]


def made(added=False, device="cpu", **norm):
    module = type("Own", (Projected,), {})(added, **norm)  # shares its graphs with no other test's
    if module.norm.weight is not None:
        nn.init.normal_(module.norm.weight)
        nn.init.normal_(module.norm.bias)
    return module.to(device)


def image(device, dtype, memory=torch.contiguous_format):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 8, 16, 16, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).contiguous(memory_format=memory).requires_grad_()


def run(module, x, between=lambda *_: None):
    """Result, gradients and statistics of a step; `between` forward and backward something may be written
    to."""
    module.zero_grad()
    x, other = x.detach().requires_grad_(), torch.ones_like(x)
    out = module(x, other)
    between(module.norm, x, other, out)
    out.backward(incoming_gradient(out))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def exact(module, x, steps):
    module = copy.deepcopy(module).double()
    return [run(module, x.double()) for _ in range(steps)][-1]


def compare(module, x, steps=5):
    """Returns the scripted module, after as many steps as eager's was compared with."""
    eager, scripted = copy.deepcopy(module), torch.jit.script(copy.deepcopy(module))
    reference = exact(module, x, steps)
    expected = [run(eager, x) for _ in range(steps)][-1]
    with tsfuser.fuser():
        found = [run(scripted, x) for _ in range(steps)][-1]
    assert len(found) == len(expected)
    for got, want, true in zip(found, expected, reference):
        assert_matches(got, want, true, ops=200, precision=x.dtype if got.is_floating_point() else None)
    return scripted


@pytest.mark.each_value
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_alone_is_a_group_each_way(device, norm, added, training, memory):
    module = made(added, device, **NORMS[norm]).train(training)
    with passes.watching() as seen:
        compare(module, image(device, torch.bfloat16, memory))
    found = [node for o in seen for node in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    fused = {kind for group in found for kind in kinds(group)}
    assert fused & {"aten::_batch_norm_impl_index", "tsfuser::batch_norm"}
    if training or module.norm.affine:  # else what is saved is empty, for which the plain backward runs
        assert fused & {"aten::_batch_norm_impl_index_backward", "tsfuser::batch_norm_backward"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes_are_differentiated_too(request, device, dtype):
    module = made(device=device).to(dtype if dtype == torch.float64 else torch.float32)
    scripted = compare(module, image(device, dtype))
    unseen = device == "cuda" and dtype == torch.float16  # ops cast it to bfloat16, which no graph shows
    if not (unseen and request.config.getoption("--joint")):
        assert any(graph.findNode("prim::DifferentiableGraph") for graph in all_graphs(scripted))


def test_readers_that_wait_for_its_sizes_are_no_company(device):
    """Noise of the sizes of the result comes between the norm and the product, as in stochastic depth."""

    class Noisy(Projected):
        def forward(self, x, other):
            y = self.norm(x)
            noise = torch.empty([y.size(0), 1, 1, 1], dtype=y.dtype, device=y.device)
            noise.fill_(0.5)
            return torch.sort((y * noise).float(), 0)[0]

    scripted = compare(Noisy(False).to(device), image(device, torch.bfloat16))
    assert not any(graph.findNode("aten::batch_norm") for graph in all_graphs(scripted))


def test_without_autocast_eager_differentiates_it():
    torch.set_autocast_enabled("cuda", False)
    scripted = compare(made(), image("cpu", torch.bfloat16))
    assert not any(graph.findNode("prim::DifferentiableGraph") for graph in all_graphs(scripted))


def write_bias(norm, x, other, out):
    with torch.no_grad():
        norm.bias.add_(1)


def write_result(norm, x, other, out):
    with torch.no_grad():
        out.mul_(2)


def write_other(norm, x, other, out):
    other.mul_(2)


@pytest.mark.parametrize("write", [write_bias, write_result, write_other])
def test_what_eager_does_not_save_may_be_written_before_the_backward(write):
    module, x = made(added=True), image("cpu", torch.bfloat16)
    eager, scripted = copy.deepcopy(module), torch.jit.script(copy.deepcopy(module))
    with tsfuser.fuser():
        for _ in range(4):
            expected, found = run(eager, x, write), run(scripted, x, write)
            for got, want in zip(found, expected):
                assert_matches(
                    got, want, ops=20, precision=torch.bfloat16 if got.is_floating_point() else None
                )
    assert groups(scripted)


def test_a_graph_may_be_retained_and_differentiated_again():
    module, x = made(), image("cpu", torch.bfloat16)
    results = []
    for program in (module, torch.jit.script(copy.deepcopy(module))):
        with tsfuser.fuser():
            for _ in range(4):
                run(program, x)
            out = program(x, x)
            first, again = (
                torch.autograd.grad(out, x, incoming_gradient(out), retain_graph=True)[0] for _ in range(2)
            )
            assert torch.equal(first, again)
            (slope,) = torch.autograd.grad(out, x, incoming_gradient(out), create_graph=True)
            results.append(torch.autograd.grad(slope.float().square().sum(), x)[0])
    expected, found = results
    assert_matches(found, expected, ops=200)
