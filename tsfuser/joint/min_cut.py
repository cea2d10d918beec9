"""The cheapest cut of a network, nearest to its sink.

In: a network of numbered vertices, whose edges have capacities. Out: the vertices on the sink's side of the
cut whose edges have the least sum of capacities; of several such cuts, that with the fewest vertices there.
Example, of a line with two equal edges:

    network = Network(3); network.edge(0, 1, 5); network.edge(1, 2, 5); network.sink_side(0, 2)   ->   {2}

It is Dinic's algorithm: while a path with room leads from the source to the sink, flow is pushed along all
shortest ones.
"""

from __future__ import annotations

from collections import deque

UNBOUNDED = 1 << 62  # the capacity of an edge that no cut may take


class Network:
    """Vertices from 0 on, and edges: edge k goes to `_ends[k]` and has `_room[k]` left; edge k ^ 1 is its
    way back."""

    def __init__(self, vertices: int):
        self._edges: list[list[int]] = [[] for _ in range(vertices)]
        self._ends: list[int] = []
        self._room: list[int] = []

    def vertex(self) -> int:
        """One more."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int, capacity: int) -> None:
        for here, there, room in ((start, end, capacity), (end, start, 0)):
            self._edges[here].append(len(self._ends))
            self._ends.append(there)
            self._room.append(room)

    def sink_side(self, source: int, sink: int) -> set[int] | None:
        """None if every cut takes an unbounded edge. Call it once: the flow stays in the network."""
        total = 0
        while (levels := self._levels(source, sink)) is not None:
            tried = [0] * len(self._edges)
            while pushed := self._push(source, sink, levels, tried):
                total += pushed
                if total >= UNBOUNDED:
                    return None
        return self._leading_to(sink)

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """How many edges with room lead from the source to each vertex; None if none lead to the sink."""
        levels = [-1] * len(self._edges)
        levels[source] = 0
        waiting = deque((source,))
        while waiting:
            here = waiting.popleft()
            for edge in self._edges[here]:
                there = self._ends[edge]
                if self._room[edge] and levels[there] < 0:
                    levels[there] = levels[here] + 1
                    waiting.append(there)
        return levels if levels[sink] >= 0 else None

    def _push(self, source: int, sink: int, levels: list[int], tried: list[int]) -> int:
        """Pushes flow along one shortest path; how much, 0 if none is left. `tried`: how many edges of each
        vertex are known to lead nowhere."""
        path: list[int] = []
        here = source
        while here != sink:
            edges = self._edges[here]
            while tried[here] < len(edges):
                edge = edges[tried[here]]
                there = self._ends[edge]
                if self._room[edge] and levels[there] == levels[here] + 1:
                    path.append(edge)
                    here = there
                    break
                tried[here] += 1
            else:
                if not path:
                    return 0
                here = self._ends[path.pop() ^ 1]
                tried[here] += 1
        flow = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= flow
            self._room[edge ^ 1] += flow
        return flow

    def _leading_to(self, sink: int) -> set[int]:
        """The vertices from which edges with room lead to the sink."""
        found, waiting = {sink}, [sink]
        while waiting:
            for edge in self._edges[waiting.pop()]:
                there = self._ends[edge]
                if self._room[edge ^ 1] and there not in found:
                    found.add(there)
                    waiting.append(there)
        return found
