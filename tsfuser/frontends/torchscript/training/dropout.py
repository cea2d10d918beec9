"""Dropouts of which the forward saves the seed of their random numbers, not their masks.

In: `SavedValues`, of a differentiable graph. Out: the same, whose backward asks for the mask. Before:

    forward  %y, %mask = aten::native_dropout(%x, %p, %train);  return (%y, %mask)
    backward(%grad, %mask):  %g = aten::native_dropout_backward(%grad, %mask, %scale)
becomes
    forward  %y, %mask = aten::native_dropout(%x, %p, %train);  %saved = tsfuser::dropout_seed(%mask)
             return (%y, %saved)
    backward(%grad, %saved):  %mask = tsfuser::dropout_mask(%saved, %grad, %p)
                              %g = aten::native_dropout_backward(%grad, %mask, %scale)

What is saved is a seed where one group makes the mask and `%saved`: then nothing of the mask is stored. Else
it is the mask: where the forward runs unfused, which draws as eager does; outside of training; where memory
holds the tensor in an order that no seed has; on a host, where drawing a number takes longer than reading a
byte. A group of the backward is planned for either, and its fallback takes either
(csrc_stubs/torchscript/dropout_seeds.cpp), so that forward and backward always have the same mask.

A mask stays as it is where the program or another formula reads it, and where the rate is not a constant.
"""

from __future__ import annotations

from ....graph.wrapper import Node, Value, constant_near, constant_of, insert, is_constant, nodes_of
from .saved import SavedValues


def draw_again(saved: SavedValues) -> None:
    """Changes both graphs."""
    arguments: dict[str, list[tuple[int, Value]]] = {}
    for j, value, argument in saved.of_outputs():
        arguments.setdefault(value.debugName(), []).append((j, argument))
    for node in nodes_of(saved.forward, ("aten::native_dropout",)):
        places = arguments.get(node.outputsAt(1).debugName(), [])
        if _is_for_gradients(saved, node, places):
            _replace(saved, node, places)


def _is_for_gradients(saved: SavedValues, node: Node, places: list[tuple[int, Value]]) -> bool:
    """Whether nothing but gradients of the dropout read its mask; `places`: where that is saved."""
    rate, mask = node.inputsAt(1), node.outputsAt(1)
    if not places or not is_constant(rate) or not isinstance(constant_of(rate), float):
        return False
    kept = {j for j, _ in places}
    returned = all(use.user.kind() == "prim::Return" and use.offset in kept for use in mask.uses())
    return (
        returned
        and kept.isdisjoint(range(saved.real))
        and kept.isdisjoint(saved.gradients)
        and all(
            use.user.kind() == "aten::native_dropout_backward" and use.offset == 1
            for _, argument in places
            for use in argument.uses()
        )
    )


def _replace(saved: SavedValues, node: Node, places: list[tuple[int, Value]]) -> None:
    mask, returning = node.outputsAt(1), saved.forward.return_node()
    made = insert(saved.forward, node, "tsfuser::dropout_seed", [mask])
    made.moveAfter(node)
    for j, argument in places:
        returning.replaceInput(j, made.output())
        for use in list(argument.uses()):
            rate = constant_near(saved.backward, use.user, node.inputsAt(1))
            operands = [argument, use.user.inputsAt(0), rate]
            drawn = insert(saved.backward, use.user, "tsfuser::dropout_mask", operands)
            use.user.replaceInput(1, drawn.output())
