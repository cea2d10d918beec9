"""Arithmetic of numbers in an FX graph, as that of a torch._C.Graph.

In: a Python function that FX calls with symbolic numbers, `operator.mul(s0, 4)`. Out: the kind of node that
does the same with ints, floats or bools, `aten::mul`. `numbers.py` in translation/ makes the nodes.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

#: Function -> kind. TorchScript has an overload for each kind of operands.
NUMBERS: dict[Callable[..., Any], str] = {
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.neg: "aten::neg",
    operator.floordiv: "aten::floordiv",
    operator.mod: "aten::remainder",
    operator.truediv: "aten::div",
    operator.pow: "aten::pow",
    operator.lshift: "aten::__lshift__",
    operator.rshift: "aten::__rshift__",
    operator.and_: "aten::__and__",
    operator.or_: "aten::__or__",
    operator.xor: "aten::__xor__",
    operator.eq: "aten::eq",
    operator.ne: "aten::ne",
    operator.lt: "aten::lt",
    operator.le: "aten::le",
    operator.gt: "aten::gt",
    operator.ge: "aten::ge",
    operator.abs: "prim::abs",
    builtins.abs: "prim::abs",
    torch.sym_max: "prim::max",
    torch.sym_min: "prim::min",
    torch.sym_float: "aten::Float",
    torch.sym_not: "aten::__not__",
    operator.not_: "aten::__not__",
}
#: Those of Python's `math`.
FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(torch, f"_sym_{name}"): f"aten::{name}"
    for name in "sqrt cos cosh sin sinh tan tanh asin acos atan log2".split()
    if hasattr(torch, f"_sym_{name}")
}
NUMBERS.update(FUNCTIONS)
#: Function -> how it makes an int of a float, as `tsfuser::whole` calls it.
WHOLE: dict[Callable[..., Any], str] = {
    builtins.round: "round",
    math.floor: "floor",
    math.ceil: "ceil",
    math.trunc: "trunc",
    torch.sym_int: "trunc",
}
#: The sum of a list of ints; and one of two numbers.
SUM = getattr(torch, "sym_sum", None)
CHOICE = torch.sym_ite
#: ATen's questions about tensors -> kind
QUESTIONS: dict[Any, str] = {
    torch.ops.aten.sym_size.int: "aten::size",
    torch.ops.aten.sym_numel.default: "aten::numel",
    torch.ops.aten.sym_stride.int: "aten::stride",
    torch.ops.aten.sym_storage_offset.default: "aten::storage_offset",
}
#: The kind of node that reads a number from a tensor, by the type of the number
ITEMS = {"IntType": "aten::Int", "FloatType": "aten::Float", "BoolType": "aten::Bool"}
