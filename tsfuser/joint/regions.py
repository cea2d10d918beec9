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
the elements of tensors. A pure node between its ops that reads nothing of it stays before it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph.effects import PURE, effect, secretly_written
from ..graph.rows import row_of
from ..graph.wrapper import (
    CONSTANT,
    LIST,
    Block,
    Graph,
    Node,
    Value,
    all_blocks,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
    used_inside,
)
from ..ops import without_row
from .divide import WRITTEN, Copy
from .expansions import EXPANSIONS
from .node_facts import elements_read, viewed
from .rules import RULES

REGION = "tsfuser::joint_region"
FEWEST = 2  # ops with a derivative, besides views: a node of autograd costs as much as they do

_PRIM = frozenset(f"prim::{name}" for name in "ListConstruct ListUnpack NumToTensor dtype device".split())
_WITHOUT_GRADIENT = without_row.FLAT | without_row.LIKE_SELF | without_row.ZEROS
_NUMBERS = frozenset(("IntType", "FloatType", "BoolType", "NumberType", "NoneType", "DeviceObjType"))


def outline(graph: Graph, is_written: Callable[[Value], bool] = lambda _: False) -> int:
    """Makes the regions of a graph, which is changed. How many there are. `is_written`: whether the program
    may write to a value, which its region has to know where it is to keep what it is given. A list that it
    writes to is in no region: the graph of a call would have it as a constant, which all calls share."""
    found = [run for block in all_blocks(graph) for run in _runs(block, is_written)]
    for run in found:
        _make(graph, run, is_written)
    return len(found)


# ---- the runs


def _runs(block: Block | Graph, is_written: Callable[[Value], bool]) -> list[list[Node]]:
    runs: list[list[Node]] = []
    run: list[Node] = []
    made: set[int] = set()
    for node in nodes_in(block):
        is_taken = _is_taken(node) and not any(_is_list(v) and is_written(v) for v in outputs(node))
        if is_taken and all(v.unique() in made or _is_passed(v) for v in inputs(node)):
            run.append(node)
            made.update(v.unique() for v in outputs(node))
        elif effect(node) != PURE or any(v.unique() in made for v in [*inputs(node), *used_inside(node)]):
            runs.append(run)
            run, made = [], set()
    runs = [_without_strangers(run) for run in [*runs, run]]
    return [run for run in runs if sum(map(_counts, run)) >= FEWEST]


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
    """Whether a region may hold such a node."""
    kind = node.kind()
    if not all(_is_passed(v) or _holds_tensors(v) for v in outputs(node)):
        return False
    if kind.startswith("prim::"):
        return kind in _PRIM
    if effect(node) != PURE and not secretly_written(node):
        return False
    if kind in RULES or kind in EXPANSIONS:
        return True
    if not any(map(_holds_tensors, outputs(node))):
        return not any(map(is_tensor, elements_read(node)))
    found = row_of(node)
    if found is not None and (found[0].flat or found[0].asked == found[1].arguments[0]):
        return True
    return kind in _WITHOUT_GRADIENT or not any(map(_holds_tensors, inputs(node)))


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


def _counts(node: Node) -> bool:
    if not any(map(_holds_tensors, outputs(node))):  # a product of sizes
        return False
    return node.kind() in RULES.keys() | EXPANSIONS.keys() and viewed(node) is None


def _holds_tensors(value: Value) -> bool:
    type_ = value.type()
    while type_.kind() in ("ListType", "OptionalType"):
        type_ = type_.getElementType()
    return type_.kind() == "TensorType"


# ---- the nodes


def _make(graph: Graph, run: list[Node], is_written: Callable[[Value], bool]) -> None:
    """Puts a region in the place of the run."""
    own = {v.unique() for node in run for v in outputs(node)}
    given = {v.unique(): v for node in run for v in inputs(node) if v.unique() not in own}
    given = {number: v for number, v in given.items() if v.node().kind() != CONSTANT}
    inside = set(run)
    read = [v for node in run for v in outputs(node) if any(use.user not in inside for use in v.uses())]
    part = Graph()
    known = {}
    for number, value in given.items():
        known[number] = part.addInput()
        known[number].setType(value.type())
        if is_written(value):
            known[number].setDebugName(WRITTEN)
    copy = Copy(part, part.return_node(), known)
    for node in run:
        copy.add(node)
    for value in read:
        part.registerOutput(copy.of(value))
    region = graph.create(REGION, list(given.values()), len(read))
    region.copyMetadata(run[-1])
    region.g_("Subgraph", part)
    region.insertAfter(run[-1])
    for value, result in zip(read, outputs(region)):
        result.setType(value.type())
        value.replaceAllUsesWith(result)
    for node in reversed(run):
        node.destroy()
