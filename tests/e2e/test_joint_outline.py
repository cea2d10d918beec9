"""Graphs that are parted into regions, and what is written into the graph of one."""

from types import SimpleNamespace

import pytest
import torch

import tsfuser
from kit.support import script
from tsfuser import _C
from tsfuser.debug.plans import plans_of
from tsfuser.errors import Refusal
from tsfuser.graph.effects import Effects
from tsfuser.joint.autocast import write_casts
from tsfuser.joint.regions import REGION, outline
from tsfuser.joint.reverse import reverse

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


NOTHING_WRITTEN = SimpleNamespace(is_written=lambda _: False, is_changed=lambda _: False)


def outlined(text):
    """The kinds of the nodes of a graph with regions, and of those in each region."""
    graph = torch._C.parse_ir(text)
    outline(graph, NOTHING_WRITTEN if "other::" in text else Effects(graph))
    kinds = [n.kind() for n in graph.nodes() if n.kind() != "prim::Constant"]
    regions = [n.g("Subgraph") for n in graph.findAllNodes(REGION, True)]
    return kinds, [[n.kind() for n in r.nodes() if n.kind() != "prim::Constant"] for r in regions]


def test_a_region_ends_at_an_effect():
    kinds, regions = outlined("""graph(%x : Tensor, %w : Tensor):
  %0 : Tensor = aten::mul(%x, %w)
  %1 : Tensor = aten::sin(%0)
  %p : Tensor = other::op(%1)
  %2 : Tensor = aten::cos(%1)
  %3 : Tensor = aten::exp(%2)
  return (%3)""")
    assert kinds == [REGION, "other::op", REGION]
    assert regions == [["aten::mul", "aten::sin"], ["aten::cos", "aten::exp"]]


def test_a_write_to_an_input_is_in_no_region():
    kinds, regions = outlined("""graph(%x : Tensor, %w : Tensor):
  %one : int = prim::Constant[value=1]()
  %0 : Tensor = aten::mul(%x, %w)
  %1 : Tensor = aten::sin(%0)
  %2 : Tensor = aten::add_(%x, %w, %one)
  %3 : Tensor = aten::mul(%1, %x)
  %4 : Tensor = aten::cos(%3)
  return (%4)""")
    assert kinds == [REGION, "aten::add_", REGION]
    assert regions == [["aten::mul", "aten::sin"], ["aten::mul", "aten::cos"]]


NOISY = """graph(%x : Tensor, %w : Tensor, %v : Tensor):
  %n : NoneType = prim::Constant()
  %z : int = prim::Constant[value=0]()
  %p : float = prim::Constant[value=0.5]()
  %t : bool = prim::Constant[value=1]()
  %0 : Tensor = aten::tanh(%x)
  %1 : Tensor = aten::mm(%0, %w)
  %2 : Tensor = {}
  %s : int = aten::size(%1, %z)
  %l : int[] = prim::ListConstruct(%s)
  %3 : Tensor = aten::empty(%l, %n, %n, %n, %n, %n)
  %4 : Tensor = aten::bernoulli_(%3, %p, %n)
  %5 : Tensor = aten::mul(%2, %4)
  {}
  return (%5)"""


@pytest.mark.parametrize(
    "op, end, parted",
    [
        ("aten::mul(%1, %v)", "", False),
        ("aten::dropout(%1, %p, %t)", "", True),
        ("aten::mul(%1, %v)", "%6 : Tensor = aten::zero_(%v)", True),
        ("aten::mul(%0, %v)", "", True),
    ],
    ids=["pure", "it draws, too", "its operand is written to", "of a group's result"],
)
def test_what_is_computed_of_a_product_comes_behind_its_noise(op, end, parted):
    """With what reads both; what reads the result of a group stays with that."""
    _, regions = outlined(NOISY.format(op, end))
    kind = op.split("(")[0]
    assert kind in regions[0 if parted else 1] and "aten::mm" in regions[0]


