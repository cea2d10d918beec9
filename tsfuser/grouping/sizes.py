"""Group outputs that are asked for nothing but their sizes: the sizes are computed outside, and the outputs
vanish.

Before: `%c = prim::CudaFusionGroup(%x, %b)` with `%c` = add(x, b) inside;  `%s = aten::size(%c)`. After: `%s
= prim::BroadcastSizes(aten::size(%x), aten::size(%b))`, and no output `%c`. Autodiff asks for the sizes of
nearly every intermediate, so that without this most of them would have to be stored. How the sizes of a
result follow from those of the operands is what the op table's `sizes` says (`size_rules`); where it says
`own`, the output is kept. Equal queries are made once here: torch's common subexpression elimination is
quadratic in the number of lists that a graph returns (400 s for a graph of 10,000 nodes and 3,000 sizes).
"""

from __future__ import annotations

import torch

from ..graph.cleanup import drop_unused_inputs, is_needed, writers
from ..graph.effects import Effects, remove_dead_code
from ..graph.wrapper import Graph, Node, Value, graph_inputs, graph_outputs, inputs
from .outline import inline
from .size_rules import RULES, Derived, derived, emit, rule_of, sized_by

SIZE = "aten::size"
_READERS = frozenset((SIZE, "aten::dim"))
_INTS = torch._C.ListType(torch._C.IntType.get())


def drop_size_only_outputs(graph: Graph, group: Node, queries: Queries) -> int:
    """Removes such outputs from the group, and the group if none is left; returns how many are left. Groups
    are to be taken last to first, so that a group whose outputs were only read by a vanished one is seen
    after it."""
    subgraph = group.g("Subgraph")
    inner = graph_outputs(subgraph)
    arithmetic = _Sizes(graph, group, queries)
    before = group.outputsSize()
    for i in reversed(range(group.outputsSize())):
        value = group.outputsAt(i)
        readers = [use.user for use in value.uses()]
        asked = [n for n in readers if n.kind() in _READERS and not queries.effects.is_written(n.output())]
        if any(n not in asked and n.kind() != "prim::dtype" for n in readers) or is_needed(subgraph, i):
            continue
        sizes = arithmetic.of(inner[i]) if asked else None
        if asked and sizes is None:
            continue
        for node in asked:
            _answer(graph, node, sizes)
        if not value.uses():
            group.eraseOutput(i)
            subgraph.eraseOutput(i)
    if not group.outputsSize():
        inline(graph, group) if writers(subgraph) else group.destroy()
        return 0
    if group.outputsSize() < before:
        remove_dead_code(subgraph)
        drop_unused_inputs(group)
    return group.outputsSize()


def _answer(graph: Graph, node: Node, sizes: Value) -> None:
    """Replaces `node`, which asks for sizes, one size or the rank of a tensor, by a look into `sizes`."""
    if node.kind() == SIZE and node.inputsSize() == 1:
        result = sizes
    else:
        operands = [sizes] if node.kind() == "aten::dim" else [sizes, node.inputsAt(1)]
        look = graph.create("aten::len" if len(operands) == 1 else "aten::__getitem__", operands, 1)
        look.insertBefore(node)
        look.output().setType(torch._C.IntType.get())
        result = look.output()
    node.output().replaceAllUsesWith(result)
    node.destroy()


class Queries:
    """The `aten::size` nodes of tensors that are group inputs, one a tensor, for all groups of a graph."""

    def __init__(self, graph: Graph, effects: Effects):
        self.graph, self.effects = graph, effects
        self._made: dict[int, Value] = {}

    def of(self, tensor: Value, group: Node) -> Value:
        """The sizes of an input of `group`, asked for where the tensor is made; before the group if it may
        be written, since an in-place op may give it other sizes."""
        if self.effects.is_written(tensor):
            return self._insert(tensor).insertBefore(group).output()
        if tensor.unique() not in self._made:
            node = self._existing(tensor) or self._insert(tensor).insertBefore(group)
            maker = tensor.node()
            first = next(iter(maker.owningBlock().nodes()))
            if maker.kind() != "prim::Param":
                node.moveAfter(maker)
            elif node is not first:
                node.moveBefore(first)
            self._made[tensor.unique()] = node.output()
        return self._made[tensor.unique()]

    def _existing(self, tensor: Value) -> Node | None:
        """A query that the program makes itself."""
        users = (use.user for use in tensor.uses())
        same = (n for n in users if n.kind() == SIZE and n.inputsSize() == 1)
        return next((n for n in same if not self.effects.is_written(n.output())), None)

    def _insert(self, tensor: Value) -> Node:
        node = self.graph.create(SIZE, [tensor], 1)
        node.output().setType(_INTS)
        self.effects.learn([node.output()], written=False)
        return node


