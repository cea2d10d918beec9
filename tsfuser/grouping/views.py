"""Views in groups: inside, a view is a relabeling of axes; what leaves a group must be the view that eager
gives, never a copy.

Before: `%t = aten::t(%p)`, of which a fusible op and the caller read. After: `%t1 = aten::t(%p)` for the op,
and `%t2 = aten::t(%p)` for the caller, so that each copy has one kind of reader: the first joins the group
of its only reader, the second stays outside, on the group's output. What was split in vain is merged again
at the end. "View" is here also an op that may hand its operand on, like a cast to the same dtype, where the
operand is a view, and a branch that chooses among views."""

from __future__ import annotations

from ..graph.effects import Effects, may_return_operand
from ..graph.evaluate import CONTROL
from ..graph.rows import Knowledge, row_of
from ..graph.wrapper import (
    Graph,
    Node,
    Value,
    all_blocks,
    blocks,
    facts,
    inputs,
    is_tensor,
    nodes_in,
    operands,
    outputs,
)
from .size_rules import sized_by
from .support import examine, separate_blocks

#: Readers for each of which a view is split; with more it stays outside.
MAX_READERS = 8
DTYPE = "prim::dtype"
#: Kinds that ask a tensor for its sizes or dtype only.
METADATA = frozenset(("aten::size", DTYPE, "aten::dim"))


def views_of(nodes: list[Node]) -> set[int]:
    """Positions of the nodes of a block whose results may be views inside a group."""
    found: set[int] = set()
    made: set[int] = set()
    for i, node in enumerate(nodes):
        if node.outputsSize() == 1 and is_tensor(node.output()) and _gives_view(node, made):
            found.add(i)
            made.add(node.output().unique())
    return found


def _gives_view(node: Node, views: set[int]) -> bool:
    """Whether the result may share memory with an operand, where `views` are values that do."""
    if node.kind() not in CONTROL:
        row = row_of(node)
        return (row is not None and row[0].is_view) or _hands_on(node, views)
    for block in blocks(node):
        nodes, own = nodes_in(block), set(views)
        own.update(v.unique() for v in block.inputs())
        made = {v.unique() for n in nodes for v in outputs(n)}
        own.update(nodes[i].output().unique() for i in views_of(nodes))
        if any(is_tensor(v) and (v.unique() in own or v.unique() not in made) for v in block.outputs()):
            return True
    return False


def _hands_on(node: Node, views: set[int]) -> bool:
    """Whether the result may be the node's operand, which is a view. A sum to fewer dims, as of the gradient
    of a bias, is not."""
    if not views or not node.inputsSize() or node.inputsAt(0).unique() not in views:
        return False
    if not may_return_operand(node):
        return False
    before, after = facts(node.inputsAt(0).type()), facts(node.output().type())
    if None not in (before.rank, after.rank) and before.rank != after.rank:
        return False
    return before.dtype is None or before.dtype == after.dtype


def sizes_follow(value: Value, knowledge: Knowledge, known: dict[int, bool]) -> bool:
    """Whether the sizes of a value can be told without it, wherever it is computed (`sizes`). `known`: what
    was found of other values. Iterative, since a graph may be as deep as a program is long."""
    waiting = [value]
    while waiting:
        last = waiting[-1]
        sources = _sources(last, knowledge) if last.unique() not in known else ()
        pending = [v for v in sources or () if v.unique() not in known]
        if pending:
            waiting.extend(pending)
            continue
        waiting.pop()
        if last.unique() not in known:
            known[last.unique()] = sources is not None and all(known[v.unique()] for v in sources)
    return known[value.unique()]


def _sources(value: Value, knowledge: Knowledge) -> list[Value] | None:
    """The values from whose sizes those of `value` follow; none where they can be asked for; None where they
    do not follow."""
    if row_of(value.node()) is None or examine(value.node(), knowledge).reason is not None:
        return None if value.node().kind() in CONTROL else []
    return sized_by(value) or None


def reshape_refusal(node: Node) -> str | None:
    """Why a node that reshapes cannot be in a group, by the sizes that were profiled; None if it can."""
    sizes = node.inputsAt(0).type().sizes()
    if sizes is None or node.output().type().sizes() is None:
        return "sizes that it was not seen with are reshaped"
    return "no elements are reshaped" if 0 in sizes else None


class Split:
    """The copies of views that `split_views` made: for each, the values that were one."""

    def __init__(self):
        self.family: dict[int, int] = {}


def split_views(graph: Graph) -> Split:
    """Gives each fusible reader of a view a copy of its own, where nothing is written. So it does with
    `prim::dtype(x)`, where x is fusible. A branch or a loop has copies only if it can be in a group: any
    other one would draw, print or raise once for each copy."""
    split, knowledge, effects = Split(), Knowledge(), None
    follow: dict[int, bool] = {}
    for block in list(separate_blocks(graph, knowledge)):
        nodes = nodes_in(block)
        for node in nodes:
            if node.kind() == DTYPE and examine(node.inputsAt(0).node(), knowledge).reason is None:
                _split(graph, node, knowledge, follow, split)
        for i in sorted(views_of(nodes), reverse=True):
            if nodes[i].kind() in CONTROL and examine(nodes[i], knowledge).reason is not None:
                continue
            effects = effects or Effects(graph)
            if not any(effects.is_written(v) for v in operands(nodes[i]) + outputs(nodes[i]) if is_tensor(v)):
                copies = _split(graph, nodes[i], knowledge, follow, split)
                effects.learn(copies, written=False)
    return split


def _split(
    graph: Graph, node: Node, knowledge: Knowledge, follow: dict[int, bool], split: Split
) -> list[Value]:
    """Does it for one node; returns the copies."""
    uses, block = node.output().uses(), node.owningBlock()
    local = [u for u in uses if u.user.outputsSize() and u.user.owningBlock() is block]
    fusible = [u for u in local if examine(u.user, knowledge).reason is None]
    if len(uses) < 2 or not fusible or len(fusible) > MAX_READERS:
        return []
    own = node.output().unique()
    outside = len(uses) - len(fusible)
    if outside and sizes_follow(node.output(), knowledge, follow):
        outside -= sum(use.user.kind() in METADATA for use in uses)
    copies = []
    for use in fusible if outside else fusible[1:]:
        copy = graph.createClone(node, lambda v: v)
        copy.insertAfter(node)
        use.user.replaceInput(use.offset, copy.output())
        split.family[copy.output().unique()] = split.family.setdefault(own, own)
        copies.append(copy.output())
    return copies


def merge_views(graph: Graph, split: Split) -> None:
    """Copies of one view that ended up side by side outside of groups become one again."""
    if not split.family:
        return
    for block in all_blocks(graph):
        first: dict[tuple, Node] = {}
        for node in nodes_in(block):
            key = split.family.get(node.output().unique()) if node.outputsSize() == 1 else None
            if key is None:
                continue
            same = first.setdefault((key, node.kind(), *(v.unique() for v in inputs(node))), node)
            if same is not node:
                node.output().replaceAllUsesWith(same.output())
                node.destroy()
