"""Why nodes that could be fused are in no group, for `explain` and the partition log.

In: what `cluster` saw, on plain integers, and what became of it. Out: position -> sentence. Example: in
`mm(relu(mm(x, w)), v)`, relu is left over: "none of the nodes around it can be fused, and a group of one op
saves nothing"."""

from __future__ import annotations

from collections.abc import Sequence

from .cluster import MAX_ARGUMENTS, MAX_NODES, Item

NOT_RUN = "it is in a branch that did not run while profiling"


def unfused_reasons(
    items: Sequence[Item], merged: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> dict[int, str]:
    """`merged`: the clusters before, `found`: those that become groups. One sentence for each fusible item
    outside of the latter."""
    grouped = {i for members in found for i in members}
    home = {i: members for members in merged for i in members}
    outside = [i for i, item in enumerate(items) if item.device is not None and i not in grouped]
    if not outside:
        return {}
    around, above = _around(items), _above(items)
    return {i: _reason(i, items, home.get(i, (i,)), around, above, home, grouped) for i in outside}


def _above(items: Sequence[Item]) -> list[int]:
    """For each item, those that it comes after, as bits."""
    found: list[int] = []
    for item in items:
        bits = 0
        for j in item.after:
            bits |= found[j] | 1 << j
        found.append(bits)
    return found


def _lies_between(k: int, i: int, j: int, above: list[int]) -> bool:
    """Whether `k` comes after one of `i` and `j`, and before the other."""
    first, last = min(i, j), max(i, j)
    return bool(above[last] >> k & 1 and above[k] >> first & 1)


def _around(items: Sequence[Item]) -> dict[int, set[int]]:
    """Position -> the fusible items that make what it reads, read what it makes, or read the same."""
    found: dict[int, set[int]] = {i: set() for i, item in enumerate(items) if item.device is not None}
    readers: dict[int, list[int]] = {}
    for i in found:
        for j in items[i].after:
            if j in found:
                found[i].add(j)
                found[j].add(i)
        for value in items[i].meets:
            for j in readers.setdefault(value, [])[-8:]:
                found[i].add(j)
                found[j].add(i)
            readers[value].append(i)
    return found


def _reason(i, items, cluster, around, above, home, grouped) -> str:
    if items[i].loose:
        return "it computes a 0-dim CPU tensor, which joins a group only if that alone reads it"
    if len(cluster) > 1:
        if any(j in grouped for j in cluster):
            return "it is a view that something outside of its group reads"
        return "the nodes around it that can be fused only hand tensors through, as views and casts do"
    near = {j for j in around[i] if not items[j].loose}
    if not near:
        return "none of the nodes around it can be fused, and a group of one op saves nothing"
    same = [j for j in near if items[j].device == items[i].device]
    if not same:
        devices = " and ".join(sorted({items[j].device for j in near}))
        return f"it runs on {items[i].device}, while the nodes around it run on {devices}"
    if all(j in items[i].apart or i in items[j].apart for j in same):
        return (
            "elements of a tensor in memory are looked up: what computes that tensor is no part of "
            "the same group"
        )
    if any(len(home.get(j, (j,))) >= MAX_NODES for j in same):
        return f"the group next to it is full: {MAX_NODES} nodes are the most"
    between = (k for j in same for k in range(min(i, j) + 1, max(i, j)) if _lies_between(k, i, j, above))
    if any(k not in grouped for k in between):
        return "a node that is not fused lies between it and the nodes around it that are"
    return (
        "a node that is not fused lies between it and the nodes around it that are, or their group would "
        f"have more than {MAX_ARGUMENTS} tensors"
    )