def test_questions_about_noise_stay_with_the_noise():
    """Though the program writes to it, and asks how many dims other tensors have."""
    kinds, regions = outlined("""graph(%x : Tensor, %w : Tensor, %v : Tensor):
  %n : NoneType = prim::Constant()
  %p : float = prim::Constant[value=0.5]()
  %one : int = prim::Constant[value=1]()
  %0 : Tensor = aten::tanh(%x)
  %1 : Tensor = aten::mm(%0, %w)
  %2 : Tensor = aten::mul(%1, %v)
  %a : int = aten::dim(%v)
  %b : int = aten::dim(%1)
  %d : int = tsfuser::joined_dim(%a, %b)
  %c : int = aten::sub(%d, %one)
  %l : int[] = prim::ListConstruct(%d, %c)
  %3 : Tensor = aten::empty(%l, %n, %n, %n, %n, %n)
  %4 : Tensor = aten::bernoulli_(%3, %p, %n)
  %s : int[] = aten::size(%3)
  %5 : Tensor = aten::div_(%3, %p)
  %6 : Tensor = aten::expand_as(%3, %2)
  %7 : Tensor = aten::mul(%2, %6)
  return (%7, %s)""")
    assert kinds.count(REGION) == 2
    assert [k for k in regions[1] if k == "aten::mul"] == ["aten::mul"] * 2


@pytest.mark.parametrize("kind", ["chunk", "split"])
def test_parts_of_a_tensor_are_in_one_region_beside_a_write(kind):
    """Torch takes what such ops are given for memory that anything may write to."""
    _, regions = outlined(f"""graph(%x : Tensor, %w : Tensor, %m : Tensor):
  %n : int = prim::Constant[value=2]()
  %one : int = prim::Constant[value=1]()
  %0 : Tensor = aten::mul(%x, %w)
  %1 : Tensor[] = aten::{kind}(%0, %n, %one)
  %2 : Tensor, %3 : Tensor = prim::ListUnpack(%1)
  %4 : Tensor = aten::sin(%2)
  %5 : Tensor = aten::mul(%4, %3)
  %6 : Tensor = aten::add_(%m, %one, %one)
  return (%5)""")
    [inside] = regions
    assert inside == ["aten::mul", f"aten::{kind}", "prim::ListUnpack", "aten::sin", "aten::mul"]


def test_a_list_that_the_program_changes_is_in_no_region():
    _, regions = outlined("""graph(%x : Tensor, %w : Tensor):
  %n : int = prim::Constant[value=2]()
  %one : int = prim::Constant[value=1]()
  %0 : Tensor = aten::mul(%x, %w)
  %1 : Tensor[] = aten::split(%0, %n, %one)
  %2 : Tensor[] = aten::append(%1, %x)
  %3 : Tensor = aten::cat(%1, %one)
  %4 : Tensor = aten::sin(%3)
  %5 : Tensor = aten::cos(%4)
  return (%5)""")
    assert not any("aten::split" in inside or "aten::append" in inside for inside in regions)


def test_a_question_about_the_layout_parts_no_region():
    _, regions = outlined("""graph(%x : Tensor, %w : Tensor):
  %four : int = prim::Constant[value=4]()
  %0 : Tensor = aten::mul(%x, %w)
  %1 : bool = tsfuser::is_channels_last(%w, %four)
  %2 : int = tsfuser::memory_format(%1)
  %3 : Tensor = aten::clone(%0, %2)
  %4 : Tensor = aten::sin(%3)
  return (%4)""")
    assert len(regions) == 1 and "tsfuser::is_channels_last" in regions[0]


