"""Scripted training by joint graphs: experimental, where PYTORCH_NVFUSER_ENABLE asks for `joint_graph`.

In: the graph of a function, whose inputs have the types of a call, and which of them require a gradient. Out:
the graph that such calls run, one `prim::DifferentiableGraph`; None where the function stays with torch's
autodiff, and the log `partition` says why (csrc_stubs/torchscript/joint_function.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _C, log, options
from ...errors import Refusal
from ...graph.functionalize import functionalize
from ...graph.passes import no_collection
from ...graph.types import infer_missing_types
from ...graph.wrapper import (
    Graph,
    Node,
    constant_before,
    graph_inputs,
    graph_outputs,
    insert,
    nodes_of,
    nodes_with_blocks,
    outputs,
)
from ...joint.example_types import note_types
from ...joint.packing import pack
from ...planning import failures

_CHUNK = "prim::ConstantChunk"
_TAKEN = frozenset(("TensorType", "IntType", "FloatType", "BoolType"))


def joint_graph(graph: Graph, wanted: Sequence[bool]) -> Graph | None:
    """The packed graph. `graph` is changed."""
    try:
        with no_collection():
            return _joint_graph(graph, wanted)
    except Refusal as refusal:
        log.write("partition", f"training is left to torch's autodiff: {refusal}", "")
    except Exception as error:
        failures.gave_up("joint_graph", error, failures.line_of(graph))
    return None


def _joint_graph(graph: Graph, wanted: Sequence[bool]) -> Graph:
    _C.plain_forms(graph)
    given = [v.type().kind() for v in graph_inputs(graph)]
    if not _TAKEN.issuperset(given):
        raise Refusal("an input is no tensor or number")
    (result,) = graph_outputs(graph)
    is_tuple = result.type().kind() == "TupleType"
    torch._C._jit_pass_lower_all_tuples(graph)
    for node in nodes_of(graph, (_CHUNK,)):
        _write_chunk(graph, node)
    functionalize(graph)
    infer_missing_types(graph)
    if nodes_with_blocks(graph):
        raise Refusal("it has branches or loops")
    note_types(graph)
    packed = pack(graph, wanted, keep_inputs=options.enabled("keep_inputs"))
    if is_tuple:
        packed.makeMultiOutputIntoTuple()
    return packed


def _write_chunk(graph: Graph, node: Node) -> None:
    """Writes a chunk as the program does."""
    numbers = [constant_before(graph, node, node.i(name)) for name in ("chunks", "dim")]
    parts = insert(graph, node, "aten::chunk", [node.inputsAt(0), *numbers]).output()
    parts.setType(torch._C.ListType(torch._C.TensorType.get()))
    items = insert(graph, node, "prim::ListUnpack", [parts], node.outputsSize())
    for value, item in zip(outputs(node), outputs(items)):
        item.setType(value.type())
        value.replaceAllUsesWith(item)
    node.destroy()


def switch() -> None:
    """Obeys the options, which have been read by now."""
    if options.enabled("joint_graph"):
        _C.use_joint_functions(True)
