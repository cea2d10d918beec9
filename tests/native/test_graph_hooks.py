"""The pass hook, profiling of our kinds, and the graph passes that torch has in C++ only."""

import pytest
import torch

from kit import other_fusers
from tsfuser.frontends.torchscript.profile import remove_profile_nodes
from tsfuser.planning import failures


@pytest.fixture
def executor():
    """Profiling executor with the texpr fuser off, as `torch.jit.fuser("fuser2")` has it."""
    with other_fusers.kept():
        torch._C._jit_set_texpr_fuser_enabled(False)
        yield


def scripted():
    def f(a, b):
        return torch.relu(a * b) + 1

    return torch.jit.script(f)


def test_pass_gets_a_profiled_copy_and_its_graph_is_used(native, executor):
    seen = []

    def rewrite(graph):
        seen.append(str(graph))
        node = graph.findNode("aten::relu")
        node.output().replaceAllUsesWith(node.inputsAt(0))
        return graph

    native.set_pass(rewrite)
    native.set_enabled(True)
    f, a = scripted(), torch.full((3,), -2.0)
    results = [f(a, torch.ones(3)) for _ in range(4)]
    assert "prim::profile" in seen[0] and "Float(3, strides=[1]" in seen[0]
    assert results[0].tolist() == [1, 1, 1] and results[-1].tolist() == [-1, -1, -1]


@pytest.fixture
def failed(native):
    """What C++ reports of passes that fail: (pass, error)."""
    told = []
    native.set_failure_reporter(lambda name, text, place: told.append((name, text)))
    yield told
    native.set_failure_reporter(failures.report)


@pytest.mark.parametrize("answer", [None, "not a graph"])
def test_pass_that_returns_no_graph_changes_nothing(native, executor, failed, answer):
    def spoil(graph):
        for node in list(graph.findAllNodes("aten::relu")):
            node.output().replaceAllUsesWith(node.inputsAt(0))
        return answer

    native.set_pass(spoil)
    native.set_enabled(True)
    f, a = scripted(), torch.full((3,), -2.0)
    assert [f(a, torch.ones(3)).tolist() for _ in range(4)] == [[1, 1, 1]] * 4
    assert failed == (
        [] if answer is None else [("graph_pass", "the graph pass returned something else than a graph")]
    )


def test_pass_that_raises_changes_nothing(native, executor, failed):
    def fail(graph):
        graph.findNode("aten::relu").output().replaceAllUsesWith(next(graph.inputs()))
        raise ValueError("half-way")

    native.set_pass(fail)
    native.set_enabled(True)
    f, a = scripted(), torch.full((3,), -2.0)
    assert [f(a, torch.ones(3)).tolist() for _ in range(4)] == [[1, 1, 1]] * 4
    assert failed == [("graph_pass", "ValueError: half-way")]


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (None, []),
        ("not graphs", ["the pass over differentiable graphs returned something else than graphs"]),
        (RuntimeError("half-way"), ["RuntimeError: half-way"]),
    ],
)
def test_pass_over_differentiable_graphs_that_returns_none_changes_nothing(
    native, executor, failed, answer, texts
):
    def spoil(forward, backward, *numbers):
        node = forward.findNode("aten::relu")
        node.output().replaceAllUsesWith(node.inputsAt(0))
        if isinstance(answer, Exception):
            raise answer
        return answer

    native.set_differentiable(spoil)
    native.set_enabled(True)
    f, a = scripted(), torch.full((3,), -2.0, requires_grad=True)
    assert [f(a, torch.ones(3)).tolist() for _ in range(4)] == [[1, 1, 1]] * 4
    assert failed == [("differentiable_graph", text) for text in texts]


def test_disabled_pass_is_not_called(native, executor):
    called = []
    native.set_pass(called.append)
    native.set_enabled(False)
    f, a = scripted(), torch.ones(3)
    for _ in range(4):
        f(a, a)
    assert called == [] and not native.enabled()


def test_setters_return_what_was_set(native):
    def fn(*args):
        return None

    for setter in (native.set_pass, native.set_planner, native.set_reporter):
        assert setter(fn) is None
        assert setter(None) is fn


def test_registered_kinds_get_their_tensors_profiled(native, executor):
    def recorded_types():
        graphs = []
        native.set_pass(lambda graph: graphs.append(str(graph)))
        f = torch.jit.CompilationUnit("def f(a):\n    return torch.tril(torch.tril(a))\n").f
        for _ in range(3):
            f(torch.ones(3, 3))
        return graphs[-1].count("prim::profile[profiled_type=Float(3")

    native.set_enabled(True)
    before = recorded_types()
    native.register_profiled_kinds(["aten::tril"])
    assert (before, recorded_types()) == (1, 3)


