"""Removes profile nodes and puts what they saw on the values as types.

Before: `%2 : Tensor = prim::profile[profiled_type=Float(4, 8, ...)](%x)`, and users of `%2`.
After: the same users of `%x : Float(4, 8, ...)`.
"""

from __future__ import annotations

import torch

from ...graph.wrapper import Graph


def remove_profile_nodes(graph: Graph) -> Graph:
    """Every use of a profile node goes back to its input, whose type becomes the recorded one, or what all
    records agree on."""
    for node in graph.findAllNodes("prim::profile", True):
        if node.inputsSize():
            value = node.inputsAt(0)
            known = value.type()
            if (
                known.kind() == "TensorType"
                and (seen := agreement(known, node.ty("profiled_type"))) is not known
            ):
                value.setType(seen)
            if node.outputsSize():
                node.outputsAt(0).replaceAllUsesWith(value)
        node.destroy()
    return graph


def agreement(known, seen):
    """What two records of one tensor agree on; a bare Tensor, recorded by code that never ran, says
    nothing."""
    bare = torch._C.TensorType.get()
    if known == seen or seen == bare:
        return known
    if known == bare:
        return seen
    result = bare
    if known.dim() is not None and known.dim() == seen.dim():
        pairs = zip(known.varyingSizes(), seen.varyingSizes())
        result = result.with_sizes([a if a == b else None for a, b in pairs])
    if known.dtype() == seen.dtype() and known.dtype() is not None:
        result = result.with_dtype(known.dtype())
    if known.device() == seen.device() and known.device() is not None:
        result = result.with_device(known.device())
    return result
