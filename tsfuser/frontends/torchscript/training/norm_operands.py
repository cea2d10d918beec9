"""Norms of which eager saves a copy of an operand: `group_norm` of a transposed tensor, `rms_norm` of 16 bits
on the CPU, `instance_norm`'s weights. Of an `rms_norm` on the CPU of which only the weight has a gradient,
eager saves neither the operand nor the weight, but what it multiplies the weight by. Of a `batch_norm` of no
elements it saves nothing. The program may write to what eager does not save. Before:

    forward(%x):  %y = aten::group_norm(%x, ...);  return (%y, %x)
    backward(%grad, %x):  tsfuser::group_norm_backward(%grad, %x, ...)

after:

    forward(%x):  %y = aten::group_norm(%x, ...);  %c = tsfuser::norm_operand(%x, 0);  return (%y, %c)
    backward(%grad, %c):  tsfuser::group_norm_backward(%grad, %c, ...)

`tsfuser::norm_operand` gives %x itself where eager copies nothing. In: `SavedValues` of a differentiable
graph. Out: its forward, changed in place. Only for what the program may see, and what no other formula
reads."""

from __future__ import annotations

from ....graph.wrapper import Node, Value, graph_inputs, graph_outputs, insert, is_tensor
from .saved import SavedValues, asks_for_dtype, is_of_an_input

#: Derivative -> the number of its norm (csrc_stubs/torchscript/operand_twin.cpp).
_NORMS = {
    "tsfuser::group_norm_backward": 0,
    "tsfuser::instance_norm_backward": 1,
    "tsfuser::rms_norm_backward": 2,
}
_OPERAND = 1
_BATCH_NORM = ("aten::_batch_norm_impl_index_backward", _OPERAND)
_UNLESS_EMPTY = 4  # the number of a batch norm
_WEIGHT_ONLY = 3  # the number of an rms_norm of which only the weight has a gradient
_WEIGHTS = {("tsfuser::instance_norm_backward", 2), ("tsfuser::instance_norm_backward", 3)}


def copy_operands(saved: SavedValues) -> None:
    """Changes what the forward keeps."""
    results = graph_outputs(saved.forward)[: saved.real]
    seen = {value.unique() for value in (*graph_inputs(saved.forward), *results)}
    for j, value, argument in list(saved.of_outputs()):
        if j < saved.real or not is_tensor(value):
            continue
        uses = [use for use in argument.uses() if not asks_for_dtype(use)]  # which a copy has, too
        readers = {(use.user.kind(), use.offset) for use in uses}
        if readers == {_BATCH_NORM} and is_of_an_input(value):
            _keep(saved, j, "tsfuser::norm_operand", [value, _UNLESS_EMPTY])
        elif value.unique() in seen:
            if readers and all(_gives_weight_only(use.user) for use in uses):
                _keep(saved, j, "tsfuser::norm_operand", [value, _WEIGHT_ONLY])
                continue
            if readers and readers <= _WEIGHTS:
                _keep(saved, j, "aten::clone", [value, None])
            elif len(readers) == 1 and (reader := readers.pop())[0] in _NORMS and reader[1] == _OPERAND:
                _keep(saved, j, "tsfuser::norm_operand", [value, _NORMS[reader[0]]])


def _keep(saved: SavedValues, j: int, kind: str, operands: list) -> None:
    """Has output `j` of the forward be the result of an op."""
    forward = saved.forward
    end = forward.return_node()
    forward.setInsertPoint(end)
    given = [v if isinstance(v, Value) else forward.insertConstant(v) for v in operands]
    end.replaceInput(j, insert(forward, end, kind, given).output())


def _gives_weight_only(node: Node) -> bool:
    return node.kind() == "tsfuser::rms_norm_backward" and not list(node.outputsAt(0).uses())
