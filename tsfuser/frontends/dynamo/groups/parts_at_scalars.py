"""Parts of a group with nothing but 0-dim tensors in common become groups: a batch of them is one launch.

In: a typed graph with groups, before `make_batches`. Out: the same graph, in which such a group is several.
Example: gradients that are clipped by their norm. One group of all would launch a kernel for each gradient,
each of which computes the factor again. Before, and after, if there were more of them:

    %a, %b = prim::CudaFusionGroup(%norms, %x, %y)     %factor = prim::CudaFusionGroup(%norms)
                                                       %a = prim::CudaFusionGroup(%x, %factor)
                                                       %b = prim::CudaFusionGroup(%y, %factor)

Scalars that eager computes on the CPU are left to it, or to `group_scalar_ops`.
"""

from __future__ import annotations

from collections.abc import Callable

from ....graph.effects import draws
from ....graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    facts,
    graph_outputs,
    ids,
    is_tensor,
    nodes_in,
    operands,
    outputs,
)
from ....grouping.groups import Group
from ....grouping.outline import inline, outline
from .batched_launches import LEAST, device_of


def part_at_scalars(graph: Graph, groups: list[Group], is_possible: Callable[[str], bool]) -> list[Group]:
    """Changes the graph; returns the groups that there are then. `is_possible`: as of `make_batches`."""
    made: list[Group] = []
    for group in groups:
        parts = _parts(group.node) if _may_be_parted(group, is_possible) else []
        made += [group] if not parts else _parted(graph, group.node, parts)
    return made


def _may_be_parted(group: Group, is_possible: Callable[[str], bool]) -> bool:
    """Random numbers are drawn in the order of the program."""
    return not group.written and not draws(group.node) and is_possible(device_of(group.node))


def _parts(group: Node) -> list[list[int]]:
    """The numbers of the subgraph's nodes: first those that are in no group, then those that each new group
    gets, the one that makes scalars for the others before these. Empty where the group stays one."""
    subgraph = group.g("Subgraph")
    nodes = nodes_in(subgraph)
    homes = _connected(nodes)
    found: dict[int, list[int]] = {}
    for k, node in enumerate(nodes):
        if node.kind() != CONSTANT:
            found.setdefault(homes[k], []).append(k)
    large = {v.unique() for v in graph_outputs(subgraph) if _links(v)}
    parts = [
        part for part in found.values() if any(not large.isdisjoint(ids(outputs(nodes[k]))) for k in part)
    ]
    if len(parts) < LEAST:
        return []
    first = [k for part in found.values() if part not in parts for k in part]
    home = {key: homes[k] for k, node in enumerate(nodes) for key in ids(outputs(node))}
    of_first = {homes[k] for k in first}
    for k, node in enumerate(nodes):
        read = {home[key] for key in ids(operands(node)) if key in home} - {homes[k]}
        if node.kind() != CONSTANT and any(nodes[h].kind() != CONSTANT and h not in of_first for h in read):
            return []  # it waits for a part
    hosts = _read_elsewhere(nodes, sorted(first), device_of(group))
    first = [k for k in sorted(first) if k not in hosts]
    if hosts and not first:
        return []
    return [hosts, *([first] if first else []), *parts]


def _read_elsewhere(nodes: list[Node], first: list[int], device: str) -> list[int]:
    """Those of the nodes `first` that eager computes on the CPU, and others than these read."""
    readers: dict[int, set[int]] = {}
    for k, node in enumerate(nodes):
        for key in ids(operands(node)):
            readers.setdefault(key, set()).add(k)
    inside, found = set(first), list[int]()
    for k in reversed(first):
        read_by = set().union(*(readers.get(key, ()) for key in ids(outputs(nodes[k]))))
        if _is_elsewhere(nodes[k], device) and not read_by <= inside:
            found.append(k)
            inside.discard(k)
    return found[::-1]


def _is_elsewhere(node: Node, device: str) -> bool:
    """Whether eager computes the node on another device, which is the CPU."""
    made = [v for v in outputs(node) if is_tensor(v)]
    return bool(made) and all(facts(v.type()).device not in (None, device) for v in made)


def _connected(nodes: list[Node]) -> list[int]:
    """For each node the number of the first one to which tensors with dims, or lists, lead."""
    above = list(range(len(nodes)))

    def home(k: int) -> int:
        while above[k] != k:
            above[k] = above[above[k]]
            k = above[k]
        return k

    seen: dict[int, int] = {}  # value -> a node that makes or reads it
    for k, node in enumerate(nodes):
        if node.kind() == CONSTANT:
            continue
        linked = [v for v in operands(node) if _links(v)]
        linked += [v for v in outputs(node) if _links(v) or not is_tensor(v)]
        for value in linked:
            other = home(seen.setdefault(value.unique(), k))
            one = home(k)
            above[max(one, other)] = min(one, other)
    return [home(k) for k in range(len(nodes))]


def _links(value: Value) -> bool:
    """Whether the value joins its readers in one part: tensors of a dim or more do, and computed numbers."""
    if not is_tensor(value):
        return value.node().kind() not in (CONSTANT, "prim::Param")
    return facts(value.type()).rank != 0


def _parted(graph: Graph, group: Node, parts: list[list[int]]) -> list[Group]:
    nodes = inline(graph, group)
    hosts, *chosen = [[nodes[k] for k in part] for part in parts]
    anchor = nodes[-1]
    for node in [n for part in (hosts, *chosen) for n in part]:
        node.moveAfter(anchor)
        anchor = node
    return [Group(outline(graph, part), written=False) for part in chosen]
