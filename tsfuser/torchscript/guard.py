"""Puts a group behind a guard, with the original nodes as the fallback (behaviour.md 4 and 8.5).

Before: `%b = prim::CudaFusionGroup(%x)`. After:

    %ok : bool = prim::CudaFusionGuard[types=[Float(4, 8, ...)]](%x)
    %b = prim::If(%ok)
      block0(): %c = prim::CudaFusionGroup(%x)   -> (%c)
      block1(): %d = prim::FallbackGraph(%x)     -> (%d)

An output of which only the dtype is asked leaves the group: one block gives the number of the dtype, the
other asks the fallback's tensor."""

from __future__ import annotations

import torch

from ..ops.table import scalar_type_code
from ..ir.dtypes import DTYPES
from .cleanup import is_needed, writers
from .effects import remove_dead_code
from .graph import CONSTANT, FALLBACK, GUARD, Graph, Node, Value, facts, inputs, is_tensor, outputs
from .partition import is_ignored

_INT, _BOOL = torch._C.IntType.get(), torch._C.BoolType.get()


def guard(graph: Graph, group: Node) -> "str | None":
    """Builds the guard, the If and the fallback around the group. Returns the reason if that cannot be
    done, and changes nothing."""
    inner = list(group.g("Subgraph").inputs())
    tensors = [v for v, i in zip(inputs(group), inner) if is_tensor(v) and v.node().kind() != CONSTANT and not is_ignored(i)]
    for v in tensors:
        if not facts(v.type()).known:
            return f"the dtype, device or rank of %{v.debugName()} is unknown"
    check = graph.create(GUARD, tensors, 1)
    check.tys_("types", [v.type() for v in tensors])
    check.output().setType(_BOOL)
    check.insertBefore(group)
    choice = graph.create("prim::If", [check.output()], group.outputsSize())
    choice.insertAfter(check)
    fused, unfused = choice.addBlock(), choice.addBlock()
    fallback = _fallback(graph, group)
    fallback.insertBefore(unfused.returnNode())
    for inner, outer, other in zip(outputs(group), outputs(choice), outputs(fallback)):
        outer.copyMetadata(inner)
        inner.replaceAllUsesWith(outer)
        other.setType(inner.type())
    group.moveBefore(fused.returnNode())
    for inner, other in zip(outputs(group), outputs(fallback)):
        fused.registerOutput(inner)
        unfused.registerOutput(other)
    return None


def _fallback(graph: Graph, group: Node) -> Node:
    """A node that runs a copy of the subgraph on its own, untyped, so that it is profiled anew."""
    copy = group.g("Subgraph").copy()
    torch._C._jit_pass_erase_shape_information(copy)
    node = graph.create(FALLBACK, inputs(group), group.outputsSize())
    node.g_("Subgraph", copy)
    return node


def replace_dtype_only_outputs(graph: Graph, group: Node) -> None:
    """Turns those outputs of the If around `group` that serve `prim::dtype` alone into ints."""
    fused, unfused = _If(group).blocks
    choice, subgraph = _If(group).node, group.g("Subgraph")
    acting = writers(subgraph)
    for i in range(choice.outputsSize()):
        value = choice.outputsAt(i)
        readers = [use.user for use in value.uses()]
        dtype = facts(value.type()).dtype if is_tensor(value) else None
        if not readers or any(n.kind() != "prim::dtype" for n in readers) or dtype not in DTYPES:
            continue
        inner, other = fused.returnNode().inputsAt(i), unfused.returnNode().inputsAt(i)
        if is_needed(acting, subgraph, inner.offset()):
            continue
        known = _constant(graph, scalar_type_code(DTYPES[dtype]), group)
        fused.returnNode().replaceInput(i, known)
        unfused.returnNode().replaceInput(i, _ask_dtype(graph, other, unfused))
        value.setType(_INT)
        for node in readers:
            node.output().replaceAllUsesWith(value)
            node.destroy()
        where = inner.offset()
        group.eraseOutput(where)
        subgraph.eraseOutput(where)
    remove_dead_code(subgraph)


class _If:
    """The If around a group."""

    def __init__(self, group: Node):
        self.node: Node = group.owningBlock().owningNode()
        self.blocks = list(self.node.blocks())


def _constant(graph: Graph, number: int, before: Node) -> Value:
    node = graph.create(CONSTANT, [], 1)
    node.i_("value", number)
    node.output().setType(_INT)
    node.insertBefore(before)
    return node.output()


def _ask_dtype(graph: Graph, tensor: Value, block) -> Value:
    node = graph.create("prim::dtype", [tensor], 1)
    node.insertBefore(block.returnNode())
    node.output().setType(_INT)
    return node.output()
