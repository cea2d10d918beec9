"""Cleans the subgraph of a group: dead code, common subexpressions, constants that occur twice.

In: the subgraph of a group that has no guard yet. Out: the same subgraph, for tensors of any type: the
fallback is a copy of it, and so is what returns to the graph. Example: of two nodes `aten::neg(%a)` one is
left."""

from __future__ import annotations

import torch

from .effects import WRITES, effect, remove_dead_code
from .identities import gives_operand_back, is_no_op, stays_inside
from .worth import is_worth_a_kernel
from .wrapper import (
    CONSTANT,
    Graph,
    Node,
    constant_near,
    facts,
    graph_inputs,
    graph_outputs,
    inputs,
    nodes_in,
    outputs,
)


def clean(subgraph: Graph, merge: bool = True) -> None:
    """Simplifies a group's subgraph. `merge` is off where an output is written in place later, so that no
    two outputs become one tensor. What torch's passes merge they delete: they leave no dead code."""
    remove_dead_code(subgraph)
    if merge:
        torch._C._jit_pass_cse(subgraph)
    torch._C._jit_pass_constant_pooling(subgraph)


def drop_unused_inputs(group: Node) -> None:
    """Removes the inputs of a group that its subgraph does not use."""
    subgraph = group.g("Subgraph")
    for i, inner in reversed(list(enumerate(graph_inputs(subgraph)))):
        if not inner.uses():
            subgraph.eraseInput(i)
            group.removeInput(i)


def merge_equal_outputs(group: Node) -> None:
    """Where the subgraph returns one value twice, the group returns it once."""
    subgraph = group.g("Subgraph")
    first: dict[int, int] = {}
    for i, inner in enumerate(graph_outputs(subgraph)):
        first.setdefault(inner.unique(), i)
    for i, inner in reversed(list(enumerate(graph_outputs(subgraph)))):
        if first[inner.unique()] != i:
            group.outputsAt(i).replaceAllUsesWith(group.outputsAt(first[inner.unique()]))
            group.eraseOutput(i)
            subgraph.eraseOutput(i)


def release_idle_casts(graph: Graph, group: Node) -> None:
    """Has the graph, not the group, return an input of the group in the dtype that it has: no copy, as in
    eager. A call with another dtype has it cast there."""
    subgraph = group.g("Subgraph")
    given = {v.unique(): i for i, v in enumerate(graph_inputs(subgraph))}
    before = group.outputsSize()
    for i, result in reversed(list(enumerate(graph_outputs(subgraph)))):
        node = result.node()
        if result.unique() in given or not gives_operand_back(node):
            continue
        tensors = [v for v in inputs(node) if v.node().kind() != CONSTANT]
        if not all(v.unique() in given for v in tensors):
            continue
        outer = {v.unique(): group.inputsAt(given[v.unique()]) for v in tensors}
        outer.update(
            (v.unique(), constant_near(graph, group, v)) for v in inputs(node) if v.unique() not in outer
        )
        cast = graph.createClone(node, lambda v: outer[v.unique()])
        cast.insertBefore(group)
        group.outputsAt(i).replaceAllUsesWith(cast.output())
        group.eraseOutput(i)
        subgraph.eraseOutput(i)
    if group.outputsSize() < before:
        remove_dead_code(subgraph)


def writers(subgraph: Graph) -> list[Node]:
    """The nodes that change their operands."""
    return [node for node in nodes_in(subgraph) if effect(node) == WRITES]


def is_needed(subgraph: Graph, output: int) -> bool:
    """Whether, without that output, a node that changes its operands would be dead code."""
    nodes = writers(subgraph)
    if not nodes:
        return False
    kept = [v for i, v in enumerate(graph_outputs(subgraph)) if i != output]
    seen, waiting = set(), kept
    while waiting:
        value = waiting.pop()
        if value.unique() not in seen:
            seen.add(value.unique())
            waiting.extend(inputs(value.node()))
    return not all(any(v.unique() in seen for v in outputs(node)) for node in nodes)


def has_work(subgraph: Graph, least: int, reductions: bool) -> bool:
    """Whether `least` nodes compute something, for tensors as profiled. An op that is worth a kernel of its
    own counts as two."""
    found = 0
    for node in nodes_in(subgraph):
        if not node.kind().startswith("prim::"):
            found += not (is_no_op(node, lambda v: facts(v.type()).dtype) and stays_inside(node))
            found += is_worth_a_kernel(node, reductions)
        if found >= least:
            return True
    return False
