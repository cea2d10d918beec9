"""The order of a backward's nodes: what frees memory comes first."""

import copy

import pytest
import torch
from torch import nn

from kit.support import assert_matches
from tsfuser.frontends.dynamo.groups import passes
from tsfuser.frontends.dynamo.groups.order import free_early
from tsfuser.frontends.dynamo.groups.scalar_ops import group_scalar_ops

pytestmark = pytest.mark.graphs

BIG = "Float(512, 256, strides=[256, 1], requires_grad=0, device=cpu)"
TURNED = "Float(256, 512, strides=[1, 256], requires_grad=0, device=cpu)"
SMALL = "Float(256, 256, strides=[256, 1], requires_grad=0, device=cpu)"

LINEAR = f"""
graph(%g : {BIG}, %w : {SMALL}, %saved : {BIG}):
  %x : {BIG} = aten::mm(%g, %w)
  %y : {BIG} = aten::relu(%x)
  %t : {TURNED} = aten::t(%saved)
  %dw : {SMALL} = aten::mm(%t, %g)
  return (%y, %dw)
"""


def order_of(text):
    """The kinds of the graph's nodes, once they are in order."""
    graph = torch._C.parse_ir(text)
    free_early(graph)
    graph.lint()
    return [node.kind().removeprefix("aten::") for node in graph.nodes()]


def test_what_reads_a_saved_tensor_last_comes_first():
    assert order_of(LINEAR) == ["t", "mm", "mm", "relu"]


def test_what_frees_nothing_stays():
    """Who returns the saved tensor, or reads it later, keeps it alive."""
    unmoved = ["mm", "relu", "t", "mm"]
    assert order_of(LINEAR.replace("(%y, %dw)", "(%y, %dw, %saved)")) == unmoved
    assert order_of(LINEAR.replace("(%y, %dw)", "(%y, %dw, %t)")) == unmoved


def test_what_makes_more_than_it_frees_stays():
    assert order_of(LINEAR.replace(f"%dw : {SMALL}", f"%dw : {BIG}")) == ["mm", "relu", "t", "mm"]


@pytest.mark.parametrize("writer", ["aten::relu_(%g)", "aten::relu_(%saved)"])
def test_nothing_passes_what_writes_to_its_operands(writer):
    text = LINEAR.replace("  %t :", f"  %z : {BIG} = {writer}\n  %t :")
    assert order_of(text)[-2:] == ["t", "mm"]


UPDATE = f"""
graph(%g : {BIG}, %w : {SMALL}, %saved : {BIG}):
  %x : {BIG} = aten::mm(%g, %w)
  %new : {SMALL} = mine::group(%w, %saved)
  return (%x, %new)
"""
STORED = f"""
graph(%old : {SMALL}, %saved : {BIG}):
  %none : NoneType = prim::Constant()
  %sum : Float(requires_grad=0, device=cpu) = aten::sum(%saved, %none)
  %new : {SMALL} = aten::mul(%old, %sum)
  return (%new)
"""


@pytest.mark.parametrize("stores", [True, False])
def test_nothing_passes_a_group_that_writes_to_its_operands(stores):
    subgraph = torch._C.parse_ir(STORED)
    if stores:
        (new,) = subgraph.outputs()
        store = subgraph.create("tsfuser::store", [next(subgraph.inputs()), new], 1)
        store.insertAfter(new.node())
        subgraph.return_node().replaceInput(0, store.output())
    graph = torch._C.parse_ir(UPDATE)
    place = graph.findNode("mine::group")
    group = graph.create("prim::CudaFusionGroup", list(place.inputs()), 1)
    group.insertBefore(place)
    group.g_("Subgraph", subgraph)
    group.output().setType(place.output().type())
    place.output().replaceAllUsesWith(group.output())
    place.destroy()
    free_early(graph)
    kinds = [node.kind() for node in graph.nodes()]
    assert kinds == ["aten::mm", "prim::CudaFusionGroup"][:: 1 if stores else -1]


def test_random_numbers_are_drawn_in_the_same_order():
    draw = f"""
graph(%a : {BIG}, %b : {BIG}):
  %none : NoneType = prim::Constant()
  %x : {BIG} = aten::bernoulli(%a, %none)
  %y : {BIG} = aten::bernoulli(%b, %none)
  %d : int[] = prim::Constant[value=[0, 1]]()
  %f : bool = prim::Constant[value=0]()
  %s : Float(requires_grad=0, device=cpu) = aten::sum(%y, %d, %f, %none)
  return (%x, %s)
"""
    assert [kind for kind in order_of(draw) if kind == "bernoulli" or kind == "sum"] == [
        "bernoulli",
        "bernoulli",
        "sum",
    ]


def test_gradients_of_weights_come_before_those_of_inputs(forgotten, fused_or_error, monkeypatch):
    """In the backward alone, of the second layer: what the third has saved, the gradient of tanh reads again,
    and the first has no gradient of its input."""
    orders = []

    def products(graph):
        return [n.output().type().sizes() for n in graph.nodes() if n.kind() == "aten::mm"]

    def recorded(graph):
        orders.append(products(graph))
        free_early(graph)
        orders.append(products(graph))

    monkeypatch.setattr(passes, "free_early", recorded)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 256), nn.Tanh(), nn.Linear(256, 64))
    x = torch.randn(640, 96)
    runs = []
    for each, given in ((copy.deepcopy(model), x), (model, x), (copy.deepcopy(model).double(), x.double())):
        call = each if runs else torch.compile(each, backend="tsfuser")
        y = call(given)
        y.square().sum().backward()
        runs.append([y.detach(), *(p.grad for p in each.parameters())])
    third, first = [[640, 256], [64, 256]], [[192, 96]]
    assert orders == [
        [*third, [640, 192], [256, 192], *first],
        [*third, [256, 192], [640, 192], *first],
    ]
    for ours, eager, reference in zip(*runs):
        assert_matches(ours, eager, reference, 640 * 256)


SCALAR = "Float(requires_grad=0, device=cpu)"
DRAWN = f"""
graph(%s : {SCALAR}, %x : {BIG}):
  %none : NoneType = prim::Constant()
  %one : int = prim::Constant[value=1]()
  %a : {SCALAR} = aten::mul(%s, %s)
  %b : {SCALAR} = aten::add(%a, %s, %one)
  %first : <first>
  %second : {BIG} = <second>
  %c : {SCALAR} = aten::sqrt(%b)
  return (%first, %second, %c)
"""
LIBRARY = torch.library.Library("order_of_effects", "DEF")
LIBRARY.define("say(Tensor x) -> Tensor")  # which may print
EFFECTS = {
    "draw": (f"{SCALAR} = aten::bernoulli(%b, %none)", "aten::bernoulli(%x, %none)"),
    "unknown": (f"{SCALAR} = order_of_effects::say(%b)", "order_of_effects::say(%x)"),
    "write": (f"{BIG} = aten::mul(%x, %b)", "aten::relu_(%x)"),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_arithmetic_of_numbers_leaves_effects_in_their_order(effect):
    """The group of %b and %c stands where %c stood. What reads %b is behind it, and so is what must follow
    that."""
    first, second = EFFECTS[effect]
    graph = torch._C.parse_ir(DRAWN.replace("<first>", first).replace("<second>", second))
    group_scalar_ops(graph)
    graph.lint()
    nodes = [node for node in graph.nodes() if not node.kind().startswith("prim::")]
    first, second, _ = graph.outputs()
    assert [node.output().unique() for node in nodes] == [first.unique(), second.unique()]
    assert graph.findNode("prim::CudaFusionGroup") is not None
