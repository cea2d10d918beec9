"""Plans whose kernels write arguments, and results that are no tensors of their own."""

import pytest
import torch

from kit.native_support import group_function

ADD_IN_PLACE = """
graph(%a : Tensor, %b : Tensor):
  %one : int = prim::Constant[value=1]()
  %r : Tensor = aten::add_(%a, %b, %one)
  return (%r)
"""
NUMBER = """
graph(%a : Tensor, %b : Tensor):
  %r : int = aten::size(%a, %n)
  return (%r)
""".replace("%r : int", "%n : int = prim::Constant[value=0]()\n  %r : int")


def update_plan(native, kernels, counted=True, also=()):
    """a += b for contiguous float vectors of equal size, then the launches in `also`."""
    args = [(0, "input", 0), (8, "input", 1), (16, "update", 0), (24, "int64", 0)]
    program = [("const", 128, 0), ("ceildiv", 0, 6), ("const", 0, 0), ("const", 1, 0)]
    launch = native.Launch("host", kernels["add"], "add", 7, 6, 9, 8, 9, 32, args)
    return native.Plan(
        6, program, [], [("float32", [0], [9])], [launch, *also], [("input", 0)], updates=[(0, counted)]
    )


@pytest.mark.parametrize("counted", [True, False])
def test_a_kernel_changes_an_argument(native, kernels, counted):
    native.set_planner(lambda group, args, varies: update_plan(native, kernels, counted))
    f, a, b = group_function(ADD_IN_PLACE, 2), torch.ones(1000), torch.arange(1000.0)
    assert f(a, b) is a or f(a, b).data_ptr() == a.data_ptr()
    calls = native.stats()["launches"]
    assert torch.equal(a, 1 + calls * b) and a._version == (calls if counted else 0)
    assert native.stats()["fallbacks"] == {}


def test_an_argument_that_shares_memory_is_changed_by_the_original_nodes(native, kernels):
    native.set_planner(lambda group, args, varies: update_plan(native, kernels))
    f, memory = group_function(ADD_IN_PLACE, 2), torch.ones(20)
    f(memory[:8], memory[:8])
    (reason,) = native.stats()["fallbacks"]
    assert "shares memory" in reason and native.stats()["launches"] == 0
    memory = torch.ones(20)
    f(memory[:8], memory[8:16])
    assert native.stats()["launches"] == 1 and memory.tolist() == [2.0] * 8 + [1.0] * 12


def test_a_launch_that_fails_after_the_change_does_not_change_again(native, kernels):
    if torch.cuda.is_available():
        pytest.skip("needs a machine where a CUDA launch fails")
    native.set_reporter(lambda *report: None)
    broken = native.Launch("cuda", 1, "some_kernel", 0, 0, 0, 0, 0, 8, [(0, "allocation", 0)])
    native.set_planner(lambda group, args, varies: update_plan(native, kernels, also=[broken]))
    f, a = group_function(ADD_IN_PLACE, 2), torch.ones(5)
    f(a, torch.full((5,), 2.0))
    assert a.tolist() == [3.0] * 5
    f(a, torch.full((5,), 2.0))  # the failure is remembered: the original nodes alone
    assert a.tolist() == [5.0] * 5
    assert sum(native.stats()["fallbacks"].values()) == 2


def test_a_number_is_a_result(native):
    native.set_planner(lambda group, args, varies: native.Plan(6, [], [], [], [], [("integer", 7)]))
    assert group_function(NUMBER, 2)(torch.ones(3), torch.ones(3)) == 7


def test_an_undefined_tensor_is_a_result(native):
    native.set_planner(lambda group, args, varies: native.Plan(6, [], [], [], [], [("undefined", 0)]))
    assert group_function(ADD_IN_PLACE, 2)(torch.ones(3), torch.ones(3)) is None


@pytest.mark.parametrize("updates", [[(2, True)], [(-1, True)]])
def test_an_update_of_no_argument_is_refused(native, updates):
    native.set_reporter(lambda *report: None)
    native.set_planner(
        lambda group, args, varies: native.Plan(6, [], [], [], [], [("input", 0)], updates=updates)
    )
    f, a = group_function(ADD_IN_PLACE, 2), torch.ones(3)
    f(a, a)
    assert a.tolist() == [2.0] * 3
