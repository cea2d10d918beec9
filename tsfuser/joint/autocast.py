"""Casts of autocast that no graph shows.

In: a region's graph in a call under autocast, whose casts torch has written into the graph. Out: the same,
with the casts that torch leaves out: of an operand that may be None, such as a bias, where it has cast others
of the same op. Raises Refusal where an op would cast more itself. Example: `aten::mm(%x, %w)` of values that
are given, while autocast is on. A joint graph runs without autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..errors import Refusal
from ..graph.wrapper import Graph, Node, Value, facts, graph_inputs, inputs, insert, is_tensor, nodes_in
from ..ops.unsupported import heavy_kinds

REDUCED, FULL = "aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision"
_FLOAT32, _NUMBERS = 6, {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}


def cast_to(kind: str, dtype: str, device: str, flags: Sequence[Any]) -> int | None:
    """The dtype to which such a cast, whose flags these are, casts a tensor; None where it hands it on."""
    on_cpu = device == "cpu"
    if not flags[1 if on_cpu else 0]:
        return None
    if kind == FULL:
        return _FLOAT32 if dtype in ("float16", "bfloat16") else None
    return flags[3 if on_cpu else 2] if dtype == "float32" else None


def device_kinds(graph: Graph) -> set[str]:
    """Of the inputs whose devices are known."""
    devices = {facts(v.type()).device for v in graph_inputs(graph) if is_tensor(v)} - {None}
    return {torch.device(device).type for device in devices}


def write_casts(graph: Graph) -> None:
    """Writes the casts that are missing. Raises Refusal if autocast is on, and an op casts what torch has
    written no cast before, or casts to another dtype than torch has written."""
    for kind in filter(torch.is_autocast_enabled, device_kinds(graph)):
        for node in nodes_in(graph):
            _write(graph, node, kind)


def _write(graph: Graph, node: Node, device: str) -> None:
    if node.kind() == REDUCED:
        number = node.inputsAt(4 if device == "cpu" else 3).toIValue()
        if number != _NUMBERS.get(torch.get_autocast_dtype(device)):
            raise Refusal("autocast has another dtype than the graph")
    elif _is_cast(node.kind(), device):
        given = list(enumerate(inputs(node)))
        missing = [(i, v) for i, v in given if is_tensor(v) and not _is_cast_already(v, node.kind(), device)]
        others = [v.node() for _, v in given if v.node().kind() == REDUCED]
        if missing and not others:
            raise Refusal(f"autocast casts what {node.kind()} is given, which the graph does not show")
        for place, value in missing:
            flags = inputs(others[0])[1:]
            node.replaceInput(place, insert(graph, node, REDUCED, [value, *flags]).output())


def _is_cast_already(value: Value, reader: str, device: str) -> bool:
    """Whether the graph shows the cast, or there is none: of a weight that a product reads, which one op has
    cast with others (csrc_stubs/torchscript/weight_casts.cpp)."""
    narrow = f"torch.{facts(value.type()).dtype}" == str(torch.get_autocast_dtype(device))
    return value.node().kind() in (REDUCED, FULL) or (narrow and reader in _heavy())


@cache
def _heavy() -> frozenset[str]:
    return frozenset(heavy_kinds())


@cache
def _is_cast(kind: str, device: str) -> bool:
    """Whether autocast has something to say about the op."""
    packet = getattr(torch.ops.aten, kind.removeprefix("aten::"), None) if kind.startswith("aten::") else None
    names = [getattr(packet, overload).name() for overload in packet.overloads()] if packet else ()
    return any(_has_kernel(name, f"Autocast{device.upper()}") for name in names)


def _has_kernel(name: str, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:  # an overload of TorchScript's alone
        return False
