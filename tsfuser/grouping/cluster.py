"""Which nodes of a block form groups: the algorithm, on plain integers.

In: `Item`s, one a node, in the order of the block. Out: disjoint clusters of positions such that
contracting each leaves no cycle, and an order of the block in which every cluster stands in one place. Each
item is merged, when its turn comes, with the clusters of its producers, latest first, then with clusters
that read the same tensor. Before a merge the units between are tested: a unit outside that follows one part
and precedes the other forbids it. For that, every unit keeps the set of clusters above it as the bits of
one integer, so that a test is a few `and`s, and a block of 10,000 nodes takes a fraction of a second.
Example: in

    0: a = x + y    1: m = mm(a, w)    2: b = m * 2    3: c = a + b

3 may join {2} (`m` stays above both) but then not {0}, since 1 lies between.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: A kernel's arguments (tensors in and out, numbers). Beyond that argument structs and registers for
#: pointers grow for nothing.
MAX_ARGUMENTS = 96
#: Nodes in a group. At 256 operations an element a kernel is far over any machine's balance of arithmetic
#: to memory traffic (about 14 flop a byte), so a cut costs nothing at run time, while compilers are worse
#: than linear in the length of a function.
MAX_NODES = 256
#: How many clusters that read the same tensor are tried for an item. The latest are the likeliest to be
#: free of a path between.
SIBLINGS = 4


class Item(NamedTuple):
    """A node. `device` is None if it cannot be fused. `loose`: may join, but only a cluster on `device`,
    and never starts one. `after`: positions that must come before. `reads`: value ids that would be
    arguments of a kernel. `makes`: value id -> its uses, not counting those that ask for sizes. `meets`:
    value ids over which siblings may be merged; `near`: those of them over which they are only if no item
    that `parts` stands between. `apart`: positions, among those `after` which it comes, with which it must
    not share a cluster. `held`: those that it only comes after, and reads nothing of."""

    after: tuple[int, ...]
    device: str | None = None
    loose: bool = False
    reads: tuple[int, ...] = ()
    makes: tuple[tuple[int, int], ...] = ()
    meets: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    parts: bool = False
    held: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class _Unit:
    """A cluster, or a single item that is none. `bits`: its own names in masks; `above`: those of all
    clusters that must precede it."""

    members: list[int]
    device: str | None
    last: int
    bits: int = 0
    above: int = 0
    before: list[_Unit] = field(default_factory=list)
    following: list[_Unit] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    makes: dict[int, int] = field(default_factory=dict)
    apart: list[_Unit] = field(default_factory=list)
    merged: _Unit | None = None

    def root(self) -> _Unit:
        unit = self
        while unit.merged is not None:
            unit = unit.merged
        if self is not unit:
            self.merged = unit  # path compression
        return unit


def clusters(items: Sequence[Item], horizontal: bool = True) -> list[list[int]]:
    """Disjoint sorted lists of positions, lone nodes included; in the order of their last nodes."""
    units: list[_Unit] = []
    readers: dict[int, list[_Unit]] = {}
    names, parted = 0, -1  # the last position that parts
    for i, item in enumerate(items):
        parted = i if item.parts else parted
        unit = _Unit([i], item.device, i)
        units.append(unit)
        before = {id(u): u for u in (units[p].root() for p in item.after)}
        unit.before = list(before.values())
        for u in unit.before:
            unit.above |= u.above | u.bits
            u.following.append(unit)
        if item.device is None:
            continue
        for v in item.reads:
            unit.reads[v] = unit.reads.get(v, 0) + 1
        unit.makes = {v: uses for v, uses in item.makes if uses}
        unit.apart = [units[p] for p in item.apart]
        read = [units[p].root() for p in item.after if p not in item.held]
        unit = _join(unit, item, read, readers, horizontal, parted)
        if item.loose and unit.members == [i]:
            unit.device = None
        elif not unit.bits:
            unit.bits = 1 << names
            names += 1
        for v in item.meets:
            readers[v] = [*_distinct(readers.get(v, ()), unit)[1 - SIBLINGS :], unit]
    found = {id(u): u for u in (unit.root() for unit in units) if u.device is not None}
    return sorted((sorted(u.members) for u in found.values()), key=lambda members: members[-1])


def _join(
    unit: _Unit,
    item: Item,
    read: list[_Unit],
    readers: dict[int, list[_Unit]],
    horizontal: bool,
    parted: int,
) -> _Unit:
    """Merges the new unit with all clusters that it can be merged with; returns the result. `read`: those of
    its producers."""
    producers = sorted({id(u): u for u in read if u.device == item.device}.values(), key=lambda u: -u.last)
    for other in producers:
        unit = _merge(unit, other.root())
    if not horizontal or (item.loose and unit.bits == 0):
        return unit
    for value in item.meets:
        for other in reversed(readers.get(value, ())):
            is_far = value in item.near and other.root().last < parted
            if other.root().device == item.device and not is_far:
                unit = _merge(unit, other.root())
    return unit


def _merge(a: _Unit, b: _Unit) -> _Unit:
    """The union of both if it is small enough and acyclic, else `a`. The smaller part is moved into the
    larger one."""
    if a is b or not _fits(a, b) or _parted(a, b) or _parted(b, a) or _between(a, b) or _between(b, a):
        return a
    keep, gone = (a, b) if len(a.members) >= len(b.members) else (b, a)
    gone.merged = keep
    keep.members += gone.members
    keep.last = max(keep.last, gone.last)
    keep.bits |= gone.bits
    for v, uses in gone.reads.items():
        keep.reads[v] = keep.reads.get(v, 0) + uses
    keep.makes.update(gone.makes)
    keep.apart += gone.apart
    for v in (*gone.reads, *gone.makes):
        if v in keep.makes and v in keep.reads:
            keep.makes[v] -= keep.reads.pop(v)
            if not keep.makes[v]:
                del keep.makes[v]
    keep.before = _distinct(keep.before + gone.before, keep)
    keep.following = _distinct(keep.following + gone.following, keep)
    keep.above = (keep.above | gone.above) & ~keep.bits
    _spread(keep)
    return keep


def _distinct(units: Sequence[_Unit], without: _Unit) -> list[_Unit]:
    roots = {id(u): u for u in (unit.root() for unit in units)}
    roots.pop(id(without), None)
    return list(roots.values())


def _fits(a: _Unit, b: _Unit) -> bool:
    """Whether the union has not too many nodes and arguments."""
    if len(a.members) + len(b.members) > MAX_NODES:
        return False
    small, large = (a, b) if len(a.reads) + len(a.makes) <= len(b.reads) + len(b.makes) else (b, a)
    arguments = len(large.reads) + len(large.makes)
    for v, uses in small.reads.items():
        if v in large.makes:
            arguments -= large.makes[v] == uses
        else:
            arguments += v not in large.reads
    for v, uses in small.makes.items():
        inside = large.reads.get(v, 0)
        arguments += (inside != uses) - (inside > 0)
    return arguments <= MAX_ARGUMENTS


def _parted(a: _Unit, b: _Unit) -> bool:
    """Whether something in `a` must stay apart from something in `b`."""
    return any(unit.root() is b for unit in a.apart)


def _between(first: _Unit, second: _Unit) -> bool:
    """Whether some other unit follows `first` and precedes `second`."""
    if not first.bits:
        return False  # a new unit, which nothing follows yet
    second.before = _distinct(second.before, second)
    return any(u is not first and u.above & first.bits for u in second.before)


def _spread(unit: _Unit) -> None:
    """Tells all that follow what is above them now."""
    waiting = [unit]
    while waiting:
        source = waiting.pop()
        mask = source.above | source.bits
        for u in source.following:
            u = u.root()
            if u is not source and mask & ~(u.above | u.bits):
                u.above |= mask & ~u.bits
                waiting.append(u)


def absorb(found: list[list[int]], candidates: dict[int, set[int]]) -> list[list[int]]:
    """`found` with each candidate taken into the cluster that alone reads its results. `candidates`:
    position -> the positions that read its results, -1 for a reader in another block. This makes no cycle:
    all that follows the item is inside."""
    home = {i: k for k, members in enumerate(found) for i in members}
    for i in sorted(candidates, reverse=True):
        where = {home.get(j) for j in candidates[i]}
        if i not in home and len(where) == 1 and None not in where:
            home[i] = where.pop()
    result: list[list[int]] = [[] for _ in found]
    for i in sorted(home):
        result[home[i]].append(i)
    return result


def arrange(items: Sequence[Item], found: list[list[int]]) -> list[list[int]] | None:
    """All positions, clusters in one piece, in an order that respects `after` and changes as little as
    possible: a cluster stands where its last node stood. None where a cluster both follows and precedes a
    node outside."""
    unit_of = {i: members for members in found for i in members}
    units = [unit_of.setdefault(i, [i]) for i in range(len(items))]
    missing: dict[int, int] = {}
    following: dict[int, list] = {}
    for i, item in enumerate(items):
        for p in {id(units[p]): units[p] for p in item.after if units[p] is not units[i]}.values():
            following.setdefault(id(p), []).append(units[i])
            missing[id(units[i])] = missing.get(id(units[i]), 0) + 1
    distinct = {id(u): u for u in units}.values()
    ready = [(u[-1], u) for u in distinct if not missing.get(id(u))]
    heapq.heapify(ready)
    result = []
    while ready:
        _, unit = heapq.heappop(ready)
        result.append(unit)
        for u in following.get(id(unit), ()):
            missing[id(u)] -= 1
            if not missing[id(u)]:
                heapq.heappush(ready, (u[-1], u))
    return result if len(result) == len(distinct) else None
