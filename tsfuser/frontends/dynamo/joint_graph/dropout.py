"""Dropouts whose masks the backward draws again, instead of reading them from memory.

In: AOTAutograd's joint graph; or a graph without a backward, which must draw the same numbers, because a
checkpoint runs both. Out: the same graph, in which each dropout has a seed of its own, two int64 that torch's
generator draws in each call; only the seeds are saved, as one tensor. Before:

    result, mask = native_dropout(x, 0.1, True);  gradient = native_dropout_backward(tangent, mask, 1 / 0.9)
becomes
    seeds = randint(0, 2**63 - 1, [24, 2])
    seed = select(seeds, 0, 3)
    result = seeded_dropout(x, seed, 0, 0.1, [0, 1])
    gradient = seeded_dropout(tangent, seed, 0, 0.1, [0, 1])

A dropout is not told by a number, but by its seed, so that equal layers of a network are equal groups, which
share their plans and kernels.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from .... import options
from ..fx.types import order_of

aten = torch.ops.aten
seeded_dropout = torch.ops.tsfuser.seeded_dropout

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Ops that return their operand.
_SAME = (aten.detach.default, aten.alias.default)
#: Keys of a node's `meta` that its new node must not have: they would make the backward compute the seed
#: again, or describe the old value.
_PRIVATE = ("recompute", "ac_graph_id", "has_backward_hook", "val", "tensor_meta", "unbacked_bindings")


def seed_dropouts(joint: fx.GraphModule) -> None:
    """Changes the graph. A dropout stays as it is if its mask has other readers than its gradient. All stay
    as they are if random numbers have to be eager's."""
    if options.enabled("eager_random"):
        return
    graph = joint.graph
    found: dict[torch.device, list[tuple[fx.Node, list[fx.Node]]]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        gradients = _gradients(node)
        if gradients is not None:
            found.setdefault(node.args[0].meta["val"].device, []).append((node, gradients))
    for device, dropouts in found.items():
        seeds = _seeds(graph, dropouts[0][0], device, len(dropouts))
        for k, (node, gradients) in enumerate(dropouts):
            _replace(node, gradients, _seed_of(seeds, k) if len(dropouts) > 1 else seeds)
    if found:
        graph.eliminate_dead_code()
        joint.recompile()


def _gradients(node: fx.Node) -> list[fx.Node] | None:
    """The gradients of a dropout, if nothing else reads its mask; None if it has to stay as it is."""
    x, p, train = node.args
    found = x.meta.get("val")
    if train is not True or type(p) not in (int, float) or not 0 < p <= 1 or node.kwargs:
        return None
    if not isinstance(found, torch.Tensor) or found.dtype not in _FLOATING or found.layout != torch.strided:
        return None
    if found.device.type not in ("cpu", "cuda"):
        return None
    scale = 0.0 if p == 1 else 1 / (1 - p)
    gradients = []
    for item in node.users:
        if item.target is not operator.getitem:
            return None
        for reader in _readers(item) if item.args[1] == 1 else ():
            if reader.target is not aten.native_dropout_backward.default or reader.args[2] != scale:
                return None
            gradients.append(reader)
    return gradients


def _readers(value: fx.Node) -> list[fx.Node]:
    """The readers of the value, also through ops that return their operand."""
    found = []
    for user in value.users:
        found += _readers(user) if user.target in _SAME else [user]
    return found


def _seeds(graph: fx.Graph, like: fx.Node, device: torch.device, count: int) -> fx.Node:
    """The node that draws the seeds of a call, [count, 2], before all other nodes; [2] for a single one."""
    sizes = [count, 2] if count > 1 else [2]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        seeds = graph.call_function(
            aten.randint.low,
            (0, 2**63 - 1, sizes),
            {"dtype": torch.int64, "device": device, "pin_memory": False},
        )
    seeds.meta = _meta(like)
    with detect_fake_mode(like.meta["val"]):
        seeds.meta["val"] = torch.empty(sizes, dtype=torch.int64, device=device)
    return seeds


def _seed_of(seeds: fx.Node, k: int) -> fx.Node:
    with seeds.graph.inserting_after(seeds):
        seed = seeds.graph.call_function(aten.select.int, (seeds, 0, k))
    seed.meta = {**seeds.meta, "val": seeds.meta["val"][k]}
    return seed


def _replace(node: fx.Node, gradients: list[fx.Node], seed: fx.Node) -> None:
    x, p, _ = node.args
    order = order_of(x.meta["val"]) or list(range(x.meta["val"].dim()))
    results = [item for item in node.users if item.args[1] == 0]
    if not results:
        return
    for old, operand, readers in ((node, x, results), *((g, g.args[0], [g]) for g in gradients)):
        with node.graph.inserting_before(old):
            new = node.graph.call_function(seeded_dropout.default, (operand, seed, 0, float(p), order))
        new.meta = {**_meta(old, "recompute", "ac_graph_id"), "val": readers[0].meta["val"]}
        for reader in readers:
            reader.replace_all_uses_with(new)


def _meta(node: fx.Node, *also: str) -> dict[str, Any]:
    return {name: value for name, value in node.meta.items() if name not in _PRIVATE or name in also}
