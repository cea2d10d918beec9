"""Dropouts of which the forward saves the seed of their random numbers, not their masks.

In: cuts that have one forward, such as that for second derivatives. Out: the same, changed in place, in which
backwards ask for the mask. Before:

    forward  %y, %mask = aten::native_dropout(%x, %p, %train);  return (%y, %mask)
    backward(%grad, %mask):  %g = aten::native_dropout_backward(%grad, %mask, %scale)
becomes
    forward  %y, %mask = aten::native_dropout(%x, %p, %train);  %saved = tsfuser::dropout_seed(%mask)
             return (%y, %saved)
    backward(%grad, %saved):  %mask = tsfuser::dropout_mask(%saved, %grad, %p)
                              %g = aten::native_dropout_backward(%grad, %mask, %scale)

What is saved is a seed where one group makes the mask and `%saved`
(frontends/torchscript/training/dropout.py says when). A mask stays as it is where anything else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.wrapper import (
    Value,
    constant_before,
    constant_of,
    graph_inputs,
    graph_outputs,
    insert,
    is_constant,
)
from .divide import Cut

_DROPOUT, _BACKWARD = "aten::native_dropout", "aten::native_dropout_backward"


def draw_again(parts: Cut, *others: Cut) -> None:
    """Changes the graphs of all, which save the same."""
    made, ways = graph_outputs(parts.forward), (parts, *others)
    for k, j in enumerate(parts.saved_outputs):
        arguments = [_argument(way, k) for way in ways]
        if j >= parts.results and _is_for_gradients(made[j], arguments):
            rate = float(constant_of(made[j].node().inputsAt(1)))
            seed = insert(parts.forward, parts.forward.return_node(), "tsfuser::dropout_seed", [made[j]])
            seed.output().setType(made[j].type())
            parts.forward.return_node().replaceInput(j, seed.output())
            for way, argument in zip(ways, arguments):
                _ask_for_mask(way, argument, rate)


def _argument(way: Cut, k: int) -> Value:
    """What the backward gets for the saved output number `k`."""
    return graph_inputs(way.backward)[len(way.asked) + len(way.saved_inputs) + k]


def _is_for_gradients(mask: Value, arguments: Sequence[Value]) -> bool:
    """Whether nothing but gradients of the dropout read its mask."""
    node = mask.node()
    if node.kind() != _DROPOUT or mask.offset() != 1 or not is_constant(node.inputsAt(1)):
        return False
    read = [use for argument in arguments for use in argument.uses()]
    return len(mask.uses()) == 1 and all(use.user.kind() == _BACKWARD and use.offset == 1 for use in read)


def _ask_for_mask(way: Cut, argument: Value, rate: float) -> None:
    for use in argument.uses():
        node = use.user
        operands = [argument, node.inputsAt(0), constant_before(way.backward, node, rate)]
        mask = insert(way.backward, node, "tsfuser::dropout_mask", operands)
        mask.output().setType(argument.type())
        node.replaceInput(1, mask.output())
