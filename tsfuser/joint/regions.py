"""Parts of a program that a joint graph each may differentiate.

In: a program's graph, without types. Out: the same graph, in which straight runs of ops, in any block, are
`tsfuser::joint_region` nodes. Attributes of modules are operands of these. Example:

    graph(%self, %x):                              graph(%self, %x):
      %w = prim::GetAttr[name="w"](%self)            %w = prim::GetAttr[name="w"](%self)
      %h = aten::mul(%x, %w)                  ->     %z = tsfuser::joint_region[Subgraph=...](%x, %w)
      %z = aten::sin(%h)                             prim::Print(%z)
      prim::Print(%z)                                %y = tsfuser::joint_region[Subgraph=...](%z)
      %y = ... cos, exp

A region ends at branches, loops, calls, writes, ops without a derivative here, and ops that give numbers of
the elements of tensors. A pure node between its ops that reads nothing of it stays before it. Ops of which
such an end reads nothing come behind it, where nobody can tell: noise is made for what a product gives, and
what is computed of the product is in a region with what reads the noise; a norm checks the sizes of what is
joined for it, and the join is in a region with the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..graph.effects import PURE, WRITES, Effects, draws, effect, secretly_written
from ..graph.rows import row_of
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Block,
    Graph,
    Node,
    Value,
    all_blocks,
    blocks,
    end_of,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
    schema,
    used_inside,
)
from ..ops import without_row
from .divide import Copy
from .expansions import EXPANSIONS
from .names import LAID_OUT, WRITTEN, add_input
from .node_facts import elements_read, holds_tensors, may_copy, root, viewed
from .norm_expansions import COPIED
from .rules import RULES

REGION = "tsfuser::joint_region"
RAISE = "prim::RaiseException"
MOST_DELAYED = 1000  # nodes: it takes time to look for what reads them
#: Ops with a derivative, besides views: a node of autograd costs as much as they do.
FEWEST = 2

_PRIM = frozenset(
    f"prim::{name}" for name in "ListConstruct ListUnpack NumToTensor BroadcastSizes dtype device".split()
)
_WITHOUT_GRADIENT = without_row.FLAT | without_row.LIKE_SELF | without_row.ZEROS
_NUMBERS = frozenset(("IntType", "FloatType", "BoolType", "NumberType", "NoneType", "DeviceObjType"))


def outline(graph: Graph, effects: Effects, fewest: int = FEWEST) -> int:
    """Makes the regions of a graph, which is changed. How many there are, each of at least `fewest` ops. A
    region has to know what the program may write to where it is to keep what it is given. A list whose items
    the program changes is in no region: the graph of a call would have it as a constant, which all calls
    share."""
    is_written = effects.is_written
    found = [run for block in all_blocks(graph) for run in _runs(block, effects, fewest)]
    results: dict[int, bool] = {}

    def may_be_written(value: Value) -> bool:  # the analysis does not know results of regions
        known = results.get(value.unique())
        return is_written(value) if known is None else known

    made = 0
    for run in found:
        for node in run.nodes:
            node.moveBefore(run.end)
        nodes = _without_strangers(run.nodes)
        if sum(map(_counts, nodes)) >= fewest:
            results |= _make(graph, nodes, may_be_written)
            made += 1
    return made


# ---- the runs


@dataclass
class _Run:
    """Nodes that may become a region, in order, before the node `end`."""

    nodes: list[Node]
    end: Node


class _Runs:
    """The runs of a block, whose nodes are added in order."""

    def __init__(self, effects: Effects, fewest: int):
        self._fewest = fewest
        self.found: list[_Run] = []
        self._is_written, self._is_changed = effects.is_written, effects.is_changed
        self._begin([])

    def _begin(self, nodes: list[Node]) -> None:
        self._nodes: list[Node] = []  # of the run that has not ended
        self._makers: dict[int, Node] = {}
        self._flat: set[int] = set()  # values of the run without a gradient
        for node in nodes:
            self._append(node)

    def _append(self, node: Node) -> None:
        made = {v.unique() for v in outputs(node)}
        self._nodes.append(node)
        self._makers.update(dict.fromkeys(made, node))
        if _is_flat(node) or self._is_of_flat(node):
            self._flat |= made

    def add(self, node: Node) -> None:
        read = [*inputs(node), *used_inside(node)]
        if self._takes(node) and all(v.unique() in self._makers or _is_passed(v) for v in inputs(node)):
            self._append(node)
        elif effect(node) != PURE or any(v.unique() in self._makers for v in read):
            self.end(node, self._later(node, read))

    def end(self, place: Node, later: Sequence[Node] = ()) -> None:
        """Ends the run before `place`, but for the nodes that come later."""
        rest = set(later)
        self.found.append(_Run([node for node in self._nodes if node not in rest], place))
        self._begin(list(later))

    def _takes(self, node: Node) -> bool:
        if any(_is_list(v) and not _is_unpacked(v) and self._is_changed(v) for v in outputs(node)):
            return False
        return _is_taken(node) or (_may_be_taken(node) and self._is_of_flat(node))

    def _is_of_flat(self, node: Node) -> bool:
        """Whether all tensors that it is given are values of the run without a gradient."""
        given = [v.unique() for v in inputs(node) if holds_tensors(v)]
        return bool(given) and self._flat.issuperset(given)

    def _later(self, node: Node, read: list[Value]) -> list[Node]:
        """The nodes of the run that come behind `node`: it reads nothing of them, and they touch nothing that
        the program writes to. None where they were in a group with the others."""
        if len(self._nodes) > MOST_DELAYED or not _may_be_passed(node):
            return []
        needed = {n for n in self._nodes if self._touches_written(n)}
        waiting = [*read, *(v for n in needed for v in inputs(n))]
        while waiting:
            maker = self._makers.get(waiting.pop().unique())
            if maker is not None and maker not in needed:
                needed.add(maker)
                waiting += inputs(maker)
        later = [n for n in self._nodes if n not in needed]
        counted = [n for n in needed if _counts(n)]  # too few are left to torch's autograd
        if (
            len(counted) < self._fewest
            and any(map(_is_of_groups, counted))
            or not any(map(_gives_tensors, later))
        ):
            return []
        if draws(node) and any(map(draws, later)):
            return []
        made = [self._makers.get(v.unique()) for n in later for v in inputs(n) if holds_tensors(v)]
        return [] if any(n in needed and _is_of_groups(n) for n in made if n is not None) else later

    def _touches_written(self, node: Node) -> bool:
        return any(holds_tensors(v) and self._is_written(v) for v in [*inputs(node), *outputs(node)])


def _runs(block: Block | Graph, effects: Effects, fewest: int) -> list[_Run]:
    runs = _Runs(effects, fewest)
    for node in nodes_in(block):
        runs.add(node)
    runs.end(end_of(block))
    return runs.found


def _may_be_passed(node: Node) -> bool:
    """Whether pure nodes may stand behind it that touch nothing that is written."""
    if effect(node) == PURE:
        return not blocks(node)
    if effect(node) == WRITES and node.kind().startswith("aten::"):
        return schema(node) is not None
    return _raises_only(node)


def _raises_only(node: Node) -> bool:
    """Whether it is a check: a branch that does nothing but to raise an exception."""
    if node.kind() != "prim::If":
        return node.kind() in (RAISE, "aten::format")
    return all(effect(n) == PURE or _raises_only(n) for block in blocks(node) for n in nodes_in(block))


def _is_of_groups(node: Node) -> bool:
    """Whether groups hold the node, or what it may give a view of."""
    of = viewed(node)
    return row_of(node) is not None if of is None else _is_of_groups(of.node())


def _without_strangers(run: list[Node]) -> list[Node]:
    """Without lists of given tensors that only others read, which are made before the region."""
    inside, made = set(run), {v.unique() for node in run for v in outputs(node)}
    return [
        node
        for node in run
        if node.kind() != LIST
        or any(v.unique() in made for v in inputs(node))
        or any(use.user in inside for use in node.output().uses())
    ]


def _is_taken(node: Node) -> bool:
    """Whether a region may hold such a node, whatever it is given."""
    kind = node.kind()
    if not _may_be_taken(node):
        return False
    if kind.startswith("prim::") or kind in RULES or kind in EXPANSIONS:
        return True
    if not _gives_tensors(node):
        return not any(map(is_tensor, elements_read(node)))
    return _is_flat(node)


def _may_be_taken(node: Node) -> bool:
    """Whether a region may hold such a node if it has a derivative, or needs none."""
    if not all(_is_passed(v) or holds_tensors(v) for v in outputs(node)):
        return False
    if node.kind().startswith("prim::"):
        return node.kind() in _PRIM
    return effect(node) == PURE or bool(secretly_written(node))


def _is_flat(node: Node) -> bool:
    """Whether the node gives tensors without a gradient, whatever it is given."""
    if not node.kind().startswith(("aten::", "tsfuser::")) or not _gives_tensors(node):
        return False
    found = row_of(node)
    if found is not None and (found[0].flat or found[0].asked == found[1].arguments[0]):
        return True
    return node.kind() in _WITHOUT_GRADIENT or not any(map(holds_tensors, inputs(node)))


def _is_passed(value: Value) -> bool:
    """Whether a region may be given the value."""
    type_ = value.type()
    if value.node().kind() == CONSTANT:
        return True
    if type_.kind() == "OptionalType":
        type_ = type_.getElementType()
    if type_.kind() == "ListType":
        return type_.getElementType().kind() == "IntType"
    return type_.kind() in _NUMBERS or type_.kind() == "TensorType"


def _is_list(value: Value) -> bool:
    return value.type().kind() == "ListType"


def _is_unpacked(value: Value) -> bool:
    """Whether a list is there for its items, which are read by nothing else: no program changes it."""
    return all(use.user.kind() == "prim::ListUnpack" for use in value.uses())


def _counts(node: Node) -> bool:
    if not _gives_tensors(node):  # a product of sizes
        return False
    if _copies_repeated(node):
        return True
    return node.kind() in RULES.keys() | EXPANSIONS.keys() and viewed(node) is None


def _copies_repeated(node: Node) -> bool:
    """Whether the node reshapes what repeats elements, which it surely copies."""
    found = row_of(node)
    if found is None or not found[0].reshapes:
        return False
    of = row_of(node.inputsAt(0).node())
    return of is not None and of[0].sizes == "expanded"


def _gives_tensors(node: Node) -> bool:
    return any(map(holds_tensors, outputs(node)))


# ---- the nodes


def _make(graph: Graph, run: list[Node], is_written: Callable[[Value], bool]) -> dict[int, bool]:
    """Puts a region in the place of the run. Which of its results may be written to."""
    own = {v.unique() for node in run for v in outputs(node)}
    given = {v.unique(): v for node in run for v in inputs(node) if v.unique() not in own}
    given = {number: v for number, v in given.items() if v.node().kind() != CONSTANT}
    inside = set(run)
    read = [v for node in run for v in outputs(node) if any(use.user not in inside for use in v.uses())]
    laid_out = {root(n.inputsAt(0)).unique() for n in run if n.kind() in COPIED or may_copy(n)}
    part = Graph()
    known = {}
    for number, value in given.items():
        known[number] = add_input(part, value, WRITTEN * is_written(value) + LAID_OUT * (number in laid_out))
    copy = Copy(part, part.return_node(), known)
    for node in run:
        copy.add(node)
    for value in read:
        part.registerOutput(copy.of(value))
    region = graph.create(REGION, list(given.values()), len(read))
    region.copyMetadata(run[-1])
    region.g_("Subgraph", part)
    written = [is_tensor(value) and is_written(value) for value in read]
    region.is_("written", [i for i, found in enumerate(written) if found])
    region.insertAfter(run[-1])
    for value, result in zip(read, outputs(region)):
        result.setType(value.type())
        value.replaceAllUsesWith(result)
    for node in reversed(run):
        node.destroy()
    return {result.unique(): found for result, found in zip(outputs(region), written)}
