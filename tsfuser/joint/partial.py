"""A backward for calls in which some gradients are missing: what only they lead to is left out, as in eager.

Zeros would do, but where a derivative is infinite or NaN: of `(cos(x), log(x))` with a gradient for the first
result alone, 0 / x is NaN at 0. In: a backward, one op at a time. Out: the same, for torch's `LowerGradOf`:

    %a = aten::neg(%ga);  %b = aten::div(%gb, %x);  %g = aten::add(%a, %b, %1)
    ->  %a = prim::GradOf(%ga) { neg };  %b = prim::GradOf(%gb) { div };  %g = prim::AutogradAdd(%a, %b)
"""

from __future__ import annotations

from ..graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    constant_of,
    graph_inputs,
    inputs,
    is_constant,
    is_tensor,
    nodes_in,
    outputs,
)

_TUPLE, _SUM, _LIST = "prim::TupleConstruct", "aten::add", "prim::ListConstruct"


def partial(graph: Graph, gradients: int) -> Graph | None:
    """`gradients`: so many of the first inputs may be missing. None where an op reads several gradients of
    which some may be missing, or numbers of one."""
    made = graph.copy()
    leading = {v.unique(): frozenset((i,)) for i, v in enumerate(graph_inputs(made)[:gradients])}
    for node in nodes_in(made):
        late = [v for v in inputs(node) if v.unique() in leading]
        if not late or node.kind() in (CONSTANT, _TUPLE):
            continue
        found = [leading[v.unique()] for v in late]
        if _is_sum(node, late):
            node = _write_sum(made, node)
        elif len(set(found)) > 1 or not all(map(_holds_tensors, late)):
            return None
        elif node.kind() != _LIST:
            node = _write_part(made, node, late)
        leading.update((v.unique(), frozenset().union(*found)) for v in outputs(node))
    return made


def _is_sum(node: Node, late: list[Value]) -> bool:
    if node.kind() != _SUM or len(late) != 2 or not all(map(is_tensor, late)):
        return False
    factor = inputs(node)[2]
    return is_constant(factor) and constant_of(factor) == 1


def _write_sum(graph: Graph, node: Node) -> Node:
    total = graph.create("prim::AutogradAdd", inputs(node)[:2], 1).insertBefore(node)
    total.copyMetadata(node)
    total.output().setType(node.output().type())
    node.output().replaceAllUsesWith(total.output())
    node.destroy()
    return total


def _write_part(graph: Graph, node: Node, late: list[Value]) -> Node:
    part = graph.create("prim::GradOf", late, node.outputsSize()).insertBefore(node)
    part.s_("name", node.kind())
    part.copyMetadata(node)
    block = part.addBlock()
    for value, result in zip(outputs(node), outputs(part)):
        result.setType(value.type())
        value.replaceAllUsesWith(result)
    copy = graph.createClone(node, lambda v: v).insertBefore(block.returnNode())
    for value in outputs(copy):
        block.registerOutput(value)
    node.destroy()
    return part


def _holds_tensors(value: Value) -> bool:
    type_ = value.type()
    return is_tensor(value) or (type_.kind() == "ListType" and type_.getElementType().kind() == "TensorType")
