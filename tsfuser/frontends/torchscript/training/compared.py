"""Values of the forward that the backward must not compute again, since it compares them with others.

In: `SavedValues`. Out: the names of the values that `graph/compared.py` finds. Example, for `r = relu(z); y =
abs(z - r) * z`, of which autodiff keeps `r`, `z - r` and `abs(z - r)`:

    backward  %sign = aten::sign(%difference)

If the backward computed `z` again, it would subtract the rounded `r` from a `z` with more digits, and the
difference would not be 0 where the forward has found 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....graph.compared import Step, is_elementwise, met_again, selects
from ....graph.rows import row_of
from ....graph.wrapper import Graph, Node, Value, graph_inputs, inputs, is_tensor, nodes_in, outputs
from .saved import SavedValues


def values_compared(saved: SavedValues) -> set[str]:
    """The names, in the forward."""
    if not any(found and found[0].jumps for found in map(row_of, _inner_first(saved.backward))):
        return set()  # as of most graphs: the backward compares nothing
    steps: list[Step | None] = [None] * len(graph_inputs(saved.forward))
    forward = {v.debugName(): k for k, v in enumerate(graph_inputs(saved.forward))}
    makers: dict[int, Node] = {}
    for node in nodes_in(saved.forward):
        makers[len(steps)] = node
        _add(node, steps, forward, jumps=False)
    backward = {
        argument.debugName(): forward[value.debugName()]
        for value, argument in (*saved.of_inputs(), *(pair[1:] for pair in saved.of_outputs()))
        if value.debugName() in forward
    }
    for node in _inner_first(saved.backward):
        _add(node, steps, backward, jumps=True)
    found = {value for value, _ in met_again(steps) if value in makers}
    return {v.debugName() for k in found for v in outputs(makers[k])}


def _inner_first(graph: Graph) -> Iterator[Node]:
    """All nodes, each behind those of its blocks."""
    for node in graph.nodes():
        for block in node.blocks():
            yield from _inner_first(block)
        yield node


def _add(node: Node, steps: list[Step | None], numbers: dict[str, int], jumps: bool) -> None:
    """Adds the node's step. `numbers`: those of the steps that make values, by name."""
    numbers.update((v.debugName(), len(steps)) for v in outputs(node))
    blocks = list(node.blocks())
    if blocks:  # of a formula: its results are those of the block
        made = [v for block in blocks for v in inputs(block.returnNode())]
        steps.append(Step(_steps_of(made, numbers), (), True, True))
        return
    found, operands = row_of(node), [v for v in inputs(node) if is_tensor(v)]
    given = _steps_of(operands, numbers)
    if found is None:
        steps.append(Step(given))
        return
    row, schema = found
    named = zip(schema.arguments, inputs(node)) if jumps and row.jumps else ()
    read = [v for name, v in named if is_tensor(v) and not name.startswith("grad")]
    steps.append(Step(given, _steps_of(read, numbers), is_elementwise(row), selects(row)))


def _steps_of(values: list[Value], numbers: dict[str, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers[v.debugName()] for v in values if v.debugName() in numbers))
