"""Puts a group behind a guard, with the original nodes as the fallback.

Before: `%b = prim::CudaFusionGroup(%x)`. After:

    %ok : bool = prim::CudaFusionGuard[types=[Float(4, 8, ...)]](%x)
    %b = prim::If(%ok)
      block0(): %c = prim::CudaFusionGroup(%x)   -> (%c)
      block1(): %d = prim::FallbackGraph(%x)     -> (%d)

Nothing that a group computes depends on the profiled types: it makes a plan for whatever comes. They choose
its nodes, and the guard keeps other types from it, for which its fallback may choose better. So a guard that
has refused `PATTERNS` patterns of types opens: from then on it lets through all that a plan could be made
for, and the chain of fallbacks below it ends (csrc_stubs/group/guard_widening.h).
"""

from __future__ import annotations

import torch

from ...graph.operand_room import may_have_gaps
from ...graph.rows import is_unguarded
from ...graph.wrapper import (
    CONSTANT,
    FALLBACK,
    GUARD,
    Graph,
    Node,
    Value,
    facts,
    graph_inputs,
    inputs,
    is_tensor,
    outputs,
)
from ...joint.names import mark_as_part

#: Patterns of types that a guard sends to its fallback before it opens.
PATTERNS = 4
_BOOL = torch._C.BoolType.get()


def guard(graph: Graph, group: Node) -> str | None:
    """Builds the guard, the If and the fallback around the group. Returns the reason if that cannot be
    done, and changes nothing."""
    inner = graph_inputs(group.g("Subgraph"))
    tensors = [
        v
        for v, i in zip(inputs(group), inner)
        if is_tensor(v) and v.node().kind() != CONSTANT and not is_unguarded(i)
    ]
    for v in tensors:
        if not facts(v.type()).known:
            return f"the dtype, device or rank of %{v.debugName()} is unknown"
    check = graph.create(GUARD, tensors, 1)
    check.tys_("types", [_guarded(graph, v) for v in tensors])
    check.i_("patterns", PATTERNS)
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


def _guarded(graph: Graph, value: Value):
    """The type that the guard asks for: of a tensor that may have gaps in later calls, that of one with the
    same order of dims in memory and with gaps, which one without agrees with as well."""
    own = value.type()
    if not may_have_gaps(graph, value):
        return own
    from_inner = sorted(range(own.dim()), key=lambda d: (own.strides()[d], -d))
    strides = [2 * 3 ** from_inner.index(d) for d in range(own.dim())]
    gapped = torch.empty_strided((2,) * own.dim(), strides, dtype=own.dtype(), device="meta")
    gapped.requires_grad_(bool(own.requires_grad()))
    made = torch._C.TensorType.create_from_tensor(gapped)
    return made.with_sizes([None] * own.dim()).with_device(own.device())


def _fallback(graph: Graph, group: Node) -> Node:
    """A node that runs a copy of the subgraph on its own, untyped, so that it is profiled anew.
    Training gets no regions there: the graph around it has them."""
    copy = group.g("Subgraph").copy()
    torch._C._jit_pass_erase_shape_information(copy)
    if graph_inputs(copy):
        mark_as_part(copy)
    node = graph.create(FALLBACK, inputs(group), group.outputsSize())
    node.g_("Subgraph", copy)
    return node
