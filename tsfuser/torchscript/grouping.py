"""Finds the groups of a graph and outlines them: partition, effects, clusters and outline put together,
block by block.

In: a typed graph without profile nodes. Out: the same graph with `prim::CudaFusionGroup` nodes, also in the
blocks of Ifs and Loops."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from .. import options
from ..ops.table import Row
from .cluster import Item, absorb, arrange, clusters
from .effects import WRITES, Effects, effect, secretly_written
from .graph import (
    CONSTANT,
    LIST,
    Block,
    Graph,
    Node,
    Value,
    all_blocks,
    blocks,
    inputs,
    is_constant,
    is_plain_list,
    is_tensor,
    outputs,
)
from .outline import outline, reorder
from .partition import Knowledge, Refusals, Verdict, examine, row_of

#: Kinds that ask a tensor for its sizes or dtype only.
METADATA = frozenset(("aten::size", "prim::dtype", "aten::dim"))


class Group(NamedTuple):
    """A group node, and whether something writes to one of its outputs in place, or it writes to its inputs."""

    node: Node
    written: bool


def make_groups(graph: Graph, effects: Effects, refusals: Refusals) -> "list[Group]":
    """Outlines all groups of the graph; returns them, the last of a block first. Why nodes were refused is
    left in `refusals`."""
    knowledge = Knowledge()
    made: list[Group] = []
    # Inner blocks first: the alias analysis knows no node that is made later.
    for block in reversed(list(all_blocks(graph))):
        made += reversed(_Block(block, effects, knowledge, refusals).outline(graph))
    return made


class _Block:
    """One block while its groups are made. Positions are those of the nodes before."""

    def __init__(self, block: "Graph | Block", effects: Effects, knowledge: Knowledge, refusals: Refusals):
        self.block = block
        self.nodes: list[Node] = list(block.nodes())
        self.effects, self.knowledge = effects, knowledge
        self.operands: list[list[Value]] = [inputs(node) for node in self.nodes]
        self.results: list[list[Value]] = [outputs(node) for node in self.nodes]
        self.maker: dict[int, int] = {}  # value -> position, constants left out: they are always there
        for i, node in enumerate(self.nodes):
            if node.kind() != CONSTANT:
                self.maker.update((v.unique(), i) for v in self.results[i])
        self.changed: dict[int, set[int]] = {}  # value -> positions of the nodes that change it secretly
        for i, node in enumerate(self.nodes):
            for v in secretly_written(node):
                self.changed.setdefault(v.unique(), set()).add(i)
        self.verdicts = [self._examine(i, node, refusals) for i, node in enumerate(self.nodes)]
        self.order = effects.order(self.nodes)

    def outline(self, graph: Graph) -> "list[Group]":
        if not any(verdict.reason is None for verdict in self.verdicts):
            return []
        items = self._items()
        found = clusters(items, options.state.horizontal_mode)
        found = [members for members in absorb(found, self._candidates()) if self._is_worth_it(members)]
        if not found:
            return []
        pieces = arrange(items, found)
        reorder(self.block, [self.nodes[i] for piece in pieces for i in piece])
        made = []
        for members in found:
            written = any(self.effects.is_written(v) for i in members for v in self.results[i])
            writes = any(effect(self.nodes[i]) == WRITES for i in members)
            group = outline(graph, [self.nodes[i] for i in members])
            self.effects.learn(outputs(group), written)
            made.append(Group(group, written or writes))
        return made

    def _examine(self, i: int, node: Node, refusals: Refusals) -> Verdict:
        verdict = examine(node, self.knowledge, options.state.skip_kinds)
        if verdict.reason is None:
            if self.effects.may_return_written(node):
                verdict = Verdict(
                    reason="its result may share memory with a tensor that is changed in place"
                )
            elif any(is_plain_list(v) and self.effects.is_written(v) for v in inputs(node)):
                verdict = Verdict(reason="it reads a list that is changed in place")
            elif any(self.changed.get(v.unique(), set()) - {i} for v in self.operands[i]):
                verdict = Verdict(reason="it reads running statistics that another op changes")
        if verdict.reason:
            refusals.add(node, verdict.reason)
        return verdict

    def _items(self) -> list[Item]:
        metadata_uses = self._metadata_uses()
        items = []
        for i, node in enumerate(self.nodes):
            verdict = self.verdicts[i]
            used = {v.unique() for v in self.operands[i]} | _used_inside(node)
            after = {self.maker[v] for v in used if v in self.maker}
            after.update(self.order.get(i, ()))
            if verdict.reason is not None:
                items.append(Item(tuple(after)))
                continue
            reads = tuple(v.unique() for v in self.operands[i] if not is_constant(v))
            makes = tuple(
                (v.unique(), len(v.uses()) - metadata_uses.get(v.unique(), 0)) for v in self.results[i]
            )
            meets = tuple(v.unique() for v in self.operands[i] if self._is_worth_sharing(v))
            items.append(Item(tuple(sorted(after)), verdict.device, verdict.loose, reads, makes, meets))
        return items

    def _metadata_uses(self) -> dict[int, int]:
        """Value -> how many nodes of the block ask for its sizes or dtype only."""
        counts: dict[int, int] = {}
        for node, operands in zip(self.nodes, self.operands):
            if node.kind() in METADATA:
                counts[operands[0].unique()] = counts.get(operands[0].unique(), 0) + 1
        return counts

    def _is_worth_sharing(self, value: Value) -> bool:
        """Whether two nodes that read this value save something when they are in one group: it is a tensor
        in memory."""
        return is_tensor(value) and self.knowledge.facts(value)[1:] != ("cpu", 0)

    def _candidates(self) -> dict[int, set[int]]:
        """Nodes that may only join the cluster that alone reads their results, with those readers: 0-dim
        CPU arithmetic, whose results would leave a CUDA group on the wrong device, and lists of numbers."""
        wanted = {}
        for i, node in enumerate(self.nodes):
            loose = self.verdicts[i].reason is None and self.verdicts[i].loose
            numbers = node.kind() == LIST and self.operands[i] and is_plain_list(self.results[i][0])
            if i not in self.order and (
                loose or (numbers and not self.effects.is_written(self.results[i][0]))
            ):
                wanted[i] = set()
        for j, operands in enumerate(self.operands):
            for v in operands:
                i = self.maker.get(v.unique())
                if i in wanted:
                    wanted[i].add(j)
        counts = {i: sum(len(v.uses()) for v in self.results[i]) for i in wanted}
        for operands in self.operands:
            for v in operands:
                i = self.maker.get(v.unique())
                if i in counts:
                    counts[i] -= 1
        for i, elsewhere in counts.items():
            if elsewhere or not wanted[i]:
                wanted[i].add(-1)
        return wanted

    def _is_worth_it(self, members: "Sequence[int]") -> bool:
        """Whether the cluster becomes a group: it has two nodes (one, in single-node mode) and does more
        than to hand tensors through."""
        working = [i for i in members if self.nodes[i].kind() != LIST]
        if len(working) < (1 if options.state.single_node_mode else 2):
            return False
        return not all(self._is_idle(self.nodes[i]) for i in working)

    def _is_idle(self, node: Node) -> bool:
        """Whether the node is a cast to the dtype that its operand has."""
        row: Row = row_of(node)[0]
        tensors = [v for v in (node.inputsAt(0), node.outputsAt(0)) if is_tensor(v)]
        return row.family == "casts" and len({self.knowledge.facts(v).dtype for v in tensors}) == 1


def _used_inside(node: Node) -> set[int]:
    """The values that the blocks of a node use, from wherever."""
    used: set[int] = set()
    for block in blocks(node):
        used.update(v.unique() for v in block.outputs())
        for inner in block.nodes():
            used.update(v.unique() for v in inputs(inner))
            used |= _used_inside(inner)
    return used
