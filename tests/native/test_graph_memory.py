"""Which values of a graph may share memory (csrc_stubs/graph/memory.h), and nodes that are gone."""

import re

import pytest
import torch

from tsfuser import _C


def made_in(block):
    """The values of a block and of those within, in the order of the text."""
    values = list(block.inputs())
    for node in block.nodes():
        values += node.outputs()
        for inner in node.blocks():
            values += made_in(inner)
    return values


def memory_of(text):
    graph = torch._C.parse_ir(text, False)
    names = re.findall(r"%(\w+) :", text)
    return graph, _C.Memory(graph), dict(zip(names, made_in(graph), strict=True))


LOOP = """
graph(%x : Tensor, %n : int):
  %one : int = prim::Constant[value=1]()
  %go : bool = prim::Constant[value=1]()
  %a : Tensor = aten::neg(%x)
  %other : Tensor = aten::relu(%x)
  %v : Tensor = prim::Loop(%n, %go, %a)
    block0(%i : int, %w : Tensor):
      %next : Tensor = aten::mul(%w, %n)
      -> (%go, %next)
  %written : Tensor = aten::add_(%v, %one, %one)
  return (%a, %v, %other)
"""


def test_what_a_loop_returns_may_be_what_entered_it():
    _, memory, values = memory_of(LOOP)
    assert memory.may_share(values["v"], values["a"]) and memory.may_share(values["v"], values["next"])
    assert not memory.may_share(values["next"], values["a"])
    assert not memory.may_share(values["v"], values["other"])
    assert memory.is_written(values["a"]) and not memory.is_written(values["other"])
    assert memory.hides_writes()


def test_what_enters_a_body_may_be_what_another_operand_was_before():
    body = "block0(%i : int, %p : Tensor, %q : Tensor):\n      -> (%go, %q, %p)\n"
    _, memory, values = memory_of(
        "graph(%x : Tensor, %n : int):\n  %go : bool = prim::Constant[value=1]()\n"
        "  %a : Tensor = aten::neg(%x)\n  %b : Tensor = aten::relu(%x)\n"
        f"  %v : Tensor, %w : Tensor = prim::Loop(%n, %go, %a, %b)\n    {body}  return (%v, %w)\n"
    )
    assert all(memory.may_share(values[p], values[q]) for p in "pqvw" for q in "abpqvw")


def test_a_sum_in_place_hides_no_write():
    _, memory, values = memory_of(LOOP.replace("aten::mul(%w, %n)", "aten::add_(%w, %one, %one)"))
    assert memory.is_written(values["a"]) and not memory.hides_writes()


def test_an_op_may_give_a_view_that_its_schema_hides():
    _, memory, values = memory_of(
        "graph(%x : Tensor):\n  %one : int = prim::Constant[value=1]()\n  %a : Tensor = aten::neg(%x)\n"
        "  %v : Tensor = aten::atleast_2d(%a)\n  %w : Tensor = aten::add_(%v, %one, %one)\n"
        "  return (%a, %w)\n"
    )
    assert memory.may_share(values["v"], values["a"]) and memory.hides_writes()


def test_a_value_that_is_made_later_may_be_written():
    graph, memory, values = memory_of(LOOP)
    made = graph.create("aten::relu", [values["other"]], 1)
    graph.appendNode(made)
    assert memory.is_written(made.output()) and not memory.is_written(values["other"])


@pytest.mark.parametrize("question", ["inputs", "outputs", "blocks", "schema_key"])
def test_a_node_that_is_gone_raises(question):
    graph, _, values = memory_of(LOOP)
    node = values["other"].node()
    graph.return_node().removeInput(2)
    node.destroy()
    with pytest.raises(RuntimeError, match="has been invalidated"):
        getattr(_C, question)(node)
