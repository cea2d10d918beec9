"""Forward and backward of AOTAutograd's joint graph, as the cut of the typed joint graph says.

In: a joint FX graph, and how many of its outputs are the forward's. Out: two FX modules, of nodes of the
joint graph: torch extracts them, as for its own partitioners, once it is known which nodes the forward saves.
Raises Refusal where something else decides that, such as a checkpoint, or where the graph cannot be
translated.

What is saved need not be what eager saves: a program that writes to an input or a result before the backward
gets an error then, as with torch's partitioners. And nobody differentiates the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import fx
from torch._functorch import config, partitioners

from ....errors import Refusal
from ....graph.wrapper import LIST, Value, inputs
from ....joint.cut import chosen
from ....joint.roles import Roles
from ....ops import table, without_row
from .translate import Translated, translate

#: Namespaces of ops that torch's partitioner treats in ways of its own.
_COLLECTIVE = ("_c10d_functional", "_dtensor")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def divide(joint: fx.GraphModule, results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward."""
    _check(joint.graph)
    saved = _saved(translate(joint, results))
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        [node for node in saved if not isinstance(node.meta["val"], _SYMBOLIC)],
        saved_sym_nodes=[node for node in saved if isinstance(node.meta["val"], _SYMBOLIC)],
        num_fwd_outputs=results,
    )
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    return partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)


def _check(graph: fx.Graph) -> None:
    """Raises Refusal where the program, or a mode of torch, says what is saved."""
    if config.activation_memory_budget != 1 or getattr(config, "enable_activation_offloading", False):
        raise Refusal("torch has a budget of memory for what is saved")
    if getattr(config, "_sync_decision_cross_ranks", False):
        raise Refusal("several processes decide what is saved")
    for node in graph.nodes:
        if partitioners.must_recompute(node):
            raise Refusal("a checkpoint says what the backward computes again")
        if "memory_budget" in node.meta or node.meta.get("partitioner_tag") == "must_be_in_backward":
            raise Refusal("the program says what the backward does")
        if getattr(node.target, "namespace", None) in _COLLECTIVE:
            raise Refusal("processes exchange tensors")


def _saved(translated: Translated) -> list[fx.Node]:
    """What the forward saves, in the order of the graph."""
    roles = Roles(translated.joint)
    everything = frozenset(range(len(roles.grads)))
    shown = {root for value in (*roles.given, *roles.results) for root in roles.roots(value)}
    numbers = chosen(roles, dict.fromkeys(shown, everything), again=_again())
    values = [v for v in roles.given if v.unique() in numbers]
    values += [v for node in roles.nodes for v in node.outputs() if v.unique() in numbers]
    found = dict.fromkeys(node for value in values for node in _nodes(value, translated))
    return [node for node in found if node.op != "get_attr"]


@cache
def _again() -> frozenset[str]:
    """Ops that the backward may run again, which groups take, or which `rewrites/ranges.py` takes out of the
    graph: a lookup reads as much as its result has."""
    lookups = {row.name for row in table.all_rows() if row.family == "lookup"}
    return without_row.OF_NUMBERS | lookups


def _nodes(value: Value, translated: Translated) -> Iterator[fx.Node]:
    """Those whose results the value is. A list is made of its items again, and a number that no node gives of
    what it is computed from."""
    found = translated.nodes.get(value.unique(), [])
    if any(isinstance(node.meta["val"], (torch.Tensor, *_SYMBOLIC)) for node in found):
        yield from found
        return
    if not found and value.node().kind() != LIST and value.type().kind() == "TensorType":
        raise Refusal("a tensor is saved that no node of the graph gives")
    for operand in inputs(value.node()):
        yield from _nodes(operand, translated)