def test_only_named_kinds_lose_their_mutation(native):
    graph = torch._C.parse_ir("""
graph(%a : Tensor):
  %one : int = prim::Constant[value=1]()
  %x : Tensor = aten::mul(%a, %a)
  %y : Tensor = aten::add_(%x, %a, %one)
  %z : Tensor = aten::relu_(%y)
  return (%z)
""")
    assert native.remove_tensor_mutation(graph, graph.findAllNodes("aten::add_"))
    kinds = [node.kind() for node in graph.nodes()]
    assert "aten::add" in kinds and "aten::relu_" in kinds
    assert not native.remove_tensor_mutation(graph, graph.findAllNodes("aten::add_"))


def test_tuples_are_lowered(native):
    graph = torch._C.parse_ir("""
graph(%a : Tensor):
  %t : (Tensor, Tensor) = prim::TupleConstruct(%a, %a)
  %x : Tensor, %y : Tensor = prim::TupleUnpack(%t)
  return (%y)
""")
    native.lower_simple_tuples(graph)
    torch._C._jit_pass_dce(graph)
    assert list(graph.nodes()) == []


#: name -> lines of a graph over %x, a mask and constants; a cast has two readers
FORMS = {
    "cast": "%r : Tensor = aten::to(%x, %dtype, %off, %off, %none)",
    "where with a number": "%r : Tensor = aten::where(%mask, %x, %number)",
    "masked_fill": "%r : Tensor = aten::masked_fill(%x, %mask, %number)",
    "full precision for each reader": """
  %c : Tensor = aten::_autocast_to_full_precision(%x, %on, %off)
  %p : Tensor = aten::relu(%c)
  %q : Tensor = aten::sigmoid(%c)
  %r : Tensor = aten::mul(%p, %q)""",
    "reduced precision for each reader": """
  %c : Tensor = aten::_autocast_to_reduced_precision(%x, %off, %on, %dtype, %dtype)
  %p : Tensor = aten::relu(%c)
  %q : Tensor = aten::sigmoid(%c)
  %r : Tensor = aten::mul(%p, %q)""",
}


def canonical(graph):
    torch._C._jit_pass_dce(graph)
    return torch._C._jit_pass_canonicalize(graph.copy()).str(False)


def profile_operands(graph):
    """Puts a profile node before each tensor that an op reads, as torch does when it profiles."""
    for node in list(graph.nodes()):
        for k, value in enumerate(list(node.inputs())):
            if str(value.type()) == "Tensor" and value.node().kind() != "prim::Constant":
                between = graph.create("prim::profile", [value], 1)
                between.ty_("profiled_type", torch._C.TensorType.get())
                between.insertBefore(node)
                node.replaceInput(k, between.output())


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_autodiff_knows_and_its_inverse(native, name, profiled):
    graph = torch._C.parse_ir(f"""
graph(%x : Tensor, %mask : Tensor):
  %number : float = prim::Constant[value=0.5]()
  %dtype : int = prim::Constant[value=6]()
  %on : bool = prim::Constant[value=1]()
  %off : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  {FORMS[name]}
  %s : Tensor = aten::neg(%r)
  return (%s)
""")
    before = canonical(graph)
    native.write_differentiable_forms(graph)
    assert canonical(graph) != before
    ops = [node for node in graph.nodes() if node.kind().startswith("aten::")]
    assert ops and all(native.is_differentiable(node) for node in ops)
    casts = [node.output() for node in ops if node.kind().startswith("aten::_autocast")]
    assert all(len(cast.uses()) == 1 for cast in casts)
    if profiled:
        profile_operands(graph)
    native.plain_forms(graph)
    remove_profile_nodes(graph)
    assert canonical(graph) == before


def test_every_form_makes_the_round_trip(native):
    assert list(FORMS) == native.differentiable_forms()


