"""Inputs of groups over which results may be written, because nobody in the graph reads them later.

In: a typed graph with groups, in their final order. Out: the same graph, in which each group says which of
its inputs are dead after it, one bit per input. C++ writes a result over a dead input if nothing else holds
its memory (csrc_stubs/call/reuse.h). Before and after:

    %y = aten::mm(%x, %w);  %z = prim::CudaFusionGroup(%y, %x);  return (%z)
    %y = aten::mm(%x, %w);  %z = prim::CudaFusionGroup[dead=1](%y, %x);  return (%z)

The graph's inputs are not dead, except those that AOTAutograd donates. Nor is a tensor that an op from
outside ATen has seen: the op may still read it on another stream when nothing here holds it any more.
"""

from __future__ import annotations

from collections.abc import Collection

from ....graph.wrapper import GROUP, Graph, inputs, is_tensor, operands, outputs
from ....planning.plan import MOST_DEAD_INPUTS
from .memory import Memory, makes_none

_ALLOCATING = ("aten::", "tsfuser::", GROUP)  # kinds whose new tensors nobody else knows
_KNOWN = (*_ALLOCATING, "prim::")


def mark_dead_inputs(graph: Graph, donated: Collection[int] = ()) -> list[int]:
    """Changes the groups of the graph's top block. `donated`: the graph's inputs that belong to it. Returns
    those of them over which a group may write."""
    memory, nodes = Memory(graph), list(graph.nodes())
    last: dict[int, int] = {}
    given = {k: memory.of([v]) for k, v in enumerate(graph.inputs()) if k in donated}
    free = set().union(*given.values())
    lent, theirs = set(memory.kept), memory.of(graph.inputs())
    for at, node in enumerate(nodes):
        made = memory.of(outputs(node))
        touched = made | memory.of(operands(node))
        last.update(dict.fromkeys(touched, at))
        if node.kind().startswith(_ALLOCATING) and not makes_none(node):
            free |= made - theirs  # without what is stored over an input
        elif not node.kind().startswith(_KNOWN):
            if not touched:
                return []  # everything after it may run on another stream
            lent |= touched
    taken: set[int] = set()
    for at, node in enumerate(nodes):
        if node.kind() == GROUP and not node.hasAttribute("batch"):
            ending = {k for k in free - lent if last.get(k) == at}  # what no node reads is in no group
            first = inputs(node)[:MOST_DEAD_INPUTS]
            places = [memory.of([v]) if is_tensor(v) else frozenset() for v in first]
            dead = [k for k, own in enumerate(places) if len(own) == 1 and own <= ending]
            if dead:
                node.i_("dead", sum(1 << k for k in dead))
                taken.update(*(places[k] for k in dead))
    return [k for k, own in given.items() if own & taken]
