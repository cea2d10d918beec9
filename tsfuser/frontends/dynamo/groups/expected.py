"""The arguments with which the groups of a graph will be called: those of the traced call.

In: a graph with groups, whose values carry the types of the traced call, and the numbers that sizes were.
Out: for each group its number and the arguments, if all are known. An intermediate tensor is expected in
eager's layout, at an aligned address. Example:

    [(3, (TensorArg("float32", "cpu", (4, 8), (8, 1), 64),))]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ....graph.wrapper import GROUP, Graph, Node, Value, all_blocks, inputs, is_constant
from ....ir.call import Arg, ListArg, OtherArg, ScalarArg, TensorArg

_KINDS = {int: "int", bool: "bool", float: "float", complex: "complex"}


def expected_calls(graph: Graph, numbers: Mapping[int, int]) -> Iterator[tuple[int, tuple[Arg, ...]]]:
    """The groups in order, each with its arguments. `numbers`: the numbers of values, by `unique()`."""
    for block in all_blocks(graph):
        for node in block.nodes():
            if node.kind() == GROUP:
                found = expected_arguments(node, numbers)
                if found is not None:
                    yield node.i("cache_id"), found


def expected_arguments(group: Node, numbers: Mapping[int, int]) -> tuple[Arg, ...] | None:
    """The arguments of one group; None if not all are known."""
    found = tuple(_argument(value, numbers) for value in inputs(group))
    return None if None in found else found


def _argument(value: Value, numbers: Mapping[int, int]) -> Arg | None:
    """The argument for one value; None if it is not known."""
    kind = value.type().kind()
    if kind == "TensorType":
        return _tensor(value.type())
    if kind == "FloatType":
        return ScalarArg("float")
    if kind == "NoneType":
        return OtherArg(None)
    if value.node().kind() == "prim::ListConstruct" and kind == "ListType":
        items = [_number(item, numbers) for item in inputs(value.node())]
        return None if None in items else ListArg("int", tuple(items))
    number = _number(value, numbers)
    return None if number is None else ScalarArg(_KINDS[type(number)], number)


def _number(value: Value, numbers: Mapping[int, int]) -> int | None:
    found = value.toIValue() if is_constant(value) else numbers.get(value.unique())
    return found if type(found) in (int, bool) else None


def _tensor(type_) -> TensorArg | None:
    sizes, strides, dtype, device = type_.sizes(), type_.strides(), type_.dtype(), type_.device()
    if None in (sizes, strides, dtype, device):
        return None
    name = str(dtype).removeprefix("torch.")
    place = str(torch.device(device))
    return TensorArg(name, place, tuple(sizes), tuple(strides))  # aligned, as memory that torch allocates
