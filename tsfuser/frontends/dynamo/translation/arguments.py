"""Arguments of FX nodes, as values of a torch._C.Graph.

In: an argument as FX has it, and its type in the op's schema. Out: a value of that type. Example: `[s0, 4]`
for `SymInt[]` -> `%3 : int[] = prim::ListConstruct(%s0, %2)`; `torch.float32` -> the int 6.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ....errors import Refusal

_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_FLOAT = torch._C.FloatType.get()


class Arguments:
    """Makes values in `graph`. `values` holds the values of FX nodes."""

    def __init__(self, graph: torch._C.Graph, values: dict[fx.Node, Any]):
        self.graph, self.values = graph, values

    def make(self, given: Any, type_) -> torch._C.Value:
        """The value of one argument. Raises Refusal if a graph cannot hold it."""
        if isinstance(given, fx.Node):
            return self.of_node(given)
        if given is None:
            return self._undefined() if type_.kind() == "TensorType" else self.graph.insertConstant(None)
        while type_.kind() == "OptionalType":
            type_ = type_.getElementType()
        if type_.kind() == "ListType":
            return self._list(given, type_)
        return self._constant(given, type_.kind())

    def _undefined(self) -> torch._C.Value:
        """An undefined tensor, which FX writes as None. The backward ops of attention take some."""
        made = self.graph.create("prim::AutogradZero", 1)
        self.graph.appendNode(made)
        made.output().setType(torch._C.TensorType.get())
        return made.output()

    def of_node(self, node: fx.Node) -> torch._C.Value:
        """The value of another node."""
        value = self.values.get(node)
        if not isinstance(value, torch._C.Value):
            raise Refusal(f"{node} is neither a tensor nor a number")
        return value

    def _list(self, given: Any, type_) -> torch._C.Value:
        items = given if isinstance(given, (list, tuple)) else [given]
        element = type_.getElementType()
        values = [self.make(item, element) for item in items]
        made = self.graph.create("prim::ListConstruct", values, 1)
        self.graph.appendNode(made)
        made.output().setType(torch._C.ListType(element))
        return made.output()

    def _constant(self, given: Any, kind: str) -> torch._C.Value:
        if isinstance(given, torch.memory_format):
            given = _FORMATS[given]
        elif kind == "FloatType" and isinstance(given, (int, float)):
            given = float(given)
        elif isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Refusal("a symbolic number stands in the graph itself")
        elif kind == "IntType" and isinstance(given, bool):
            given = int(given)
        if isinstance(given, float) and given == 0 and math.copysign(1, given) < 0:
            # TorchScript would merge the constants 0.0 and -0.0
            made = self.graph.create("aten::neg", [self.graph.insertConstant(0.0)], 1)
            self.graph.appendNode(made)
            made.output().setType(_FLOAT)
            return made.output()
        try:
            return self.graph.insertConstant(given)
        except TypeError:
            raise Refusal(f"{given!r} cannot be written into a graph") from None
