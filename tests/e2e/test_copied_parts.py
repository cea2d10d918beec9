"""Parts of a row-major copy in training, as of the packed projection of `nn.MultiheadAttention`: each part is
copied alone (csrc_stubs/torchscript/copied_parts.cpp), and one group puts their gradients together."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs, assert_matches, fresh, incoming_gradient, kinds
from tsfuser.frontends.torchscript import passes

pytestmark = pytest.mark.graphs


class Packed(nn.Module):
    """A norm, and query, key and value of an attention, as `torch.nn.functional` takes them apart. What reads
    them has no derivative in autodiff, as `scaled_dot_product_attention` has none."""

    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(16), nn.Linear(16, 48)

    def forward(self, x):
        x = self.norm(torch.tanh(x)).transpose(0, 1)
        length, batch, width = x.size(0), x.size(1), x.size(-1)
        packed = self.project(x).unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        packed = packed.contiguous()
        q, k, v = packed[0], packed[1], packed[2]
        self.touch(q)
        q = q.view(length, batch * 2, 8).transpose(0, 1)
        k = k.view(length, batch * 2, 8).transpose(0, 1)
        v = v.view(length, batch * 2, 8).transpose(0, 1)
        return torch.sort(torch.sort(q, 0)[0] * torch.sort(k, 1)[0] + torch.sort(v, 2)[0], 0)[0]

    def touch(self, q):
        pass


class Written(Packed):
    def touch(self, q):
        q.mul_(2.0)


class Sections(nn.Module):
    """Sizes that `unflatten` finds out, and a part from the end."""

    def forward(self, x):
        y = torch.tanh(x).unflatten(1, (-1, 4)).transpose(0, 1).contiguous()
        return torch.sort(y[0], 0)[0] * torch.sort(y[-1], 1)[0]


class Rows(nn.Module):
    """Nothing is transposed, so nothing copied."""

    def forward(self, x):
        y = torch.tanh(x).unflatten(1, (-1, 4)).contiguous()
        return torch.sort(y[0], 0)[0] * torch.sort(y[-1], 1)[0]


def own(module, *arguments):
    """One that shares its graphs with no other test's."""
    return type("Own", (module,), {})(*arguments)


def step(module, x):
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = module(x)
    out.backward(incoming_gradient(out))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def compare(module, x, steps=4, ops=200):
    """Returns the scripted module, and the graphs that groups were sought in."""
    eager, scripted = copy.deepcopy(module), torch.jit.script(copy.deepcopy(module))
    exact = step(copy.deepcopy(module).double(), x.double())
    expected = step(eager, x)
    with tsfuser.fuser(), passes.watching() as seen:
        found = [step(scripted, x) for _ in range(steps)][-1]
        for got, want, true in zip(found, expected, exact):
            assert_matches(got, want, true, ops=ops, strides=got is found[0])
    return scripted, [outcome.graph for outcome in seen]


def nodes(graphs, kind):
    return [node for graph in graphs for node in graph.findAllNodes(kind, True)]