@pytest.mark.parametrize(
    "inside, parted", [("raise ValueError('too long')", False), ("print('too long')", True)]
)
def test_a_check_parts_no_join_from_its_reader(inside, parted):
    scripted = script(f"""
def f(x, y, w):
    made = torch.mm(y, w)
    joined = torch.cat([x, made], 1)
    if made.size(1) > 1:
        {inside}
    return torch.sin(torch.tanh(joined))
""")
    graph = scripted.graph.copy()
    outline(graph, NOTHING_WRITTEN)
    last = [n.kind() for n in graph.findAllNodes(REGION, True)[-1].g("Subgraph").nodes()]
    assert ("aten::cat" in last) != parted and "aten::sin" in last


@pytest.mark.parametrize("of, count", [("%0", 1), ("%a", 2)], ids=["zeros", "a result"])
def test_what_is_computed_of_zeros_needs_no_derivative(of, count):
    _, regions = outlined(f"""graph(%x : Tensor, %v : Tensor):
  %n : NoneType = prim::Constant()
  %none : int[] = prim::Constant[value=[]]()
  %numbers : float[] = prim::Constant[value=[1.]]()
  %counts : int[] = prim::Constant[value=[0]]()
  %a : Tensor = aten::tanh(%x)
  %b : Tensor = aten::mul(%a, %v)
  %l : int[] = aten::size(%v)
  %0 : Tensor = aten::new_zeros(%b, %l, %n, %n, %n, %n)
  %1 : Tensor = tsfuser::filled({of}, %none, %counts, %none, %numbers)
  %2 : Tensor = aten::mul(%b, %1)
  %3 : Tensor = aten::sin(%2)
  return (%3)""")
    assert len(regions) == count


def test_what_reads_nothing_of_a_region_stays_before_it():
    kinds, regions = outlined("""graph(%p : (Tensor, Tensor), %x : Tensor):
  %0 : Tensor = aten::sin(%x)
  %a : Tensor, %b : Tensor = prim::TupleUnpack(%p)
  %1 : Tensor = aten::mul(%0, %a)
  return (%1)""")
    assert (kinds, regions) == (["prim::TupleUnpack", REGION], [["aten::sin", "aten::mul"]])


def test_an_op_without_a_derivative_here_ends_a_region():
    kinds, _ = outlined("""graph(%x : Tensor):
  %0 : Tensor = aten::sin(%x)
  %1 : Tensor = aten::cos(%0)
  %2 : Tensor = aten::special_erfcx(%1)
  %3 : Tensor = aten::sin(%2)
  %4 : Tensor = aten::cos(%3)
  return (%4)""")
    assert kinds == [REGION, "aten::special_erfcx", REGION]


def test_a_list_of_given_tensors_is_made_outside():
    kinds, regions = outlined("""graph(%x : Tensor, %w : Tensor):
  %0 : Tensor = aten::mul(%x, %w)
  %all : Tensor[] = prim::ListConstruct(%x, %w)
  %1 : Tensor = aten::sin(%0)
  %2 : Tensor = other::op(%all)
  return (%1, %2)""")
    assert kinds == ["prim::ListConstruct", REGION, "other::op"]
    assert regions == [["aten::mul", "aten::sin"]]


def test_products_of_sizes_are_no_region():
    kinds, regions = outlined("""graph(%x : Tensor, %n : int):
  %0 : int = aten::mul(%n, %n)
  %1 : int = aten::mul(%0, %n)
  %2 : int = aten::add(%1, %n)
  return (%2)""")
    assert kinds == ["aten::mul", "aten::mul", "aten::add"] and not regions


def test_blocks_have_regions_of_their_own():
    kinds, regions = outlined("""graph(%x : Tensor, %c : bool):
  %y : Tensor = prim::If(%c)
    block0():
      %0 : Tensor = aten::sin(%x)
      %1 : Tensor = aten::cos(%0)
      -> (%1)
    block1():
      -> (%x)
  return (%y)""")
    assert (kinds, regions) == (["prim::If"], [["aten::sin", "aten::cos"]])


