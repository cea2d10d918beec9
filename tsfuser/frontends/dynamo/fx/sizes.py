"""Size expressions of an FX graph, as size arithmetic of a torch._C.Graph.

In: a Python function that FX calls with symbolic ints, `operator.mul(s0, 4)`. Out: the kind of node that does
the same with ints or floats, `aten::mul`. There is none for bools that depend on shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

#: function -> kind, for ints only
ARITHMETIC: dict[Callable[..., Any], str] = {
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.neg: "aten::neg",
    operator.floordiv: "aten::floordiv",
    operator.mod: "aten::remainder",
    torch.sym_max: "prim::max",
    torch.sym_min: "prim::min",
}
#: The same where the result is a float.
FLOATS: dict[Callable[..., Any], str] = {
    torch.sym_float: "aten::Float",
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.neg: "aten::neg",
    operator.truediv: "aten::div",
    operator.pow: "aten::pow",
    torch._sym_sqrt: "aten::sqrt",
}
#: The sum of a list of ints
SUM = getattr(torch, "sym_sum", None)
#: ATen's questions about tensors -> kind
QUESTIONS: dict[Any, str] = {
    torch.ops.aten.sym_size.int: "aten::size",
    torch.ops.aten.sym_numel.default: "aten::numel",
    torch.ops.aten.sym_stride.int: "aten::stride",
    torch.ops.aten.sym_storage_offset.default: "aten::storage_offset",
}
#: The kind of node that reads a number from a tensor, by the type of the number
ITEMS = {"IntType": "aten::Int", "FloatType": "aten::Float", "BoolType": "aten::Bool"}
