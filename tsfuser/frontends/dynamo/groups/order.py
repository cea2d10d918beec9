"""The order of a backward's nodes, by the memory that they free.

In: a typed graph with groups, whose inputs nobody else holds. Out: the same graph, in which a node that frees
more memory than it allocates runs as early as possible. Example: the gradient of a weight is small, and is
the last reader of a saved activation; the gradient of the layer's input is as large as the activation.
Before:

    %x = aten::mm(%g, %w);  %t = aten::t(%saved);  %dw = aten::mm(%t, %g)
becomes
    %t = aten::t(%saved);  %dw = aten::mm(%t, %g);  %x = aten::mm(%g, %w)

Now `saved` is freed before `x` is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....graph.effects import Effects, draws
from ....graph.wrapper import Graph, end_of, operands, outputs
from .memory import Memory, makes_none

_LEAST = 1 << 16  # bytes that are worth a move


@dataclass(frozen=True)
class _Step:
    """A node that is no view, by its position in the graph. `first`: the steps that come before it in any
    order, `reads`: the memory that it reads, `makes`: the memory of its results. All by number."""

    at: int
    first: frozenset[int]
    reads: frozenset[int]
    makes: frozenset[int]
    is_movable: bool


def free_early(graph: Graph) -> None:
    """Moves nodes of the graph's top block up."""
    memory = Memory(graph)
    steps = _steps(graph, memory)
    order = _Order(steps, memory)
    for k in range(len(steps)):
        order.hoist(k)
    if order.steps != list(range(len(steps))):
        _rearrange(graph, [steps[k].at for k in order.steps])


def _steps(graph: Graph, memory: Memory) -> list[_Step]:
    """All nodes that are no views, in order."""
    nodes = list(graph.nodes())
    held = Effects(graph).order(nodes)
    steps: list[_Step] = []
    needs: dict[int, frozenset[int]] = {}  # value -> the steps that it is made by
    step_of: dict[int, int] = {}  # position of a node -> its step
    for at, node in enumerate(nodes):
        first = frozenset().union(*(needs.get(v.unique(), frozenset()) for v in operands(node)))
        if not makes_none(node):
            first |= {step_of[k] for k in held.get(at, ()) if k in step_of}
            made = memory.of(outputs(node))
            step_of[at] = len(steps)
            movable = at not in held and not draws(node)
            steps.append(_Step(at, first, memory.of(operands(node)), made, movable))
            first = frozenset((step_of[at],))
        needs.update((v.unique(), first) for v in outputs(node))
    return steps


class _Order:
    """`steps`: their order by number. `alive`: the bytes while each of them runs, by position."""

    def __init__(self, steps: list[_Step], memory: Memory):
        self._all, self._memory = steps, memory
        self.steps = list(range(len(steps)))
        self._at = list(self.steps)
        self._readers: dict[int, list[int]] = {}
        for k, step in enumerate(steps):
            for number in step.reads | step.makes:
                self._readers.setdefault(number, []).append(k)
        self.alive = self._alive()

    def _alive(self) -> list[int]:
        """The inputs live from the start on; what nobody reads, as if it were not there."""
        made = {number for step in self._all for number in step.makes}
        now = self._memory.size(self._readers.keys() - made)
        found = []
        for k in self.steps:
            now += self._memory.size(self._all[k].makes)
            found.append(now)
            now -= self._memory.size(self._freed(k, self._at[k]))
        return found

    def _freed(self, k: int, at: int) -> list[int]:
        """The memory that nobody reads any more once step `k` has run at that position, or before."""
        numbers = (self._all[k].reads | self._all[k].makes) - self._memory.kept
        return [n for n in numbers if all(r == k or self._at[r] < at for r in self._readers[n])]

    def hoist(self, k: int) -> None:
        """Moves step `k` up, if it then frees more than it makes, and the peak on its way gets no higher."""
        step, at = self._all[k], self._at[k]
        to = max((self._at[r] for r in step.first), default=-1) + 1
        if to >= at or not step.is_movable:
            return
        made = self._memory.size(step.makes)
        change = made - self._memory.size(self._freed(k, to))
        if change > -_LEAST:
            return
        first = self.alive[to] - self._memory.size(self._all[self.steps[to]].makes) + made
        moved = [first, *(now + change for now in self.alive[to:at])]
        if max(moved) > max(self.alive[to : at + 1]):
            return
        self.alive[to : at + 1] = moved
        self.steps[to : at + 1] = [k, *self.steps[to:at]]
        for position in range(to, at + 1):
            self._at[self.steps[position]] = position


def _rearrange(graph: Graph, order: list[int]) -> None:
    """Puts the nodes at these positions into that order; views stand before who reads them first."""
    nodes, end = list(graph.nodes()), end_of(graph)
    at = {v.unique(): k for k, node in enumerate(nodes) for v in outputs(node)}
    placed: set[int] = set()
    for k in (*order, *range(len(nodes))):
        found, waiting = {k} - placed, list({k} - placed)
        while waiting:
            first = {at[v.unique()] for v in operands(nodes[waiting.pop()]) if v.unique() in at}
            waiting += (views := [v for v in first - placed - found if makes_none(nodes[v])])
            found.update(views)
        for each in sorted(found):
            nodes[each].moveBefore(end)
        placed |= found