def image(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(5, 17, 16, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_group_puts_the_gradients_of_the_parts_together(device, dtype):
    module = own(Packed).to(device, dtype)
    _, graphs = compare(module, image(device, dtype))
    found = [kinds(group).count("aten::select_backward") for group in nodes(graphs, "prim::CudaFusionGroup")]
    assert 3 in found and sum(found) == 3
    assert not nodes(graphs, "aten::select_backward") and not nodes(graphs, "aten::contiguous")


def test_the_norm_before_the_product_is_in_the_same_graph():
    """Its last size is asked of the weight."""
    scripted, _ = compare(own(Packed), image())
    found = nodes(all_graphs(scripted), "prim::DifferentiableGraph")
    inside = [{node.kind() for node in graph.g("Subgraph").nodes()} for graph in found]
    assert any({"aten::native_layer_norm", "aten::linear"} <= each for each in inside)


def test_parts_that_are_written_to_stay_views():
    _, graphs = compare(own(Written), image())
    assert not any("aten::clone" in kinds(group) for group in nodes(graphs, "prim::CudaFusionGroup"))


@pytest.mark.filterwarnings("ignore:a fusion group")
@pytest.mark.parametrize("module, copied", [(Sections, True), (Rows, False)])
def test_unflatten_with_a_size_that_it_finds_out(module, copied):
    scripted, graphs = compare(own(module), torch.randn(3, 12, 5))
    assert ("aten::clone" in str(graphs)) == copied
    with pytest.raises(RuntimeError, match="unflatten"), tsfuser.fuser():
        scripted(torch.randn(3, 10, 5, requires_grad=True))


def test_other_sizes_and_no_gradient_follow():
    module = own(Packed)
    scripted, _ = compare(module, image())
    with tsfuser.fuser():
        for x in (image()[:2, :3], image()[:1, :1], image()[:0]):
            for got, want in zip(step(scripted, x), step(module.requires_grad_(), x)):
                assert_matches(got, want, ops=200, strides=False)
        with torch.no_grad():
            for _ in range(3):
                assert_matches(scripted(image()), module(image()), ops=50)


def test_a_graph_may_be_retained_and_differentiated_again():
    module = own(Packed)
    results = []
    for program in (module, torch.jit.script(copy.deepcopy(module))):
        with tsfuser.fuser():
            for _ in range(4):
                step(program, image())
            x = image().requires_grad_()
            out = program(x)
            first, again = (
                torch.autograd.grad(out, x, incoming_gradient(out), retain_graph=True)[0] for _ in range(2)
            )
            if by_joint_graphs():  # the first of them profiles the part of the backward that this takes
                torch.testing.assert_close(first, again, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(first, again)
            (slope,) = torch.autograd.grad(out, x, incoming_gradient(out), create_graph=True)
            results.append(torch.autograd.grad(slope.square().sum(), x)[0])
    expected, found = results
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def written_before_the_parts(x, w):
    y = torch.tanh(x.masked_fill(x > 2.0, 0.5) * w)
    whole = y.transpose(0, 1).contiguous()
    y.mul_(2.0)
    return whole[0] * whole[1] + whole[0].sum(), y


def written_behind_the_parts(x, w):
    """Where a dim has one element, `contiguous` returns its operand, so the parts are views of a tensor that
    changes."""
    y = torch.tanh(x.masked_fill(x > 2.0, 0.5) * w)
    whole = y.transpose(0, 1).contiguous()
    first, second = whole[0], whole[1]
    y.mul_(2.0)
    return first * second + first.sum(), y


def of_an_input(x, w):
    x = x.masked_fill(x > 2.0, 0.5)
    whole = w.transpose(0, 1).contiguous()
    w.mul_(2.0)
    return whole[0] * whole[1] * x.sum(), w


def written_by_another_name(x, w):
    """`type_as` and `dropout` hand their operand on, which their schemas do not say."""
    y = torch.tanh(x.masked_fill(x > 2.0, 0.5) * w)
    whole = y.transpose(0, 1).contiguous()
    own, kept = y.type_as(x), torch.dropout(y, 0.5, False)
    own.mul_(2.0)
    kept.add_(1.0)
    return whole[0] * whole[1] + whole[0].sum(), own, kept


WRITTEN = [
    *product([written_before_the_parts, written_behind_the_parts, of_an_input], [False, True]),
    (written_by_another_name, False),  # trained, plain TorchScript moves such a write as well
]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("function, trained", WRITTEN)
def test_the_parts_of_what_is_written_to_are_those_of_the_whole_copy(function, rows, trained, device):
    scripted = fresh(function)
    with tsfuser.fuser():
        for _ in range(4):
            x, w = torch.randn(rows, 4, device=device), torch.randn(rows, 4, device=device)
            found = scripted(x.clone().requires_grad_(trained), w.clone())
            for got, want in zip(found, function(x.clone().requires_grad_(trained), w.clone())):
                torch.testing.assert_close(got, want)
