"""The memory of the tensors of a graph, and how large it is.

In: a typed graph. Out: a number for each piece of memory, and for each value the pieces in which it may be: a
view is in that of its operand, a list in those of its items, and what a group stores over an input in that of
the input. Example, `%y = aten::t(%x)`: `memory.of([y]) == memory.of([x])`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ....graph.effects import may_return_operand
from ....graph.wrapper import CONSTANT, GROUP, LIST, Graph, Node, Value, is_tensor, operands, outputs
from .in_place import stored_over

_NO_COPY = ("prim::ListUnpack", LIST, CONSTANT)


class Memory:
    """The pieces of memory by number, and the `bytes` of each. `kept`: those that outlive the graph."""

    def __init__(self, graph: Graph):
        self.bytes: list[int] = []
        self._of: dict[int, frozenset[int]] = {}
        for value in graph.inputs():
            self._make(value)
        for node in graph.nodes():
            for value in outputs(node):
                if makes_none(node):
                    self._of[value.unique()] = self.of(operands(node))
                elif (over := stored_over(value)) is not None:
                    self._of[value.unique()] = self._of[over]
                else:
                    self._make(value)
        self.kept = self.of(graph.outputs())

    def _make(self, value: Value) -> None:
        if is_tensor(value):
            self._of[value.unique()] = frozenset((len(self.bytes),))
            self.bytes.append(bytes_of(value))

    def of(self, values: Iterable[Value]) -> frozenset[int]:
        """All pieces in which the values may be."""
        return frozenset().union(*(self._of.get(v.unique(), frozenset()) for v in values))

    def size(self, numbers: Iterable[int]) -> int:
        return sum(self.bytes[k] for k in numbers)


def makes_none(node: Node) -> bool:
    """Whether the results of the node are its operands, or views of them."""
    return node.kind() in _NO_COPY or (node.kind() != GROUP and may_return_operand(node))


def bytes_of(value: Value) -> int:
    """The bytes of a value; 0 if they are not known."""
    sizes, dtype = value.type().sizes(), value.type().dtype()
    return 0 if sizes is None or dtype is None else prod(sizes) * dtype.itemsize
