"""`_C.write_graph` and `read_graph`: a graph comes back as it was."""

import pytest
import torch

from kit.support import fuse, groups, script
from tsfuser import _C

#: text -> what it holds that torch's own reader of graphs cannot read, or reads as something else
GRAPHS = {
    "numbers": """graph(%x : Tensor, %n : int):
  %f : float = prim::Constant[value=0.10000000000000001]()
  %i : int = prim::Constant[value=-3]()
  %s : str = prim::Constant[value="a \\"b\\""]()
  %none : NoneType = prim::Constant()
  %true : bool = prim::Constant[value=1]()
  %d : Device = prim::Constant[value="cpu"]()
  %list : int[] = prim::ListConstruct(%n, %i)
  %fixed : int[] = prim::Constant[value=[1, 2, 3]]()
  %y : Tensor = aten::mul(%x, %f)
  return (%y, %list, %s, %none, %true, %d, %fixed)""",
    "types": """graph(%x : Float(3, 5, strides=[7, 1], requires_grad=1, device=cpu),
      %y : Half(2, 3, device=cuda:1), %z : Tensor?, %w : (int, Tensor[]),
      %u : Double(*, *, requires_grad=0), %v : Scalar, %t : complex):
  return (%x, %y, %z, %w, %u, %v, %t)""",
    "blocks": """graph(%x : Tensor, %n : int, %c : bool):
  %true : bool = prim::Constant[value=1]()
  %one : int = prim::Constant[value=1]()
  %y : Tensor = prim::Loop(%n, %true, %x)
    block0(%i : int, %a : Tensor):
      %b : Tensor = prim::If(%c)
        block0():
          %p : Tensor = aten::add(%a, %x, %one)
          -> (%p)
        block1():
          -> (%a)
      -> (%true, %b)
  return (%y)""",
}


def as_text(graph):
    return torch._C._jit_pass_canonicalize(graph).str(False)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_come_back(name):
    graph = torch._C.parse_ir(GRAPHS[name])
    again = _C.read_graph(_C.write_graph(graph))
    assert str(again) == str(graph)
    for a, b in zip(again.inputs(), graph.inputs()):
        assert str(a.type()) == str(b.type()) and a.type() == b.type() and a.debugName() == b.debugName()


def test_tensors_and_complex_numbers_come_back():
    table = torch.tensor([1.5, float("nan"), float("inf"), -0.0])

    def f(x):
        return x * 2j + table.sum()

    graph = torch.jit.trace(f, torch.ones(3)).graph
    again = _C.read_graph(_C.write_graph(graph))
    constants = [
        [n.output().toIValue() for n in g.nodes() if n.kind() == "prim::Constant"] for g in (graph, again)
    ]
    assert len(constants[0]) == len(constants[1]) > 2
    for a, b in zip(*constants):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))
        else:
            assert repr(a) == repr(b)


def test_groups_come_back_under_their_numbers(device):
    scripted = script("def f(x: Tensor, y: Tensor):\n    return torch.relu(x * y + 1).sum(0)\n")
    fuse(scripted, torch.randn(5, 3, device=device), torch.randn(3, device=device))
    (group,) = groups(scripted)
    graph = torch._C.Graph()
    copies = {v.unique(): graph.addInput() for v in group.inputs()}
    copy = graph.appendNode(graph.createClone(group, lambda v: copies[v.unique()]))
    graph.registerOutput(copy.output())
    again = _C.read_graph(_C.write_graph(graph))
    (found,) = again.findAllNodes("prim::CudaFusionGroup", True)
    assert found.i("cache_id") == group.i("cache_id")
    assert found.g("Subgraph").str(False) == _C.group_graph(group.i("cache_id")).str(False)


def test_lines_of_the_program_come_back():
    graph = torch._C.parse_ir("graph(%x : Tensor):\n  %y : Tensor = aten::relu(%x)\n  return (%y)")
    (node,) = graph.nodes()
    _C.set_place(node, "model.py", 12, "    y = x.relu()")
    (again,) = _C.read_graph(_C.write_graph(graph)).nodes()
    assert _C.frames(again)[0][:2] == ("model.py", 12) and "y = x.relu()" in _C.frames(again)[0][3]


def test_what_cannot_be_written_is_refused():
    graph = torch._C.parse_ir("graph(%x : Tensor):\n  return (%x)")
    graph.addInput().setType(torch._C.DictType(torch._C.IntType.get(), torch._C.TensorType.get()))
    with pytest.raises(ValueError, match="cannot be stored"):
        _C.write_graph(graph)


@pytest.mark.parametrize("cut", [0, 1, 40, -1, -40])
def test_other_bytes_are_refused(cut):
    written = _C.write_graph(torch._C.parse_ir(GRAPHS["blocks"]))
    with pytest.raises(RuntimeError):
        _C.read_graph(written[:cut] if cut else b"")
