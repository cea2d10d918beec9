"""Finds the groups of a graph and outlines them: partition, effects, clusters and outline put together,
block by block.

In: a typed graph without profile nodes. Out: the same graph with `prim::CudaFusionGroup` nodes, also in the
blocks of Ifs and Loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from .. import options
from ..graph.effects import WRITES, Effects, effect, secretly_written
from ..graph.evaluate import CONTROL
from ..graph.functionalize import is_identity
from ..graph.identities import gives_operand_back, keeps_dtype, widens
from ..graph.rows import Knowledge, row_of, tables_of
from ..graph.worth import is_worth_a_kernel, shape
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Block,
    Graph,
    Node,
    Value,
    blocks,
    ids,
    inputs,
    is_constant,
    is_plain_list,
    is_tensor,
    is_tensor_list,
    nodes_in,
    nodes_of,
    operands,
    outputs,
    use_count,
    with_items,
)
from ..ops import unsupported
from .cluster import Item, absorb, arrange, clusters
from .lookups import Lookups, kept_apart
from .outline import outline, reorder
from .support import Refusals, Verdict, examine, separate_blocks
from .unfused_reasons import NOT_RUN, unfused_reasons
from .views import DTYPE, METADATA, reshape_refusal, sizes_follow, views_of

_NUMBER_AS_TENSOR = "aten::scalar_tensor"


class Group(NamedTuple):
    """A group node, and whether one of its outputs is written to in place, or it writes to its inputs."""

    node: Node
    written: bool


def make_groups(
    graph: Graph, effects: Effects, refusals: Refusals, lone_reductions: bool = False
) -> list[Group]:
    """Outlines all groups of the graph; returns them, the last of a block first. Why nodes were refused is
    left in `refusals`. `lone_reductions`: on a GPU a reduction is a group also where nothing is fused with
    it."""
    knowledge = Knowledge()
    made: list[Group] = []
    # Inner blocks first: the alias analysis knows no node that is made later.
    for block in reversed(list(separate_blocks(graph, knowledge))):
        made += reversed(_Block(block, effects, knowledge, refusals).outline(graph, lone_reductions))
        if block is not graph and not _ran(block):
            for node in nodes_in(block):
                if any(map(is_tensor, outputs(node))):
                    refusals.add(node, NOT_RUN)
    return made


def _ran(block: Block) -> bool:
    """Whether the block ran while profiling: then what it returns has sizes. Types that were inferred have
    none."""
    values = [*block.outputs(), *(v for node in nodes_in(block) for v in outputs(node))]
    tensors = [v for v in values if is_tensor(v)]
    return not tensors or any(v.type().strides() is not None for v in tensors)


#: How many times as large the others are where a tensor counts as small.
_SMALL = 16


class _Block:
    """One block while its groups are made. Positions are those of the nodes before."""

    def __init__(self, block: Graph | Block, effects: Effects, knowledge: Knowledge, refusals: Refusals):
        self.block = block
        self.nodes: list[Node] = nodes_in(block)
        self.effects, self.knowledge, self.refusals = effects, knowledge, refusals
        self.operands: list[list[Value]] = [_data(node) for node in self.nodes]
        self.results: list[list[Value]] = [outputs(node) for node in self.nodes]
        self.read: list[list[int]] = [ids(values) for values in self.operands]
        self.made: list[list[int]] = [ids(values) for values in self.results]
        self.maker: dict[int, int] = {}  # value -> position, constants left out: they are always there
        for i, node in enumerate(self.nodes):
            if node.kind() != CONSTANT:
                self.maker.update(dict.fromkeys(self.made[i], i))
        self.changed: dict[int, set[int]] = {}  # value -> positions of the nodes that change it secretly
        for i, node in enumerate(self.nodes if effects.writes else ()):
            for v in secretly_written(node):
                self.changed.setdefault(v.unique(), set()).add(i)
        self.verdicts = [self._examine(i, node, refusals) for i, node in enumerate(self.nodes)]
        self.order = effects.order(self.nodes)
        self._refuse_readers_of_held_lists()
        self.views = {**self._fusible_views(refusals), **self._widening_casts()}
        self.dtypes = self._inner_dtypes()

    def outline(self, graph: Graph, lone_reductions: bool) -> list[Group]:
        if not any(verdict.reason is None for verdict in self.verdicts):
            return []
        items = self._items()
        whole = [self._with_lists(i, item) for i, item in enumerate(items)] if self._has_lists() else items
        merged, found = self._merged(items, self._candidates(), lone_reductions)
        pieces = arrange(whole, found)
        if pieces is None:  # a list in a group holds the size of a view in it, which nothing has computed yet
            candidates = {i: readers for i, readers in self._candidates().items() if i not in self.views}
            merged, found = self._merged(whole, candidates, lone_reductions)
            pieces = arrange(whole, found)
            assert pieces is not None, "a cluster both follows and precedes a node outside"
        for i, reason in unfused_reasons(items, merged, found).items():
            if i not in self.dtypes:  # nobody asks why
                self.refusals.add(self.nodes[i], reason)
        if not found:
            return []
        reorder(self.block, [self.nodes[i] for piece in pieces for i in piece])
        made = []
        for members in found:
            writing = members if self.effects.writes else ()
            written = any(self.effects.is_written(v) for i in writing for v in self.results[i])
            writes = any(effect(self.nodes[i]) == WRITES for i in writing)
            group = outline(graph, [self.nodes[i] for i in members])
            self.effects.learn(outputs(group), written)
            made.append(Group(group, written or writes))
        return made

    def _merged(
        self, items: Sequence[Item], candidates: dict[int, set[int]], lone_reductions: bool
    ) -> tuple[list[list[int]], list[list[int]]]:
        """All clusters, and those that become groups, with the candidates that these take in."""
        merged = clusters(items, options.state.horizontal_mode)
        found = absorb([self._without_leaving_views(members) for members in merged], candidates)
        return merged, [members for members in found if self._is_worth_it(members, lone_reductions)]

    def _examine(self, i: int, node: Node, refusals: Refusals) -> Verdict:
        verdict = examine(node, self.knowledge, options.state.skip_kinds)
        if verdict.reason is None and self.effects.writes and (reason := self._shared(i, node)) is not None:
            verdict = Verdict(reason=reason)
        if verdict.reason:
            refusals.add(node, verdict.reason)
        return verdict

    def _refuse_readers_of_held_lists(self) -> None:
        """No group takes a list of tensors that is made in another block, or that effects hold at its place;
        and none could read it as an argument."""
        for i, node in enumerate(self.nodes):
            for v in inputs(node) if self.verdicts[i].reason is None else ():
                if is_tensor_list(v) and self.maker.get(v.unique(), -1) in (-1, *self.order):
                    reason = "it reads a list of tensors that no group can take in where it is made"
                    self.verdicts[i] = Verdict(reason=reason)
                    self.refusals.add(node, reason)

    def _shared(self, i: int, node: Node) -> str | None:
        """Why a node cannot be fused because of other writes to its operands or results."""
        shared = operands(node) + outputs(node) if node.kind() in CONTROL else []
        written = any(self.effects.is_written(v) for v in shared if is_tensor(v))
        if written or self.effects.may_return_written(node):
            return "its result may share memory with a tensor that is changed in place"
        if any(self.effects.is_changed(v) for v in inputs(node) if is_plain_list(v) or is_tensor_list(v)):
            return "it reads a list that is changed in place"
        if is_identity(node) and any(map(self.effects.is_written, outputs(node))):
            return "torch may take it for its operand, as an op outside changes its result in place"
        if any(self.changed.get(key, set()) - {i} for key in self.read[i]):
            return "it reads running statistics that another op changes"
        return None

    def _fusible_views(self, refusals: Refusals) -> dict[int, int]:
        """Position -> position of the only reader, of the views that may be in a group: with that reader.
        The verdicts of the others change."""
        found: dict[int, int] = {}
        views = views_of(self.nodes)
        readers = self._readers(views)
        follow: dict[int, bool] = {}
        for i in sorted(views, reverse=True):
            if self.verdicts[i].reason is not None:
                continue
            data = {j for j in readers[i] if j < 0 or self.nodes[j].kind() not in METADATA}
            partly = data and len(data) < len(readers[i])
            if partly and sizes_follow(self.results[i][0], self.knowledge, follow):
                readers[i] = data
            reader = min(readers[i])
            row = row_of(self.nodes[i])
            reason = reshape_refusal(self.nodes[i]) if row is not None and row[0].reshapes else None
            if self._is_table(i, reader) and not self._is_taken_from(i, reader):
                reason = "elements are looked up in it, which has to be in memory"
            inside = len(readers[i]) == 1 and reader >= 0 and self.verdicts[reader].reason is None
            if reason is None and inside:
                found[i] = reader
                continue
            reason = reason or self._left_view(i)
            self.verdicts[i] = Verdict(reason=reason)
            refusals.add(self.nodes[i], reason)
        return found

    def _widening_casts(self) -> dict[int, int]:
        """Position -> position of the only reader, of the casts to wider dtypes: like a view, which costs
        nothing there, in a group with that reader, who reads fewer bytes then."""
        casts = [i for i, node in enumerate(self.nodes) if self._is_fusible(i) and widens(node)]
        found = {}
        for i, readers in self._readers(i for i in casts if i not in self.order).items():
            reader = min(readers)
            if len(readers) == 1 and reader >= 0 and self._is_fusible(reader):
                if not self._is_table(i, reader):
                    found[i] = reader
        return found

    def _inner_dtypes(self) -> dict[int, tuple[int, int]]:
        """Position -> those of the fusible nodes that make and read it, of the dtypes that a group asks a
        value of its own for (`h.to(x.dtype)`): outside they would part the two. The verdicts of these
        change."""
        makers = {
            i: self.maker.get(self.read[i][0]) for i, node in enumerate(self.nodes) if node.kind() == DTYPE
        }
        found = {}
        asking = [i for i, maker in makers.items() if maker is not None and self._is_fusible(maker)]
        for i, readers in self._readers(asking).items():
            reader = min(readers)
            if len(readers) == 1 and reader >= 0 and self._is_fusible(reader):
                self.verdicts[i] = self.verdicts[reader]
                found[i] = makers[i], reader
        return found

    def _is_fusible(self, i: int) -> bool:
        return self.verdicts[i].reason is None and not self.verdicts[i].loose

    def _left_view(self, i: int) -> str:
        """Why a view is not in a group that could be."""
        row = row_of(self.nodes[i])
        if row is not None and not row[0].is_view:
            return "it may only hand on its operand, a view, and something outside of groups reads that"
        return f"{unsupported.left_view(self.nodes[i].kind())}; something outside of groups reads it"

    def _readers(self, positions: Iterable[int]) -> dict[int, set[int]]:
        """Position -> the positions that read its results, -1 for a reader in another block, or none."""
        found: dict[int, set[int]] = {i: set() for i in positions}
        uses = {i: sum(map(use_count, self.results[i])) for i in found}
        for j, keys in enumerate(self.read if found else ()):
            for key in keys:
                i = self.maker.get(key)
                if i in found:
                    found[i].add(j)
                    uses[i] -= 1
        for i, elsewhere in uses.items():
            if elsewhere or not found[i]:
                found[i].add(-1)
        return found

    def _without_leaving_views(self, members: list[int]) -> list[int]:
        """A cluster without the views whose reader is elsewhere: they would leave it as copies. Nothing
        inside follows them. And without dtypes of values that are made elsewhere."""
        kept = set(members)
        for i in reversed(members):
            leaves = i in self.views and self.views[i] not in kept
            if leaves or not kept.issuperset(self.dtypes.get(i, ())):
                kept.remove(i)
        return sorted(kept)

    def _items(self) -> list[Item]:
        metadata_uses = self._metadata_uses()
        items: list[Item] = []
        lookups = Lookups(self.maker, self._may_be_fused)
        for i, node in enumerate(self.nodes):
            verdict = self.verdicts[i]
            read = [(key, v) for key, v in zip(self.read[i], self.operands[i]) if not is_tensor_list(v)]
            made_by = {self.maker[key] for key, _ in read if key in self.maker}
            held = frozenset(self.order.get(i, ())) - made_by
            after = made_by | held
            if verdict.reason is not None:
                items.append(Item(tuple(after), parts=self._is_run_by_torch(i)))
                continue
            reads = tuple([key for key, v in read if not is_constant(v)])
            made = zip(self.made[i], self.results[i])
            makes = tuple([(key, use_count(v) - metadata_uses.get(key, 0)) for key, v in made])
            row = row_of(node)
            joins = row is not None and row[0].joins
            meets = () if joins else tuple([key for key, v in read if self._is_worth_sharing(v)])
            apart, near = lookups.apart(i, node), self._small_ones(i, meets)
            items.append(
                Item(
                    tuple(sorted(after)),
                    verdict.device,
                    verdict.loose,
                    reads,
                    makes,
                    meets,
                    apart,
                    near,
                    held=held,
                )
            )
        return items

    def _is_run_by_torch(self, i: int) -> bool:
        """Whether torch computes a tensor."""
        row = row_of(self.nodes[i])
        is_view = row[0].is_view if row is not None else unsupported.is_view(self.nodes[i].kind())
        return not is_view and any(map(is_tensor, self.results[i]))

    def _small_ones(self, i: int, meets: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the tensors in `meets` that are small beside others that the node reads or makes: what is
        saved by reading them once is less than it costs to have the results of one of two siblings long
        before they are read."""
        values = [*self.operands[i], *self.results[i]] if meets else []
        known = {
            v.unique(): prod(sizes) for v in values if is_tensor(v) and (sizes := shape(v)[0]) is not None
        }
        most = max(known.values(), default=0)
        return tuple([key for key in meets if key in known and known[key] * _SMALL <= most])

    def _is_table(self, i: int, reader: int) -> bool:
        """Whether node `reader`, -1 for none, looks elements up in a result of node `i`."""
        return reader >= 0 and self.made[i][0] in ids(tables_of(self.nodes[reader]))

    def _is_taken_from(self, i: int, reader: int) -> bool:
        """Whether `reader` may compute the few elements itself that it takes from view `i` of a result."""
        if not any(map(self._may_be_fused, self.operands[i])):
            return False
        return self.made[i][0] not in ids(kept_apart(self.nodes[reader], self._may_be_fused))

    def _may_be_fused(self, value: Value) -> bool:
        maker = self.maker.get(value.unique())
        return maker is not None and self.verdicts[maker].reason is None

    def _with_lists(self, i: int, item: Item) -> Item:
        """`item` after all that its node needs, also lists of tensors, and what such a list holds."""
        makers = (self.maker.get(v.unique()) for v in inputs(self.nodes[i]))
        missing = {j for j in makers if j is not None}.difference(item.after)
        return item._replace(after=tuple(sorted({*item.after, *missing}))) if missing else item

    def _has_lists(self) -> bool:
        return bool(nodes_of(self.block, (LIST,)))

    def _metadata_uses(self) -> dict[int, int]:
        """Value -> how many nodes of the block ask for its sizes or dtype only, and cannot be in a group."""
        counts: dict[int, int] = {}
        for i, (node, read) in enumerate(zip(self.nodes, self.operands)):
            if node.kind() in METADATA and i not in self.dtypes:
                counts[read[0].unique()] = counts.get(read[0].unique(), 0) + 1
        return counts

    def _is_worth_sharing(self, value: Value) -> bool:
        """Whether two nodes that read this value save something when they are in one group: it is a tensor
        in memory. Not so a number of a graph that became a tensor: groups that do the same with it, as to
        each parameter of an optimizer, are better in a batch."""
        if not is_tensor(value) or self.knowledge.facts(value)[1:] == ("cpu", 0):
            return False
        return value.node().kind() != _NUMBER_AS_TENSOR

    def _candidates(self) -> dict[int, set[int]]:
        """Nodes that may only join the cluster that alone reads their results, with those readers: 0-dim CPU
        arithmetic, whose results would leave a CUDA group on the wrong device, lists of numbers, and
        views."""
        wanted = []
        for i, node in enumerate(self.nodes):
            loose = self.verdicts[i].reason is None and self.verdicts[i].loose
            listed = node.kind() == LIST and inputs(node) and self._is_kept(self.results[i][0])
            if i not in self.order and (loose or listed):
                wanted.append(i)
        return {**self._readers(wanted), **{i: {reader} for i, reader in self.views.items()}}

    def _is_kept(self, value: Value) -> bool:
        """Whether a list is one of numbers or tensors that nothing writes to."""
        return (is_plain_list(value) or is_tensor_list(value)) and not self.effects.is_changed(value)

    def _is_worth_it(self, members: Sequence[int], lone_reductions: bool) -> bool:
        """Whether the cluster becomes a group: it has two nodes (one, in single-node mode) and does more
        than to hand tensors through, or does something that torch is slow at."""
        working = [n for i in members for n in _unfolded(self.nodes[i]) if _works(n)]
        if any(is_worth_a_kernel(self.nodes[i], lone_reductions) for i in members):
            return True
        least = 1 if options.state.single_node_mode else 2
        if sum(not _is_part(n) for n in working) < least:
            return False
        return not all(self._is_idle(n) for n in working)

    def _is_idle(self, node: Node) -> bool:
        """Whether the node is a view, or only copies: torch does that as fast. In single-node mode a copy is
        no idle node."""
        found = row_of(node)
        if found is None or found[0].is_view:
            return True
        if options.state.single_node_mode:
            return gives_operand_back(node)
        return found[0].joins or keeps_dtype(node)


def _data(node: Node) -> list[Value]:
    """What a node reads: of a list of tensors, which costs nothing, its reader reads the items and the list
    itself."""
    if node.kind() == LIST and is_tensor_list(node.output()):
        return []
    read = operands(node)  # inputs first
    lists = [v for v in read[: node.inputsSize()] if is_tensor_list(v)]
    return with_items(read) + lists if lists else read


def _is_part(node: Node) -> bool:
    """Whether the node is a view of a part of a tensor, which one op alone reads as well outside."""
    found = row_of(node)
    return found is not None and found[0].family == "parts"


def _works(node: Node) -> bool:
    """Whether the node is an op of torch's, or one of ours that does more than to hand on or copy."""
    if node.kind().startswith("aten::"):
        return True
    found = row_of(node)
    is_ours = found is not None and node.kind().startswith("tsfuser::")
    return is_ours and found[0].fresh and not found[0].copies


def _unfolded(node: Node) -> list[Node]:
    """The node, or those in its blocks."""
    inner = [n for block in blocks(node) for n in nodes_in(block)]
    return [m for n in inner for m in _unfolded(n)] if inner else [node]
