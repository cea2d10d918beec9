"""Types that the profile missed: results of rewritten in-place ops, of branches that never ran.

In: a graph whose profiled values are typed. Out: the same graph, with dtype, device and rank on every
result that the op table can tell from its operands. The rows themselves do the work, on a call with made-up
sizes, so that there is no second set of rules. Example: `%2 : Tensor = aten::mul(%x, %half)` with `%x :
Float(4, 8, ...)` gets `%2 : Float(*, *, device=cpu)`."""

from __future__ import annotations

from .rows import Knowledge, arguments, row_of
from .wrapper import Facts, Graph, Node, all_blocks, inputs, is_tensor, nodes_without_types, outputs, refine


def infer_missing_types(graph: Graph) -> Graph:
    """Refines the types of results; what the profile recorded stays."""
    knowledge = Knowledge()
    for block in all_blocks(graph):
        for node in nodes_without_types(block):
            infer(node, knowledge)
    return graph


def infer(node: Node, knowledge: Knowledge) -> None:
    """Refines the types of the node's results, where its row and its operands allow."""
    found = row_of(node)
    device = common_device(node, knowledge)
    if found is None or device is None:
        return
    row, its_schema = found
    results = row.infer(arguments(node, its_schema, knowledge), device, knowledge.default)
    if results is None or isinstance(results, str):
        return
    for value, result in zip(outputs(node), results):
        if is_tensor(value) and result is not None:
            dtype, rank = result
            value.setType(refine(value.type(), Facts(dtype, device, rank)))
            knowledge.forget(value)


def common_device(node: Node, knowledge: Knowledge) -> str | None:
    """The device of the operands; a 0-dim CPU tensor beside others does not count. None if one is unknown,
    or they disagree."""
    seen = {knowledge.facts(v)[1:] for v in inputs(node) if is_tensor(v)}
    if any(device is None for device, _ in seen):
        return None
    firm = {device for device, rank in seen if device != "cpu" or rank != 0}
    if len(firm) == 1:
        return firm.pop()
    return "cpu" if seen and not firm else None