# name -> the twin, and the op
TWINS = {
    "view": ("view", "%r : Tensor = aten::view(%x, %sizes)"),
    "reshape": ("reshape", "%r : Tensor = aten::reshape(%x, %sizes)"),
    "transpose": ("transpose", "%r : Tensor = aten::transpose(%x, %first, %last)"),
    "reshape of repeated elements": (
        "repeated expand",
        """%e : Tensor = aten::expand(%x, %sizes, %yes)
  %r : Tensor = aten::reshape(%e, %sizes)""",
    ),
    "expand": ("expand", "%r : Tensor = aten::expand(%x, %sizes, %yes)"),
    "expand_as": ("expand_as", "%r : Tensor = aten::expand_as(%x, %x)"),
    "flatten": ("part", "%r : Tensor = aten::flatten(%x, %first, %last)"),
    "select": ("select", "%r : Tensor = aten::select(%x, %first, %last)"),
    "slice": ("slice", "%r : Tensor = aten::slice(%x, %last, %none, %last, %one)"),
    "cat": (
        "joined",
        """%l : Tensor[] = prim::ListConstruct(%x, %x, %x)
  %r : Tensor = aten::cat(%l, %last)""",
    ),
    "cat of one": (
        "joined",
        """%l : Tensor[] = prim::ListConstruct(%x)
  %r : Tensor = aten::cat(%l, %last)""",
    ),
    "stack": (
        "joined",
        """%l : Tensor[] = prim::ListConstruct(%x, %x)
  %r : Tensor = aten::stack(%l, %last)""",
    ),
    "split": (
        "part",
        """%l : Tensor[] = aten::split(%x, %one, %last)
  %p : Tensor, %q : Tensor = prim::ListUnpack(%l)
  %r : Tensor = aten::mul(%p, %q)""",
    ),
    "split with sizes": (
        "part",
        """%l : Tensor[] = aten::split_with_sizes(%x, %sizes, %last)
  %p : Tensor, %q : Tensor = prim::ListUnpack(%l)
  %r : Tensor = aten::mul(%q, %p)""",
    ),
    "unbind": (
        "part",
        """%l : Tensor[] = aten::unbind(%x, %last)
  %p : Tensor, %q : Tensor = prim::ListUnpack(%l)
  %r : Tensor = aten::mul(%p, %q)""",
    ),
    "roll": ("part", "%r : Tensor = aten::roll(%x, %sizes, %dims)"),
    "padding": (
        "part",
        """%mode : str = prim::Constant[value="constant"]()
  %fill : NoneType = prim::Constant()
  %r : Tensor = aten::pad(%x, %sizes, %mode, %fill)""",
    ),
    "shared cast": (
        "full_precision",
        """%own : Tensor = aten::neg(%x)
  %c : Tensor = aten::_autocast_to_full_precision(%own, %yes, %yes)
  %r : Tensor = aten::mul(%c, %c)""",
    ),
    "shared cast to 16 bits": (
        "reduced_precision",
        """%own : Tensor = aten::neg(%x)
  %c : Tensor = aten::_autocast_to_reduced_precision(%own, %yes, %yes, %one, %one)
  %r : Tensor = aten::mul(%c, %c)""",
    ),
    "shared cast of the program": (
        "cast",
        """%dtype : int = prim::Constant[value=6]()
  %no : bool = prim::Constant[value=0]()
  %own : Tensor = aten::neg(%x)
  %layout : NoneType = prim::Constant()
  %c : Tensor = aten::to(%own, %dtype, %no, %no, %layout)
  %r : Tensor = aten::mul(%c, %c)""",
    ),
    "group norm": ("with_operands", "%r : Tensor = aten::group_norm(%x, %last, %x, %none, %eps, %yes)"),
    "instance norm": (
        "with_operands",
        "%r : Tensor = aten::instance_norm(%x, %x, %x, %none, %none, %yes, %eps, %eps, %yes)",
    ),
    "index": (
        "with_operands",
        """%l : Tensor?[] = prim::ListConstruct(%x)
  %r : Tensor = aten::index(%x, %l)""",
    ),
    "RMS norm": ("with_operands", "%r : Tensor = aten::rms_norm(%x, %sizes, %x, %none)"),
}


@pytest.mark.parametrize("name", TWINS)
def test_an_op_becomes_its_twin_and_itself_again(native, name):
    kind, op = TWINS[name]
    graph = torch._C.parse_ir(f"""
graph(%x : Tensor, %sizes : int[]):
  %none : NoneType = prim::Constant()
  %yes : bool = prim::Constant[value=1]()
  %one : int = prim::Constant[value=1]()
  %first : int = prim::Constant[value=0]()
  %last : int = prim::Constant[value=-1]()
  %eps : float = prim::Constant[value=0.5]()
  %dims : int[] = prim::Constant[value=[0, 1]]()
  {op}
  %s : Tensor = aten::relu(%r)
  return (%s)
""")
    torch._C._jit_pass_dce(graph)
    before = canonical(graph)
    native.write_differentiable_forms(graph)
    torch._C._jit_pass_dce(graph)
    twins = [node for node in graph.nodes() if node.kind().startswith("tsfuser::")]
    assert {twin.kind() for twin in twins} == {f"tsfuser::{k}" for k in kind.split()}
    assert all(map(native.is_differentiable, twins))
    native.plain_forms(graph)
    torch._C._jit_pass_dce(graph)
    assert canonical(graph) == before


def test_every_twin_makes_the_round_trip(native):
    assert {f"tsfuser::{k}" for kind, _ in TWINS.values() for k in kind.split()} == {
        twin for twin, _ in native.twins()
    }


def test_add_optional_adds_or_passes_through(native):
    graph = torch._C.parse_ir("""
graph(%a : Tensor, %b : Tensor?):
  %r : Tensor = prim::add_optional(%a, %b)
  return (%r)
""")
    f, a = torch._C._create_function_from_graph("f", graph), torch.randn(3)
    assert torch.equal(f(a, a), a + a) and f(a, None).data_ptr() == a.data_ptr()
