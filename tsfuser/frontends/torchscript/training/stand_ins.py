"""What the backward asks only for its dtype and device need not be saved. A tensor that the program sees, it
may write to: torch would refuse to run a backward that has saved it, where eager's op saves nothing. Before:

    forward(%x, %y):  %z = aten::type_as(%x, %y); ...;  saves %x
    backward(%grad, %x):  %g = aten::type_as(%grad, %x)

after:

    forward(%x, %y):  %z = aten::type_as(%x, %y); ...;  %e = aten::new_empty(%x, [1]);  saves %e
    backward(%grad, %e):  %g = aten::type_as(%grad, %e)

In: `SavedValues` of a differentiable graph. Out: the same, with stand-ins."""

from __future__ import annotations

from ....graph.effects import may_return_operand
from ....graph.wrapper import Value, graph_inputs, graph_outputs, insert, is_tensor
from .formulas import is_asked_for_dtype
from .saved import SavedValues


def save_stand_ins(saved: SavedValues) -> SavedValues:
    """`saved` with other graphs, where there is such a tensor."""
    results = graph_outputs(saved.forward)[: saved.real]
    seen = {value.unique() for value in (*graph_inputs(saved.forward), *results)}
    kept = [*saved.of_inputs(), *((value, argument) for _, value, argument in saved.of_outputs())]
    for value, argument in kept:
        is_seen = value.unique() in seen or may_return_operand(value.node())  # or a view of what is
        if is_seen and is_tensor(value) and is_asked_for_dtype(argument):
            saved, small = saved_small(saved, value)
            argument.replaceAllUsesWith(small)
    return saved


def saved_small(saved: SavedValues, value: Value) -> tuple[SavedValues, Value]:
    """`saved` with a tensor of one element, of the dtype of `value`, and what stands for it in the
    backward."""
    forward = saved.forward
    forward.setInsertPoint(forward.return_node())
    sizes = forward.insertConstant([1])
    nothing = forward.insertConstant(None)
    operands = [value, sizes, nothing, nothing, nothing, nothing]
    small = insert(forward, forward.return_node(), "aten::new_empty", operands).output()
    return saved.keeping(small)
