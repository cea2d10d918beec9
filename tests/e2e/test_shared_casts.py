"""Casts of autocast that several differentiable graphs read, in training."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import assert_matches

pytestmark = pytest.mark.graphs


class Parted(torch.nn.Module):
    """Both graphs read the same casts of `c`; the view between them parts them. Torch asks tsfuser about
    nodes that NNC does not know: the attribute; casts before that stay."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((9,), 0.5))

    def forward(self, x: Tensor, y: Tensor, c: Tensor):
        first = torch.tanh(self.scale * x * c + c)
        second = torch.tanh(y * c * 0.5).movedim(0, 1)
        return torch.sigmoid(first * second + c) * second


class Whole(Parted):
    def forward(self, x: Tensor, y: Tensor, c: Tensor):
        return torch.tanh(self.scale * x * c) + torch.sigmoid(y * c) * c


def narrow_tensors(device):
    generator = torch.Generator().manual_seed(6)
    x, y = (
        torch.randn(9, 9, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in range(2)
    )
    return x, y, torch.randn(9, generator=generator).to(device, torch.bfloat16).requires_grad_()


def autocast_training(module, tensors, kind):
    """Result and gradients of the scripted module, its graph, and those that the pass saw."""
    from tsfuser.frontends.torchscript import passes

    # else it shares what was compiled for the last of its class
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    scripted = torch.jit.script(module)
    with tsfuser.fuser(), passes.watching() as seen, torch.autocast(kind, torch.bfloat16):
        for _ in range(4):
            for t in tensors:
                t.grad = None
            out = scripted(*tensors)
            out.float().sum().backward()
        graph = scripted.graph_for(*tensors)
    return [out, *(t.grad for t in tensors)], graph, [outcome.graph for outcome in seen]


@pytest.mark.parametrize("model", [Parted, Whole])
def test_casts_that_several_graphs_read(device, model):
    kind = torch.device(device).type
    tensors = narrow_tensors(device)
    fused, _, _ = autocast_training(model().to(device), tensors, kind)
    results = []
    for dtype in (None, torch.float64):
        given = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
        with torch.autocast(kind, torch.bfloat16, enabled=dtype is None):
            result = model().to(device, dtype)(*given)
        result.sum().backward()
        results.append([result, *(t.grad for t in given)])
    for got, eager, true in zip(fused, *results):
        assert_matches(got, eager.to(got.dtype), true, ops=80, strides=False, precision=torch.bfloat16)


def test_no_graph_loses_its_ops_to_a_shared_cast(device):
    _, graph, _ = autocast_training(Parted().to(device), narrow_tensors(device), torch.device(device).type)
    outside = [n.kind() for n in graph.nodes()]
    assert "aten::mul" not in outside and "aten::tanh" not in outside
    # no view parts a joint graph
    assert len(graph.findAllNodes("prim::DifferentiableGraph", True)) == 2 - by_joint_graphs()


def test_in_one_graph_there_is_one_cast(device):
    """Each reader had its own before autodiff."""
    _, graph, graphs = autocast_training(
        Whole().to(device), narrow_tensors(device), torch.device(device).type
    )
    assert len(graph.findAllNodes("prim::DifferentiableGraph", True)) == 1
    inside = [n.g("Subgraph") for n in graphs[0].findAllNodes("prim::CudaFusionGroup", True)]
    nodes = [n for g in (graphs[0], *inside) for n in g.nodes()]
    wanted = "aten::to" if by_joint_graphs() else "aten::_autocast_to_full_precision"
    casts = [n for n in nodes if n.kind() == wanted]
    assert casts and len({n.inputsAt(0).debugName() for n in casts}) == len(casts)


class Normal(torch.nn.Module):
    """Two blocks with a root mean square norm each, which computes in float32 whatever it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.full((9,), w)) for w in (0.5, 1.5))

    def norm(self, x: Tensor, weight: Tensor):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)

    def forward(self, x: Tensor, y: Tensor, c: Tensor):
        x = x + torch.tanh(self.norm(x, self.first) * c)
        return x + torch.nn.functional.linear(self.norm(x, self.second), y)


class ReturnsCast(Normal):
    def forward(self, x: Tensor, y: Tensor, c: Tensor):
        wide = x.float()
        return wide, torch.tanh(wide * c) * wide.pow(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_that_may_change_nothing_are_in_the_graph(device, dtype):
    """So a group adds the gradients of a value and of its cast, and also sums that norms read."""
    kind = torch.device(device).type
    tensors = [t.detach().to(dtype).requires_grad_() for t in narrow_tensors(device)]
    fused, graph, _ = autocast_training(Normal().to(device), tensors, kind)
    assert len(graph.findAllNodes("prim::DifferentiableGraph", True)) == 1
    assert [n.kind() for n in graph.nodes() if n.kind().startswith("aten::") and "Tensor" in str(n)] == []
    results = []
    for wide in (None, torch.float64):
        given = [t.detach().to(wide or t.dtype).requires_grad_() for t in tensors]
        with torch.autocast(kind, torch.bfloat16, enabled=wide is None):
            result = Normal().to(device, wide)(*given)
        result.float().sum().backward() if wide is None else result.sum().backward()
        results.append([result, *(t.grad for t in given)])
    for got, eager, true in zip(fused, *results):
        assert_matches(got, eager.to(got.dtype), true, ops=80, strides=False, precision=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_that_is_returned_shares_memory_as_in_eager(device, dtype):
    kind = torch.device(device).type
    tensors = [t.detach().to(dtype).requires_grad_() for t in narrow_tensors(device)]
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    eager = ReturnsCast().to(device)
    scripted = torch.jit.script(eager)
    with tsfuser.fuser(), torch.autocast(kind, torch.bfloat16):
        for _ in range(4):
            wide, out = scripted(*tensors)
            (out.float().sum() + wide.sum()).backward()
        expected = eager(*tensors)
    assert (wide.data_ptr() == tensors[0].data_ptr()) == (dtype == torch.float32)
    assert (expected[0].data_ptr() == tensors[0].data_ptr()) == (dtype == torch.float32)
    torch.testing.assert_close(wide, expected[0])
