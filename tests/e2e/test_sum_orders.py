"""Sums of gradients have the layout that torch profiled (tsfuser/graph/sum_orders.py)."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fresh
from tsfuser.graph.sum_orders import order_sums

pytestmark = pytest.mark.graphs

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


def rotate(x, c, s):
    """A rotary embedding, whose gradient is a sum of tensors of two layouts."""
    y = x.view(4, 64, 4, 16).transpose(1, 2)
    return y * c + torch.cat([-y[..., 8:], y[..., :8]], -1) * s


@pytest.mark.parametrize("turned", [False, True])
def test_the_gradient_of_a_view_is_a_view(device, turned):
    generator = torch.Generator().manual_seed(3)
    x, c, s, step = (
        torch.randn(sizes, generator=generator).to(device)
        for sizes in ((4, 64, 64), (1, 1, 64, 16), (1, 1, 64, 16), (4, 64, 4, 16))
    )
    step = step.transpose(1, 2) if turned else step.transpose(1, 2).contiguous()
    x.requires_grad_()
    scripted = fresh(rotate)
    with tsfuser.fuser():
        for _ in range(5):
            x.grad = None
            scripted(x * 1.0, c, s).backward(step)
    wide = x.detach().double().requires_grad_()
    rotate(wide, c.double(), s.double()).backward(step.double())
    found, x.grad = x.grad, None
    rotate(x * 1.0, c, s).backward(step)
    assert_matches(found, x.grad, wide.grad, ops=40)