def test_numbers_of_elements_are_in_no_region():
    kinds, _ = outlined(
        """graph(%x : Tensor):
  %0 : Tensor = aten::sin(%x)
  %1 : Tensor = aten::sum(%0, %none)
  %2 : Scalar = aten::item(%1)
  return (%2)""".replace("%0 : T", "%none : NoneType = prim::Constant()\n  %0 : T", 1)
    )
    assert kinds == [REGION, "aten::item"]


# ---- the graph of a region


def test_casts_that_the_graph_does_not_show():
    """Where torch writes none, or for another dtype: eager's ops cast themselves. Beside another cast of the
    same op, one is written."""
    text = """graph(%x : Float(2, 3, device=cpu), %w : Float(4, 3, device=cpu), %b : NoneType):
  %off : bool = prim::Constant[value=0]()
  %on : bool = prim::Constant[value=1]()
  %half : int = prim::Constant[value=5]()
  %bfloat : int = prim::Constant[value=15]()
  %0 : Tensor = aten::_autocast_to_reduced_precision(%x, %off, %on, %half, %bfloat)
  %1 : Tensor = aten::_autocast_to_reduced_precision(%w, %off, %on, %half, %bfloat)
  %2 : Tensor = aten::linear(%0, %1, %b)
  return (%2)"""
    beside = text.replace("linear(%0", "linear(%x")
    shown, one, hidden = (
        torch._C.parse_ir(t) for t in (text, beside, beside.replace("linear(%x, %1", "linear(%x, %w"))
    )
    for graph in (shown, one, hidden):
        write_casts(graph)
    with torch.autocast("cpu", torch.bfloat16):
        write_casts(shown)
        write_casts(one)
        with pytest.raises(Refusal, match="does not show"):
            write_casts(hidden)
    written = one.findNode("aten::linear").inputsAt(0).node()
    assert written.kind() == "aten::_autocast_to_reduced_precision"
    assert written.inputsAt(0).debugName() == "x"
    with torch.autocast("cpu", torch.float16), pytest.raises(Refusal, match="another dtype"):
        write_casts(shown)


def test_a_number_makes_no_operand_larger():
    """So its gradient is not summed, for which it would be asked for its sizes."""
    graph = torch._C.parse_ir("""graph(%x : Float(2, 3, device=cpu), %w : Float(3, device=cpu)):
  %two : float = prim::Constant[value=2.]()
  %one : int = prim::Constant[value=1]()
  %0 : Float(2, 3, device=cpu) = aten::mul(%x, %two)
  %1 : Float(2, 3, device=cpu) = aten::add(%0, %w, %one)
  %2 : Float(2, 3, device=cpu) = aten::div(%1, %two)
  return (%2)""")
    joint = reverse(graph, (True, True))
    assert len(joint.graph.findAllNodes("aten::_grad_sum_to_size")) == 2  # of the sum's operands


def test_inputs_without_names(device):
    """Of a program with a branch on a flag, whose copies are calls of programs with regions."""
    graph = torch._C.parse_ir("""graph(%0 : Tensor, %1 : Tensor, %2 : bool):
  %3 : Tensor = aten::mul(%0, %1)
  %4 : Tensor = prim::If(%2)
    block0():
      %5 : Tensor = aten::sin(%3)
      -> (%5)
    block1():
      %6 : Tensor = aten::cos(%3)
      -> (%6)
  %7 : Tensor = aten::mul(%4, %0)
  return (%7)""")
    scripted = torch._C._create_function_from_graph("unnamed", graph)
    x, w = (torch.rand(4, 4, device=device).requires_grad_() for _ in range(2))
    with tsfuser.fuser():
        for _ in range(4):
            (got,) = torch.autograd.grad(scripted(x, w, True).sum(), x)
    (want,) = torch.autograd.grad(((x * w).sin() * x).sum(), x)
    torch.testing.assert_close(got, want)
    settled = list(plans_of(scripted.get_debug_state()))
    assert any(graph for plan in settled for graph in _C.joint_graphs(plan.code))
