"""Group outputs that are asked for nothing but their sizes: the sizes are computed outside, and the outputs
vanish.

Before: `%c = prim::CudaFusionGroup(%x, %b)` with `%c` = add(x, b) inside;  `%s = aten::size(%c)`. After:
`%s = prim::BroadcastSizes(aten::size(%x), aten::size(%b))`, and no output `%c`. Autodiff asks for the sizes
of nearly every intermediate, so that without this most of them would have to be stored. How the sizes of a
result follow from those of the operands is what the op table's `sizes` says; where it says `own`, the
output is kept."""

from __future__ import annotations

import torch

from .cleanup import drop_unused_inputs
from .graph import Graph, Node, Value, is_tensor, inputs
from .partition import row_of

_READERS = frozenset(("aten::size", "aten::dim"))
_INTS = torch._C.ListType(torch._C.IntType.get())


def drop_size_only_outputs(graph: Graph, group: Node) -> int:
    """Removes such outputs from the group, and the group if none is left; returns how many are left. Groups
    are to be taken last to first, so that a group whose outputs were only read by a vanished one is seen
    after it."""
    subgraph = group.g("Subgraph")
    arithmetic = _Sizes(graph, group)
    for i in reversed(range(group.outputsSize())):
        value = group.outputsAt(i)
        readers = [use.user for use in value.uses()]
        asked = [n for n in readers if n.kind() in _READERS]
        others = [n for n in readers if n.kind() not in _READERS and n.kind() != "prim::dtype"]
        if others:
            continue
        sizes = arithmetic.of(list(subgraph.outputs())[i]) if asked else None
        if asked and sizes is None:
            continue
        for node in asked:
            _answer(graph, node, sizes)
        if not value.uses():
            group.eraseOutput(i)
            subgraph.eraseOutput(i)
    if not group.outputsSize():
        group.destroy()
        return 0
    torch._C._jit_pass_dce(subgraph)
    drop_unused_inputs(group)
    return group.outputsSize()


def _answer(graph: Graph, node: Node, sizes: Value) -> None:
    """Replaces `node`, which asks for sizes, one size or the rank of a tensor, by a look into `sizes`."""
    if node.kind() == "aten::size" and node.inputsSize() == 1:
        result = sizes
    else:
        operands = [sizes] if node.kind() == "aten::dim" else [sizes, node.inputsAt(1)]
        look = graph.create("aten::len" if len(operands) == 1 else "aten::__getitem__", operands, 1)
        look.insertBefore(node)
        look.output().setType(torch._C.IntType.get())
        result = look.output()
    node.output().replaceAllUsesWith(result)
    node.destroy()


class _Sizes:
    """Size arithmetic before one group. `of(inner)` gives an int[] value of the outer graph, or None."""

    def __init__(self, graph: Graph, group: Node):
        self.graph, self.group = graph, group
        self._outer = {i.unique(): o for i, o in zip(group.g("Subgraph").inputs(), inputs(group))}
        #: inner value -> the group's inputs whose sizes, broadcast together, are its sizes; None without a
        #: rule
        self._sources: dict[int, "frozenset[int] | None"] = {v: frozenset((v,)) for v in self._outer}
        self._made: dict[frozenset[int], Value] = {}

    def of(self, inner: Value) -> "Value | None":
        sources = self._find(inner)
        if not sources:
            return None
        if sources not in self._made:
            parts = [self._make("aten::size", [self._outer[v]]) for v in sorted(sources)]
            self._made[sources] = parts[0] if len(parts) == 1 else self._make("prim::BroadcastSizes", parts)
        return self._made[sources]

    def _find(self, inner: Value) -> "frozenset[int] | None":
        """Iterative, since a group may be as deep as a program is long."""
        waiting = [inner]
        while waiting:
            value = waiting[-1]
            operands = self._operands(value) if value.unique() not in self._sources else []
            pending = [v for v in operands or () if v.unique() not in self._sources]
            if pending:
                waiting.extend(pending)
                continue
            waiting.pop()
            if value.unique() not in self._sources:
                found = [self._sources[v.unique()] for v in operands or ()]
                self._sources[value.unique()] = (
                    None if not found or None in found else frozenset().union(*found)
                )
        return self._sources[inner.unique()]

    def _operands(self, value: Value) -> "list[Value] | None":
        """The inner values from whose sizes those of `value` follow; None if there is no rule."""
        found = row_of(value.node())
        if found is None or found[0].sizes not in ("broadcast", "first"):
            return None
        tensors = [v for v in inputs(value.node()) if is_tensor(v)]
        return tensors[:1] if found[0].sizes == "first" else tensors

    def _make(self, kind: str, operands: "list[Value]") -> Value:
        node = self.graph.create(kind, operands, 1)
        node.insertBefore(self.group)
        node.output().setType(_INTS)
        return node.output()
