"""Equal ops of a joint graph are one."""

import pytest
import torch

from tsfuser.graph.wrapper import nodes_in
from tsfuser.joint.equal_ops import merge_equal_ops
from tsfuser.joint.reverse import Joint


def merged(lines, results=1, **options):
    """The kinds of ops that are left. The last outputs are gradients."""
    *nodes, last = (line.strip() for line in lines.strip().splitlines())
    count = last.count("%")
    constants = ["%no : NoneType = prim::Constant()", "%one : int = prim::Constant[value=1]()"]
    tensor = "Float(3, 4, strides=[4, 1], device=cpu)"
    body = "".join(f"  {line}\n" for line in (*constants, *nodes, last))
    graph = torch._C.parse_ir(f"graph(%x : {tensor}, %w : {tensor}):\n{body}")
    merge_equal_ops(Joint(graph, results, (), tuple(range(count - results))), **options)
    graph.lint()
    kinds = [node.kind() for node in nodes_in(graph)]
    return [
        kind.partition("::")[2] for kind in kinds if kind not in ("prim::Constant", "prim::ListConstruct")
    ]


def test_equal_ops_of_equal_operands_are_one():
    lines = """
        %a : Tensor = aten::sin(%x)
        %b : Tensor = aten::mul(%a, %w)
        %c : Tensor = aten::sin(%x)
        %d : Tensor = aten::mul(%c, %w)
        %e : Tensor = aten::add(%b, %d, %one)
        return (%e)
    """
    assert merged(lines) == ["sin", "mul", "add"]


@pytest.mark.parametrize("one, other", [("0.", "-0."), ("2.", "3.")])
def test_other_numbers_are_other_ops(one, other):
    lines = f"""
        %p : float = prim::Constant[value={one}]()
        %q : float = prim::Constant[value={other}]()
        %a : Tensor = aten::mul(%x, %p)
        %b : Tensor = aten::mul(%x, %q)
        %c : Tensor = aten::div(%a, %b)
        return (%c)
    """
    assert merged(lines) == ["mul", "mul", "div"]


def test_equal_numbers_are_one_wherever_they_stand():
    lines = """
        %p : int = prim::Constant[value=1]()
        %l : int[] = prim::ListConstruct(%p)
        %m : int[] = prim::ListConstruct(%one)
        %t : bool = prim::Constant[value=1]()
        %a : Tensor = aten::sum(%x, %l, %t, %no)
        %b : Tensor = aten::sum(%x, %m, %t, %no)
        %c : Tensor = aten::mul(%a, %b)
        return (%c)
    """
    assert merged(lines) == ["sum", "mul"]


RESULTS = """
    %a : Tensor = aten::sin(%x)
    %b : Tensor = aten::sin(%x)
    %t : Tensor = aten::t(%b)
    %c : Tensor = aten::sin(%x)
    %d : Tensor = aten::exp(%c)
    return (%a, %t, %d)
"""


def test_two_results_stay_two_tensors():
    assert merged(RESULTS, results=3).count("sin") == 2


def test_gradients_are_results_too():
    assert merged(RESULTS).count("sin") == 2


def test_results_may_have_no_other_readers():
    assert merged(RESULTS, results=3, leave_results=True).count("sin") == 3


@pytest.mark.parametrize("kind", ["empty_like", "rand_like"])
def test_each_reader_has_an_allocation_and_random_numbers_of_its_own(kind):
    lines = f"""
        %a : Tensor = aten::{kind}(%x, %no, %no, %no, %no, %no)
        %b : Tensor = aten::{kind}(%x, %no, %no, %no, %no, %no)
        %c : Tensor = aten::mul(%a, %b)
        return (%c)
    """
    assert merged(lines).count(kind) == 2


def test_what_is_read_before_and_after_a_write_is_read_twice():
    lines = """
        %a : Tensor = aten::sin(%x)
        %v : Tensor = aten::add_(%x, %w, %one)
        %b : Tensor = aten::sin(%x)
        %c : Tensor = aten::mul(%a, %b)
        return (%c)
    """
    assert merged(lines).count("sin") == 2


def test_running_statistics_that_a_norm_writes_are_read_twice():
    lines = """
        %t : bool = prim::Constant[value=1]()
        %m : float = prim::Constant[value=0.1]()
        %s : Tensor = aten::select(%w, %one, %one)
        %a : Tensor = aten::sin(%s)
        %e : Tensor = aten::sin(%x)
        %y : Tensor = aten::batch_norm(%x, %no, %no, %s, %s, %t, %m, %m, %t)
        %b : Tensor = aten::sin(%s)
        %f : Tensor = aten::sin(%x)
        %c : Tensor = aten::mul(%a, %b)
        %d : Tensor = aten::mul(%e, %f)
        return (%c, %d, %y)
    """
    assert merged(lines, results=3).count("sin") == 3


def test_ops_of_others_are_left_alone():
    lines = """
        %a : Tensor = tsfuser::foreign(%x)
        %b : Tensor = tsfuser::foreign(%x)
        %c : Tensor = aten::mul(%a, %b)
        return (%c)
    """
    assert merged(lines).count("foreign") == 2


def test_results_of_an_op_with_several_are_one():
    lines = """
        %t : bool = prim::Constant[value=1]()
        %a : Tensor, %i : Tensor = aten::max(%x, %one, %t)
        %b : Tensor, %j : Tensor = aten::max(%x, %one, %t)
        %c : Tensor = aten::mul(%a, %j)
        return (%c)
    """
    assert merged(lines) == ["max", "mul"]
