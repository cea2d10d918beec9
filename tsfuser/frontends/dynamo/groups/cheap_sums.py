"""Sums that are cheaper to compute again than to keep.

In: a typed graph with groups, before they are named. Out: the same graph, in which groups compute a sum that
an earlier group has stored for them. Example, a residual connection, read by a norm and by the next sum:

    %y, %z = prim::CudaFusionGroup(%x, %a)      # y = x + a, z = norm(y)
    %b = aten::mm(%z, %w)
    %r = prim::CudaFusionGroup(%y, %b)          # r = y + b
becomes
    %z = prim::CudaFusionGroup(%x, %a)
    %b = aten::mm(%z, %w)
    %r = prim::CudaFusionGroup(%x, %a, %b)      # r = (x + a) + b

A few products and sums on the way, as in r = y + scale * (b + bias), are computed again, too. This is done
only if the kernels move no more bytes then, and if the operands that live longer are smaller than the sum.
The sum has 32 bits or more, so no number changes.
"""

from __future__ import annotations

from ....graph import cleanup
from ....graph.wrapper import CONSTANT, LIST, Graph, Node, Value, inputs, is_tensor, operands, outputs
from ....grouping.groups import Group
from ....grouping.outline import inline, outline
from .memory import Memory, bytes_of

_SUM, _CHEAP = "aten::add", ("aten::add", "aten::sub", "aten::mul")
_CLONE = "aten::clone"
_FREE = (CONSTANT, LIST, "aten::reshape", _CLONE, "aten::_to_copy")
_MOST = 4  # ops of `_CHEAP`
_LEAST = 1 << 16  # bytes that are worth it


class _Lives:
    """The memory of the graph's tensors, and the position of the last node that reads each piece. `lasting`:
    the pieces that outlive the graph, whoever reads them."""

    def __init__(self, graph: Graph, owns_inputs: bool):
        self.memory, self.last = Memory(graph), {}
        for at, node in enumerate(graph.nodes()):
            self.last.update(dict.fromkeys(self.memory.of(operands(node)), at))
        self.lasting = self.memory.kept if owns_inputs else self.memory.kept | self.memory.of(graph.inputs())

    def longer(self, read: set[Value], value: Value) -> int:
        """The bytes of `read` that are freed before `value` is, now."""
        end = max(self.last[k] for k in self.memory.of([value]))
        return self.memory.size(
            k for k in self.memory.of(read) if k not in self.lasting and self.last[k] < end
        )


def recompute_sums(graph: Graph, groups: list[Group], owns_inputs: bool) -> list[Group]:
    """Changes the graph. `groups`: its groups, in any order; returns those that it has then.
    `owns_inputs`: nobody else holds the graph's inputs, so each is freed after its last reader."""
    lives = _Lives(graph, owns_inputs)
    places = {outputs(node)[0].unique(): at for at, node in enumerate(graph.nodes()) if outputs(node)}
    # readers come first, so none is replaced before its turn
    for group in sorted(groups, key=lambda group: -places[outputs(group.node)[0].unique()]):
        for k in reversed(range(len(outputs(group.node)))):
            groups = _recompute(graph, group, k, groups, lives)
    return groups


def _recompute(graph: Graph, maker: Group, k: int, groups: list[Group], lives: _Lives) -> list[Group]:
    """Has the readers of the group's result `k` compute it, if that is better."""
    results, subgraph = outputs(maker.node), maker.node.g("Subgraph")
    chain = None if maker.written or len(results) < 2 else _chain(subgraph, list(subgraph.outputs())[k])
    if chain is None:
        return groups
    users = {use.user for use in results[k].uses()}
    readers = [group for group in groups if group.node in users and not group.written]
    given = dict(zip((v.unique() for v in subgraph.inputs()), inputs(maker.node)))
    read = {given[v.unique()] for node in chain for v in inputs(node) if v.unique() in given and is_tensor(v)}
    if not readers or len(readers) < len(users) or not _is_better(results[k], readers, read, lives):
        return groups
    for reader in readers:
        made = Group(_with_sum(graph, reader.node, results[k], chain, dict(given)), written=False)
        groups = [made if group is reader else group for group in groups]
    maker.node.eraseOutput(k)
    subgraph.eraseOutput(k)
    _clean(maker.node)
    return groups


def _chain(subgraph: Graph, result: Value) -> list[Node] | None:
    """The nodes of a subgraph that compute a sum, in order; None if they are not few and cheap."""
    type_, waiting = result.type(), [result.node()]
    found: set[Node] = set()
    if result.node().kind() != _SUM or not is_tensor(result):
        return None
    if type_.dtype() is None or type_.dtype().itemsize < 4:
        return None
    while waiting:
        node = waiting.pop()
        if node.kind() == "prim::Param" or node in found:
            continue
        if node.kind() not in (*_CHEAP, *_FREE) or _turns(node):
            return None
        found.add(node)
        waiting += [v.node() for v in inputs(node)]
    computing = [node for node in found if node.kind() in _CHEAP and is_tensor(node.output())]
    return [node for node in subgraph.nodes() if node in found] if len(computing) <= _MOST else None


def _turns(node: Node) -> bool:
    """Whether the node copies to another layout. Then the readers of the sum would read the operand in an
    order that is not its own, which takes longer."""
    return node.kind() == _CLONE and inputs(node)[0].type().strides() != node.output().type().strides()


def _is_better(value: Value, readers: list[Group], read: set[Value], lives: _Lives) -> bool:
    """`read`: the tensors from which the sum is computed."""
    size = bytes_of(value)
    if size < _LEAST or 0 in map(bytes_of, read) or lives.longer(read, value) + _LEAST > size:
        return False
    moved = sum(bytes_of(v) for reader in readers for v in read if v not in inputs(reader.node))
    return moved <= size * (1 + len(readers))


def _with_sum(graph: Graph, reader: Node, value: Value, chain: list[Node], known: dict[int, Value]) -> Node:
    """The group that `reader` becomes, which computes `value`. `known`: the values of the graph that are the
    inputs of the chain, by `unique()`."""
    made = []
    for node in chain:
        copy = graph.createClone(node, lambda v: known[v.unique()])
        made.append(copy.insertBefore(reader))
        known.update((old.unique(), new) for old, new in zip(outputs(node), outputs(copy)))
    own = inline(graph, reader)
    for node in own:
        node.replaceInputWith(value, made[-1].output())
    group = outline(graph, [node for node in (*made, *own) if node.kind() != CONSTANT])
    _clean(group)
    return group


def _clean(group: Node) -> None:
    cleanup.clean(group.g("Subgraph"))
    cleanup.merge_equal_outputs(group)
    cleanup.drop_unused_inputs(group)