class _Sizes:
    """Size arithmetic before one group. `of(inner)` gives an int[] value of the outer graph, or None.

    The sizes of an inner value are named by the set of the group's inputs, and of sizes that are `Derived`
    from others, that are broadcast together in it. Such a set is made from the sets of the operands of the
    op where it first occurs, so that the arithmetic is no larger than the group."""

    def __init__(self, graph: Graph, group: Node, queries: Queries):
        self.graph, self.group, self.queries = graph, group, queries
        self._outer = {i.unique(): o for i, o in zip(graph_inputs(group.g("Subgraph")), inputs(group))}
        self._sources: dict[int, frozenset | None] = {v: frozenset((v,)) for v in self._outer}
        self._parts: dict[frozenset, list[frozenset]] = {}
        self._made: dict[frozenset, Value] = {}

    def of(self, inner: Value) -> Value | None:
        wanted = self._find(inner)
        if not wanted:
            return None
        waiting = [wanted]
        while waiting:
            sources = waiting[-1]
            pending = [p for p in self._parts.get(sources, ()) if p not in self._made]
            if pending:
                waiting.extend(pending)
                continue
            waiting.pop()
            if sources not in self._made:
                self._made[sources] = self._make(sources)
        return self._made[wanted]

    def _make(self, sources: frozenset) -> Value:
        if len(sources) == 1:
            (only,) = sources
            if isinstance(only, Derived):
                sizes = [self._made[part] for part in (only.of, only.other) if part is not None]
                return emit(self.graph, self.group, only, sizes, self._outer)
            return self.queries.of(self._outer[only], self.group)
        node = self.graph.create("prim::BroadcastSizes", [self._made[p] for p in self._parts[sources]], 1)
        node.insertBefore(self.group)
        node.output().setType(_INTS)
        return node.output()

    def _find(self, inner: Value) -> frozenset | None:
        """The name of the sizes of `inner`; None without a rule. Iterative, since a group may be as deep as
        a program is long."""
        waiting = [inner]
        while waiting:
            value = waiting[-1]
            operands = sized_by(value) if value.unique() not in self._sources else []
            pending = [v for v in operands or () if v.unique() not in self._sources]
            if pending:
                waiting.extend(pending)
                continue
            waiting.pop()
            if value.unique() not in self._sources:
                found = [self._sources[v.unique()] for v in operands or ()]
                known = found and None not in found
                self._sources[value.unique()] = self._name(found, value) if known else None
        return self._sources[inner.unique()]

    def _name(self, found: list[frozenset], value: Value) -> frozenset | None:
        """The name of the sizes of `value`, of operands whose sizes are called `found`."""
        if rule_of(value) != "joined":
            return self._derive(self._join(found), value)
        name: frozenset | None = found[0]
        for other in found[1:]:
            name = name and self._derive(name, value, other)
        return name

    def _derive(self, name: frozenset, value: Value, other: frozenset | None = None) -> frozenset | None:
        """The name of the sizes of `value`, made from sizes called `name` and, of a join, `other`."""
        rule = rule_of(value)
        if rule not in RULES:
            return name
        new = derived(value.node(), rule, name, self._outer)
        if new is None:
            return None
        result = frozenset((new._replace(other=other),))
        self._parts[result] = [name] if other is None else [name, other]
        return result

    def _join(self, parts: list[frozenset]) -> frozenset:
        """The name of the broadcast of `parts`, remembered with those that are needed to make it."""
        union = frozenset().union(*parts)
        if union not in parts:
            self._parts.setdefault(union, list(dict.fromkeys(parts)))
        return union
