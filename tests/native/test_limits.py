"""Limits of number arguments: C++ compares the numbers of each call, and runs the ops where one is beyond.

A plan here gives its first argument back, which tells it from the op, a product.
"""

import math

import pytest
import torch

from kit.native_support import group_function

GRAPH = """
graph(%a : Tensor, %v : {}):
  %r : Tensor = aten::mul(%a, %v)
  return (%r)
"""
REASON = "a number is beyond what the plan is made for"


def serves(native, kind, number, leaves, nan=False, infinite=False):
    """Whether a plan with limits serves a call with `number`."""
    limits = [(1, (-3, 2**62), (-0.5, 1e10), nan, infinite)]
    plan = native.Plan(leaves, [], [], [], [], [("input", 0)], limits=limits)
    native.set_planner(lambda group, args, varies: plan)
    f, a = group_function(GRAPH.format(kind), 2), torch.randn(4)
    native.reset()
    for _ in range(2):  # the second call is an exact hit
        result = f(a, number)
    beyond = native.stats()["fallbacks"].get(REASON, 0)
    assert beyond in (0, 2)
    assert torch.equal(result, a * number if beyond else a) or math.isnan(number)
    return not beyond


@pytest.mark.parametrize("number", [-4, -3, 0, 2**62, 2**62 + 1, 2**63 - 1, -(2**63)])
def test_an_int(native, number):
    assert serves(native, "int", number, 4) == (-3 <= number <= 2**62)


@pytest.mark.parametrize("number", [-0.6, -0.5, -0.0, 0.3, 1e10, 1.1e10, 1e300])
def test_a_float(native, number):
    assert serves(native, "float", number, 3) == (-0.5 <= number <= 1e10)


@pytest.mark.parametrize("allowed", [False, True])
def test_nan_and_infinities(native, allowed):
    for number in (math.inf, -math.inf):
        assert serves(native, "float", number, 3, infinite=allowed) == allowed
    assert serves(native, "float", math.nan, 3, nan=allowed) == allowed


@pytest.mark.parametrize("number", [1j, 0.5 - 0.4j, -1 + 0j, 1 - 1j])
def test_both_parts_of_a_complex_number(native, number):
    plan = native.Plan(3, [], [], [], [], [("input", 0)], limits=[(1, (0, 1), (-0.5, 1.0), False, False)])
    native.set_planner(lambda group, args, varies: plan)
    f, a = group_function(GRAPH.format("complex"), 2), torch.randn(4)
    inside = min(number.real, number.imag) >= -0.5
    assert torch.equal(f(a, number), a if inside else a * number)


def test_the_element_of_a_tensor(native):
    plan = native.Plan(4, [], [], [], [], [("input", 0)], limits=[(1, (0, 7), (0.0, 7.0), False, False)])
    native.set_planner(lambda group, args, varies: plan)
    f, a = group_function(GRAPH.format("Tensor"), 2), torch.randn(4)
    plan_of = {2.0: a, 8.0: a * 8.0}
    for number, wanted in plan_of.items():
        assert torch.equal(f(a, torch.tensor(number)), wanted)


def test_a_limit_of_what_is_no_number_is_a_wrong_plan(native):
    for index in (0, 2, -1):
        plan = native.Plan(
            3, [], [], [], [], [("input", 0)], limits=[(index, (0, 1), (0.0, 1.0), True, True)]
        )
        native.set_planner(lambda group, args, varies, plan=plan: plan)
        native.reset()
        f, a = group_function(GRAPH.format("float"), 2), torch.randn(4)
        assert torch.equal(f(a, 3.0), a * 3.0)
