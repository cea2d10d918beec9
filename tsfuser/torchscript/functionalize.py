"""Turns in-place ops into their functional forms, where no one can see the difference (behaviour.md 1.3).

Before: `y = x * 2; y += 1`. After: `y = x * 2; z = y + 1`. `x += 1` on a graph input stays: the caller sees
it. So does `y += w` where `y + w` would be of another dtype than `y`, and what is of an unknown one."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import _C
from ..ops import table
from .effects import Effects
from .graph import Graph, Node, all_blocks, schema
from .partition import Knowledge, arguments
from .shapes import common_device, infer_missing_types


def _in_place_kinds() -> "tuple[str, ...]":
    names = dict.fromkeys(f"{row.name}_" for row in table.all_rows() if not row.is_view)
    return tuple(name for name in names if torch._C._jit_get_schemas_for_operator(name))


KINDS = _in_place_kinds()  #: the in-place forms of the ops in the table, `aten::add_`


def functionalize(graph: Graph) -> Graph:
    """Rewrites the in-place nodes of `KINDS` whose target is made in the graph and aliased by nothing else;
    torch's alias analysis decides. A graph about which that analysis is wrong is left alone."""
    kinds = frozenset(KINDS)
    wanted = any(node.kind() in kinds for block in all_blocks(graph) for node in block.nodes())
    if not wanted or Effects(graph).misled:
        return graph
    changed = True
    while changed:  # the types of what was rewritten decide about what follows
        knowledge = Knowledge()
        nodes = [node for block in all_blocks(graph) for node in block.nodes() if node.kind() in kinds]
        nodes = [node for node in nodes if _keeps_dtype(node, knowledge)]
        changed = bool(nodes) and _C.remove_tensor_mutation(graph, nodes)
        if changed:
            infer_missing_types(graph)
    return graph


def _keeps_dtype(node: Node, knowledge: Knowledge) -> bool:
    """Whether the functional form gives a tensor of the dtype that the in-place op leaves in its target."""
    found = schema(node)
    functional = _functional(found.name, found.overload) if found else None
    device = common_device(node, knowledge)
    if functional is None or device is None or len(functional[1]) != len(found.arguments):
        return False
    row, names = functional
    given = zip(names, arguments(node, found, knowledge).values())
    results = row.infer(dict(given), device, knowledge.default)
    target = knowledge.facts(node.inputsAt(0)).dtype
    return isinstance(results, tuple) and results[0] is not None and results[0][0] == target


@lru_cache(maxsize=None)
def _functional(name: str, overload: str) -> "tuple[table.Row, tuple[str, ...]] | None":
    """The row of an in-place op without its underscore, and the names of its arguments, which may be others
    than the in-place op's."""
    for known in (overload, f"Tensor_{overload}"):  # pow_.Tensor, pow.Tensor_Tensor
        row = table.find(name[:-1], known)
        for form in torch._C._jit_get_schemas_for_operator(name[:-1]) if row else ():
            if form.overload_name == known:
                return row, tuple(argument.name for argument in form.arguments)
    return None
