"""Sums of gradients have the layout that torch profiled (tsfuser/graph/sum_orders.py)."""

import torch

from tsfuser.graph.sum_orders import order_sums

TYPES = {
    "row-major": "Float(8, 4, strides=[4, 1], requires_grad=0, device=cpu)",
    "turned": "Float(8, 4, strides=[1, 8], requires_grad=0, device=cpu)",
    "small": "Float(4, strides=[1], requires_grad=0, device=cpu)",
    "unknown": "Tensor",
}


def operands_of_sum(first, second, result, alpha="1", kind="backward"):
    asks = "  %all : bool = prim::AutogradAllNonZero(%a, %b)\n" if kind == "backward" else ""
    returned = "%all" if asks else "%c"
    graph = torch._C.parse_ir(
        f"graph(%a : {TYPES[first]}, %b : {TYPES[second]}):\n{asks}"
        f"  %n : int = prim::Constant[value={alpha}]()\n"
        f"  %c : {TYPES[result]} = aten::add(%a, %b, %n)\n  return (%c, {returned})"
    )
    order_sums(graph)
    (node,) = graph.findAllNodes("aten::add", False)
    return [value.debugName() for value in list(node.inputs())[:2]]


def test_which_sums_are_turned():
    assert operands_of_sum("row-major", "turned", "turned", kind="program") == ["a", "b"]
    assert operands_of_sum("row-major", "turned", "turned") == ["b", "a"]
    assert operands_of_sum("turned", "row-major", "row-major") == ["b", "a"]
    for types in (
        ("row-major", "turned", "row-major"),
        ("turned", "turned", "turned"),
        ("small", "turned", "turned"),
        ("unknown", "turned", "turned"),
        ("row-major", "turned", "unknown"),
        ("row-major", "unknown", "turned"),
    ):
        assert operands_of_sum(*types) == ["a", "b"], types
    assert operands_of_sum("row-major", "turned", "turned", "2") == ["a", "b"]
