"""Scripted training by joint graphs: experimental, where PYTORCH_NVFUSER_ENABLE asks for `joint_graph`.

In: a program, which gets regions (tsfuser/joint/regions.py); then the graph of a region, whose inputs have
the types of a call, and which of them require a gradient. Out: the graph that such calls run, with a
`prim::DifferentiableGraph`; None where the region stays with torch's autodiff, and the log `partition` says
why (csrc_stubs/torchscript/joint_function.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _C, log, options
from ...errors import Refusal
from ...graph.effects import Effects, remove_dead_code, secretly_written
from ...graph.functionalize import functionalize, is_identity
from ...graph.passes import no_collection
from ...graph.size_tensors import ask_sizes
from ...graph.types import infer_missing_types
from ...graph.wrapper import (
    Block,
    Graph,
    Node,
    Value,
    all_blocks,
    all_nodes,
    blocks,
    constant_before,
    facts,
    graph_inputs,
    insert,
    is_tensor,
    nodes_in,
    nodes_of,
    nodes_without_types,
    outputs,
    schema,
)
from ...ir.dtypes import DTYPES
from ...joint.autocast import device_kinds, write_casts
from ...joint.example_types import note_types
from ...joint.packing import pack
from ...joint.regions import FEWEST, outline
from ...joint.rules.table import Unknown
from ...planning import failures
from . import stored_passes
from .stored_passes import Made, Place

_ATTRIBUTE = "prim::GetAttr"
_OWN = frozenset({"aten", "prim", "tsfuser"})  # spaces of ops
_CHUNK, _DTYPE, _DEVICE = "prim::ConstantChunk", "prim::dtype", "prim::device"


def regions(graph: Graph) -> Graph | None:
    """The program with regions; None where it has none. `graph` is changed."""
    return _guarded("joint_regions", graph, lambda: _known_or_outlined(graph))


def joint_graph(
    graph: Graph, wanted: Sequence[bool], numbers: Sequence[Any]
) -> Graph | tuple[int, ...] | None:
    """The packed graph. `graph` is changed. `numbers`: what its inputs are in the call, None for tensors.
    A tuple: the inputs that have to be constants, for there to be a packed graph."""
    return _guarded("joint_graph", graph, lambda: _known_or_made(graph, wanted, numbers))


def _guarded(name: str, graph: Graph, make: Callable[[], Graph | None]) -> Graph | tuple[int, ...] | None:
    try:
        with no_collection():
            return make()
    except Unknown as unknown:
        return unknown.numbers
    except Refusal as refusal:
        log.write("partition", f"training is left to torch's autodiff: {refusal}", "")
    except Exception as error:
        failures.gave_up(name, error, failures.line_of(graph))
    return None


def _known_or_outlined(graph: Graph) -> Graph | None:
    """The program with regions, from disk where a process has made it."""
    stored = _place_of("joint_regions", graph)
    found = stored.find() if stored else None
    if found is not None:
        return found.graphs[0] if found.graphs else None
    made = _regions(graph)
    if stored:
        stored.keep(Made([made] if made else []))
    return made


def _regions(graph: Graph) -> Graph | None:
    _C.plain_forms(graph)
    for block in all_blocks(graph):
        for node in nodes_of(block, (_CHUNK,)):
            _write_chunk(graph, node)
    functionalize(graph)
    remove_dead_code(graph)
    if not any(map(secretly_written, all_nodes(graph))):  # torch would take such an op for dead
        torch._C._jit_pass_loop_unrolling(graph)
    ask_sizes(graph)
    effects = Effects(graph)
    _share_attributes(graph, effects, {})
    return graph if outline(graph, effects, 1 if options.state.single_node_mode else FEWEST) else None


def _share_attributes(block: Graph | Block, effects: Effects, known: dict[tuple[int, str], Value]) -> None:
    """Reads each attribute of a module once: what a loop read in each of its turns would have a gradient of
    each. `known`: those that are read before the block."""
    known = dict(known)
    for node in nodes_in(block):
        if node.kind() == _ATTRIBUTE and not effects.is_changed(node.inputsAt(0)):
            read = known.setdefault((node.inputsAt(0).unique(), node.s("name")), node.output())
            if read.unique() != node.output().unique():
                node.output().replaceAllUsesWith(read)
                node.destroy()
        else:
            for inner in blocks(node):
                _share_attributes(inner, effects, known)


def _known_or_made(graph: Graph, wanted: Sequence[bool], numbers: Sequence[Any]) -> Graph:
    """The packed graph, from disk where a process has made it; or the inputs that have to be constants."""
    stored = _place(graph, wanted, numbers)
    found = stored.find() if stored else None
    if found is not None and not found.graphs:
        raise Unknown("as a process has found", found.numbers)
    if found is not None:
        return found.graphs[0]
    try:
        made = _joint_graph(graph, wanted, numbers)
    except Unknown as unknown:
        if stored:
            stored.keep(Made([], tuple(unknown.numbers)))
        raise
    if stored:
        stored.keep(Made([made]))
    return made


def _place(graph: Graph, wanted: Sequence[bool], numbers: Sequence[Any]) -> Place | None:
    given = (list(map(bool, wanted)), list(numbers), _autocast(graph), torch._C._get_default_device())
    return _place_of("joint_graph", graph, given)


def _place_of(name: str, graph: Graph, given: Any = ()) -> Place | None:
    """None where an op of another library could tell of its results or writes, which no key holds."""
    if any(node.kind().partition("::")[0] not in _OWN for node in all_nodes(graph)):
        return None
    return stored_passes.place_of(name, [graph], given, changed=True)


def _autocast(graph: Graph) -> list[tuple[str, bool, torch.dtype]]:
    """What autocast casts to, for the devices of inputs; and for the CPU's, where dtypes of results are asked
    of small tensors (joint/example_types.py)."""
    kinds = sorted({"cpu", *device_kinds(graph)})
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _joint_graph(graph: Graph, wanted: Sequence[bool], numbers: Sequence[Any]) -> Graph:
    torch._C._jit_pass_constant_propagation(graph)
    _check_dtypes(graph)
    write_casts(graph)
    functionalize(graph)
    infer_missing_types(graph)
    note_types(graph, numbers)
    if nodes_without_types(graph):
        infer_missing_types(graph)
    if _fold_known(graph):
        note_types(graph, numbers)  # of tensors that are made on such a device
    _write_promotions(graph)
    seeds = not options.disabled("recompute") and not options.enabled("eager_random")
    return pack(graph, wanted, options.enabled("keep_inputs"), seeds, numbers)


def _fold_known(graph: Graph) -> bool:
    """Writes dtypes and devices that follow from those of the inputs, which are facts of a packed graph: a
    group need not wait for the tensor that is asked. Whether there were any."""
    found = False
    for node in nodes_of(graph, (_DTYPE, _DEVICE)):
        dtype, device, _ = facts(node.inputsAt(0).type())
        known = dtype if node.kind() == _DTYPE else device
        if known is not None:
            value = DTYPES[known].code if node.kind() == _DTYPE else torch.device(known)
            node.output().replaceAllUsesWith(constant_before(graph, node, value))
            found = True
    remove_dead_code(graph)
    infer_missing_types(graph)  # of the gradients that were asked for
    return found


def _write_promotions(graph: Graph) -> None:
    """Writes the cast that is hidden in `x + 0` of bools: torch's peephole pass takes that for `x`, where it
    sees nobody write to the result, and what is behind the region may."""
    for node in filter(is_identity, nodes_in(graph)):
        own, its = (facts(v.type()).dtype for v in (node.inputsAt(0), node.output()))
        if own != its and own in DTYPES and its in DTYPES:
            more = [constant_before(graph, node, v) for v in (DTYPES[its].code, False, False, None)]
            cast = insert(graph, node, "aten::to", [node.inputsAt(0), *more]).output()
            cast.setType(node.output().type())
            node.output().replaceAllUsesWith(cast)
            node.destroy()


def _check_dtypes(graph: Graph) -> None:
    """Types of results must not depend on numbers, which other calls have others of."""
    for value in (value for value in graph_inputs(graph) if not is_tensor(value)):
        for use in value.uses():
            found = schema(use.user)
            if found is not None and found.arguments[use.offset] == "dtype":
                raise Unknown("a dtype is computed elsewhere", (value.offset(),))


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
