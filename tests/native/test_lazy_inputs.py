"""Lazy conjugates and negatives as inputs of a group: it reads copies, or runs unfused if it needs them."""

import pytest
import torch

from kit.native_support import ADD, add_plan, group_function

ADD_IN_PLACE = """
graph(%a : Tensor, %b : Tensor):
  %one : int = prim::Constant[value=1]()
  %r : Tensor = aten::add_(%a, %b, %one)
  return (%r)
"""


@pytest.fixture
def reasons(native):
    seen = []
    native.set_reporter(lambda kind, group, reason: seen.append((kind, reason)))
    return seen


def negative(size):
    """A float32 vector without gaps that is the lazy negative of its memory."""
    return torch._neg_view(torch.randn(size))


def writing_plan(native, kernels):
    """Says that it writes a, but writes a + b to memory of its own: only the refusal is tested."""
    slots = [(0, "input", 0), (8, "input", 1), (16, "allocation", 0), (24, "int64", 0)]
    program = [("const", 128, 0), ("ceildiv", 0, 6), ("const", 0, 0), ("const", 1, 0)]
    launch = native.Launch("host", kernels["add"], "add", 7, 6, 9, 8, 9, 32, slots)
    allocations = [("float32", [0], [9])]
    return native.Plan(6, program, [], allocations, [launch], [("allocation", 0)], updates=[(0, True)])


def test_the_kernels_read_a_copy(native, kernels, reasons):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    add, x, y = group_function(ADD, 2), negative(9), torch.randn(9)
    for a, b in [(x, y), (y, x), (x, x), (y, y)]:
        assert torch.equal(add(a, b), a + b)
    assert native.stats()["launches"] == 4 and native.stats()["plans_built"] == 1
    assert native.stats()["fallbacks"] == {} and reasons == []


def test_an_input_that_is_returned_is_the_lazy_one(native, reasons):
    through = native.Plan(6, [], [], [], [], [("input", 1)])
    native.set_planner(lambda group, args, varies: through)
    second = group_function("graph(%a : Tensor, %b : Tensor):\n  return (%b)", 2)
    x, y = negative(9), torch.randn(9)
    result = second(y, x)
    assert result.is_neg() and result.data_ptr() == x.data_ptr()
    assert list(native.stats()["fallbacks"]) == ["a lazy conjugate or negative is returned as it is"]
    assert second(x, y).data_ptr() == y.data_ptr() and sum(native.stats()["fallbacks"].values()) == 1


@pytest.mark.parametrize("which", ["lazy tensor", "memory of the lazy tensor"])
def test_a_write_to_a_lazy_tensor_or_its_memory_is_eagers(native, kernels, reasons, which):
    native.set_planner(lambda group, args, varies: writing_plan(native, kernels))
    add_ = group_function(ADD_IN_PLACE, 2)
    memory, y = torch.randn(9), torch.randn(9)
    expected = memory.clone()
    if which == "lazy tensor":
        add_(torch._neg_view(memory), y)
        torch._neg_view(expected).add_(y)
    else:
        add_(memory, torch._neg_view(memory))
        expected.add_(torch._neg_view(expected))
    assert torch.equal(memory, expected)
    assert list(native.stats()["fallbacks"]) == ["the memory of a lazy conjugate or negative is written"]
    assert [kind for kind, _ in reasons] == ["input"]
