"""What the extension answers about nodes and values, for all passes."""

import torch

from tsfuser import _C
from tsfuser.graph import wrapper
from tsfuser.graph.effects import PURE, effect

GRAPH = """graph(%x : Tensor, %maybe : Tensor?, %n : int):
  %one : int = prim::Constant[value=1]()
  %half : float = prim::Constant[value=0.5]()
  %none : NoneType = prim::Constant()
  %bools : bool[] = prim::Constant[value=[1, 0]]()
  %known : int[] = prim::ListConstruct(%one, %one)
  %open : int[] = prim::ListConstruct(%one, %n)
  %pair : Tensor[] = prim::ListConstruct(%x, %x)
  %shared : Tensor[] = prim::ListConstruct(%x)
  %empty : Tensor[] = prim::ListConstruct()
  %a : Tensor = aten::cat(%pair, %one)
  %b : Tensor = aten::cat(%shared, %one)
  %c : Tensor = aten::stack(%shared, %one)
  %d : Tensor = aten::cat(%empty, %one)
  return (%a, %b, %c, %d, %known, %open, %none, %half, %bools, %maybe)
"""


def values(graph):
    """The values of the graph's top block by their names in the text, which torch does not keep."""
    made = [v for node in graph.nodes() for v in wrapper.outputs(node)]
    names = [line.split()[0][1:] for line in GRAPH.splitlines()[1:-1]]
    return {**dict(zip(names, made)), **{v.debugName(): v for v in graph.inputs()}}


def test_questions_about_values():
    graph = torch._C.parse_ir(GRAPH)
    found = values(graph)

    def true_of(question):
        return {name for name, value in found.items() if question(value)}

    assert true_of(wrapper.is_tensor) == {"x", *"abcd"}
    assert true_of(wrapper.is_constant) == {"one", "half", "none", "bools", "known"}
    assert true_of(wrapper.is_plain_list) == {"bools", "known", "open"}
    assert true_of(wrapper.is_tensor_list) == {"pair"}


def test_blocks_come_in_the_order_of_their_nodes():
    graph = torch._C.parse_ir("""graph(%c : bool, %n : int):
  %a : int = prim::If(%c)
    block0():
      %inner : int = prim::If(%c)
        block0():
          -> (%n)
        block1():
          -> (%n)
      -> (%inner)
    block1():
      -> (%n)
  %b : int = prim::If(%c)
    block0():
      -> (%n)
    block1():
      -> (%n)
  return (%a, %b)
""")
    outer, other = graph.nodes()
    assert [len(wrapper.blocks(node)) for node in (outer, other)] == [2, 2]
    (inner,) = wrapper.blocks(outer)[0].nodes()
    assert _C.blocks_within(graph) == [*outer.blocks(), *other.blocks()]
    assert list(wrapper.all_blocks(graph))[0] is graph
    assert len(list(wrapper.all_blocks(graph))) == 7
    assert _C.blocks_within(wrapper.blocks(outer)[0]) == list(inner.blocks())
    own = [node for block in wrapper.all_blocks(graph) for node in block.nodes()]
    assert wrapper.all_nodes(graph) == own == [outer, other, inner]
    assert wrapper.all_nodes_of(graph, ("prim::If",)) == own
    assert wrapper.all_nodes_of(graph, ("prim::Loop",)) == wrapper.nodes_in(wrapper.blocks(inner)[0]) == []
    assert (
        wrapper.all_nodes(wrapper.blocks(outer)[0]) == wrapper.nodes_in(wrapper.blocks(outer)[0]) == [inner]
    )
    assert wrapper.graph_inputs(graph) == list(graph.inputs())
    assert wrapper.graph_outputs(graph) == [outer.output(), other.output()]


def test_the_schema_of_an_op_that_may_be_taken_away_is_asked_anew():
    """Another op's schema may follow in the place of its own."""
    seen = []
    for arguments in ("Tensor first", "Tensor second"):
        library = torch.library.Library("tsfuser_test_questions", "DEF")
        library.define(f"op({arguments}) -> Tensor")
        graph = torch._C.parse_ir(
            "graph(%x : Tensor):\n  %y : Tensor = tsfuser_test_questions::op(%x)\n  return (%y)"
        )
        (node,) = graph.nodes()
        assert _C.schema_key(node) is None
        seen.append(wrapper.schema(node).arguments)
        library._destroy()
    assert seen == [("first",), ("second",)]


def test_schemas_have_names_of_arguments():
    graph = torch._C.parse_ir(GRAPH)
    cat = graph.findNode("aten::cat", True)
    for _ in range(2):  # asked, then remembered
        assert wrapper.schema(cat).arguments == ("tensors", "dim")
        assert wrapper.schema(graph.findNode("prim::ListConstruct", True)) is None


def test_questions_about_the_nodes_of_a_block():
    graph = torch._C.parse_ir("""graph(%c : bool, %x : Float(2, 3, strides=[3, 1], device=cpu)):
  %a : Tensor = aten::relu(%x)
  %b : Float(*, *, device=cpu) = aten::relu(%x)
  %unread : Tensor = aten::neg(%a)
  %both : Float(*, *, device=cpu), %undefined : Tensor = prim::If(%c)
    block0():
      %inner : Tensor = aten::relu(%b)
      -> (%inner, %a)
    block1():
      -> (%b, %a)
  return (%both, %a, %a)
""")
    a, b, unread, branch = graph.nodes()
    assert wrapper.nodes_of(graph, ("aten::relu", "aten::tanh")) == [a, b]
    assert wrapper.nodes_of(graph, ["aten::neg", "prim::If"]) == [unread, branch]
    assert wrapper.nodes_with_blocks(graph) == [branch]
    assert wrapper.nodes_without_types(graph) == [a, branch]
    block = wrapper.blocks(branch)[0]
    assert (
        wrapper.nodes_without_types(block) == wrapper.nodes_of(block, ("aten::relu",)) == list(block.nodes())
    )
    assert wrapper.used_outputs(unread) == [] and wrapper.used_outputs(branch) == [branch.outputsAt(0)]
    assert wrapper.ids([a.output(), b.output()]) == [a.output().unique(), b.output().unique()]
    assert list(map(wrapper.use_count, (a.output(), unread.output()))) == [5, 0]


def test_a_copy_of_nodes_reads_copies():
    graph = torch._C.parse_ir(GRAPH)
    found = values(graph)
    nodes = [found["pair"].node(), found["a"].node()]
    copy = _C.subgraph(nodes, [found["x"]], [found["one"], found["known"]], [found["a"]])
    assert [n.kind() for n in copy.nodes()] == [
        "prim::Constant",
        "prim::ListConstruct",
        "prim::ListConstruct",
        "aten::cat",
    ]
    one, known, pair, cat = copy.nodes()
    (x,) = copy.inputs()
    assert wrapper.inputs(known) == [one.output()] * 2 and wrapper.inputs(pair) == [x] * 2
    assert wrapper.inputs(cat) == [pair.output(), one.output()]
    assert list(copy.outputs()) == [cat.output()]


def test_ops_of_any_number_of_operands_are_known_to_write_nothing():
    """Their schemas do not say so; what is not known is taken for a write."""
    schemas = [
        s for s in torch._C._jit_get_all_schemas() if s.name.startswith("tsfuser::") and "..." in str(s)
    ]
    assert schemas
    for name in {s.name for s in schemas}:
        assert effect(torch._C.Graph().create(name)) == PURE, name
