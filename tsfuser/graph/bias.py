"""Takes the bias out of `linear` and `conv2d`, so that its addition joins a group.

Only where PYTORCH_NVFUSER_ENABLE asks for it: `linear_decomposition`, `conv_decomposition`. Before: `%o =
aten::linear(%x, %w, %b)`, where %x has four dims or more (with fewer, libraries add the bias on the way).
After: `%m = aten::matmul(%x, aten::t(%w));  %o = aten::add(%m, %b, 1)`. Of a convolution the bias becomes
None, and is added with two dims of size 1 behind it."""

from __future__ import annotations

from typing import Any

from .. import options
from ..errors import warn
from .wrapper import Graph, Node, Value, insert, is_tensor

LEAST_RANK = 4  # of the operand of a linear that is split

_warned: set[str] = set()  # registry: the kinds that were left alone, and said to be


def split_biases(graph: Graph) -> Graph:
    """Splits what the options ask for; anything whose sizes were not seen stays, with one warning."""
    splits = {
        "aten::linear": (options.enabled("linear_decomposition"), _split_linear),
        "aten::conv2d": (options.enabled("conv_decomposition"), _split_convolution),
    }
    for kind, (wanted, split) in splits.items():
        for node in graph.findAllNodes(kind, True) if wanted else ():
            if is_tensor(node.inputsAt(2)):
                _split(graph, node, split)
    return graph


def _split(graph: Graph, node: Node, split: Any) -> None:
    if any(v.type().sizes() is None for v in (node.inputsAt(0), node.inputsAt(1), node.output())):
        if node.kind() not in _warned:
            _warned.add(node.kind())
            warn(f"the bias of a {node.kind()} is not taken out: its sizes are unknown")
        return
    if node.kind() == "aten::linear" and node.inputsAt(0).type().dim() < LEAST_RANK:
        return
    graph.setInsertPoint(node)
    before, bias = split(graph, node)
    before.setType(node.output().type())
    result = _insert(graph, node, "aten::add", before, bias, graph.insertConstant(1))
    result.setType(node.output().type())
    node.output().replaceAllUsesWith(result)
    node.destroy()
    graph.setInsertPoint(graph.return_node())


def _insert(graph: Graph, place: Node, kind: str, *operands: Value) -> Value:
    return insert(graph, place, kind, list(operands)).output()


def _split_linear(graph: Graph, node: Node) -> tuple[Value, Value]:
    x, weight, bias = (node.inputsAt(i) for i in range(3))
    return _insert(graph, node, "aten::matmul", x, _insert(graph, node, "aten::t", weight)), bias


def _split_convolution(graph: Graph, node: Node) -> tuple[Value, Value]:
    rest = [node.inputsAt(i) for i in range(3, node.inputsSize())]
    before = _insert(
        graph, node, "aten::conv2d", node.inputsAt(0), node.inputsAt(1), graph.insertConstant(None), *rest
    )
    bias, last = node.inputsAt(2), graph.insertConstant(-1)
    type_ = bias.type()
    for rank in (2, 3):
        bias = _insert(graph, node, "aten::unsqueeze", bias, last)
        if type_.sizes() is not None:
            bias.setType(type_.with_sizes([*type_.sizes(), *[1] * (rank - 1)]))
    return before, bias
