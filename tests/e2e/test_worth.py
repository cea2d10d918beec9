"""Which ops become groups though nothing is fused with them."""

import pytest
import torch

import tsfuser  # noqa: F401 (its ops)
from kit.support import kinds
from tsfuser.graph.passes import run
from tsfuser.graph.wrapper import GROUP
from tsfuser.grouping.passes import BEFORE_GROUPS, MAKE_GROUPS, Work
from tsfuser.grouping.support import Refusals

SUM = """graph(%x : Float({n}, 128, strides=[128, 1], requires_grad=0, device={device}),
      %y : Float(128, 64, strides=[64, 1], requires_grad=0, device={device})):
  %false : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %zero : int = prim::Constant[value=0]()
  %dims : int[] = prim::ListConstruct(%zero)
  %s : Float(128, strides=[1], requires_grad=0, device={device}) = aten::sum(%x, %dims, %false, %none)
  %p : Float({n}, 64, strides=[64, 1], requires_grad=0, device={device}) = aten::mm(%x, %y)
  return (%s, %p)"""


@pytest.mark.parametrize(
    "device, n, reductions, fused",
    [
        ("cuda:0", 512, True, True),
        ("cuda:0", 512, False, False),
        ("cuda:0", 8, True, False),
        ("cpu", 512, True, False),
    ],
)
def test_a_reduction_alone(device, n, reductions, fused):
    graph = torch._C.parse_ir(SUM.format(device=device, n=n))
    run(Work(graph, Refusals(), lone_reductions=reductions), (*BEFORE_GROUPS, *MAKE_GROUPS))
    groups = graph.findAllNodes(GROUP, True)
    assert [kinds(g) for g in groups] == [["prim::ListConstruct", "aten::sum"]] * fused


GRADIENT = """graph(%x : {dtype}(512, 128, strides=[128, 1], requires_grad=0, device={device}),
      %size : int[]?):
  %s : {dtype}({sizes}, requires_grad=0, device={device}) = aten::_grad_sum_to_size(%x, %size)
  return (%s)"""


@pytest.mark.parametrize(
    "device, dtype, sizes, fused",
    [
        ("cuda:0", "BFloat16", "128, strides=[1]", True),
        ("cuda:0", "Double", "128, strides=[1]", False),
        ("cuda:0", "BFloat16", "512, 128, strides=[128, 1]", False),
        ("cpu", "BFloat16", "128, strides=[1]", False),
    ],
)
def test_a_gradient_of_a_bias_alone(device, dtype, sizes, fused):
    """One of the sizes of its operand is that operand."""
    graph = torch._C.parse_ir(GRADIENT.format(device=device, dtype=dtype, sizes=sizes))
    run(Work(graph, Refusals()), (*BEFORE_GROUPS, *MAKE_GROUPS))
    assert [kinds(g) for g in graph.findAllNodes(GROUP, True)] == [["aten::_grad_sum_to_size"]] * fused


ADDITION = """graph(%x : Float(64, 128, strides=[128, 1], requires_grad=0, device={device}),
      %y : Float(64, 128, strides={strides}, requires_grad=0, device={device})):
  %one : int = prim::Constant[value=1]()
  %s : Float(64, 128, strides=[128, 1], requires_grad=0, device={device}) = aten::add(%x, %y, %one)
  %p : Float(64, 64, strides=[64, 1], requires_grad=0, device={device}) = aten::mm(%s, %s)
  return (%s, %p)"""


@pytest.mark.parametrize(
    "device, strides, fused",
    [
        ("cuda:0", "[1, 64]", True),
        ("cuda:0", "[128, 1]", False),
        ("cuda:0", "[0, 1]", False),
        ("cuda:0", "[256, 1]", False),
        ("cpu", "[1, 64]", False),
    ],
)
def test_an_addition_across_a_layout_alone(device, strides, fused):
    graph = torch._C.parse_ir(ADDITION.format(device=device, strides=strides))
    run(Work(graph, Refusals(), lone_reductions=True), (*BEFORE_GROUPS, *MAKE_GROUPS))
    assert [kinds(g) for g in graph.findAllNodes(GROUP, True)] == [["aten::add"]] * fused


NORM = """graph(%x : {dtype}({n}, 8, 16, 16, strides=[2048, 1, 128, 8], requires_grad=0, device={device}),
      %w : Float(8, strides=[1], requires_grad=0, device={device}),
      %b : Float(8, strides=[1], requires_grad=0, device={device}),
      %m : Float(8, strides=[1], requires_grad=0, device={device}),
      %v : Float(8, strides=[1], requires_grad=0, device={device}), %training : bool):
  %number : float = prim::Constant[value=0.1]()
  %on : bool = prim::Constant[value=1]()
  %y : {dtype}({n}, 8, 16, 16, strides=[2048, 1, 128, 8], requires_grad=0, device={device}) = {norm}
  return (%y)"""


@pytest.mark.parametrize(
    "device, dtype, n, fused",
    [
        ("cuda:0", "BFloat16", 4, True),
        ("cuda:0", "BFloat16", 1, False),
        ("cuda:0", "Float", 4, False),
        ("cpu", "BFloat16", 4, False),
    ],
)
def test_a_batch_norm_alone(device, dtype, n, fused):
    """cuDNN takes no bfloat16, and ATen several kernels."""
    norm = "aten::batch_norm(%x, %w, %b, %m, %v, %training, %number, %number, %on)"
    graph = torch._C.parse_ir(NORM.format(device=device, dtype=dtype, n=n, norm=norm))
    run(Work(graph, Refusals()), (*BEFORE_GROUPS, *MAKE_GROUPS))
    assert [kinds(g) for g in graph.findAllNodes(GROUP, True)] == [["aten::batch_norm"]] * fused


MASKED = """graph(%x : {type}):
  %rate : float = prim::Constant[value=0.5]()
  %true : bool = prim::Constant[value=1]()
  %y : {type}, %mask : {type} = aten::native_dropout(%x, %rate, %true)
  return (%y, %mask)"""


def test_an_op_with_two_results_alone():
    matrix = "Float(512, 128, strides=[128, 1], requires_grad=0, device=cuda:0)"
    graph = torch._C.parse_ir(MASKED.format(type=matrix))
    run(Work(graph, Refusals(), lone_reductions=True), (*BEFORE_GROUPS, *MAKE_GROUPS))
    assert not graph.findAllNodes(GROUP, True)
