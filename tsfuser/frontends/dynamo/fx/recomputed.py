"""Names for the 16-bit values that both forward and backward compute.

In: a forward and a backward, as the partitioner has just made them: a node of both has the same name in both.
Out: the name in the `meta` of either node. It stays there when later passes give the node another name or
form, and becomes the name of a value of the typed graph: `mul_3` is `%again_mul_3`.
"""

from __future__ import annotations

import torch
from torch import fx

from ....graph.wrapper import Value

_NAME, _PREFIX = "tsfuser_again", "again_"  # the key in `meta`; how names of typed values begin
_NARROW = (torch.float16, torch.bfloat16)


def name_recomputed(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Changes no more than the `meta` of nodes."""
    computed = {node.name: node for node in forward.graph.nodes if node.op == "call_function"}
    for node in backward.graph.nodes:
        found = node.meta.get("val")
        if node.op == "call_function" and node.name in computed and isinstance(found, torch.Tensor):
            if found.dtype in _NARROW:
                node.meta[_NAME] = computed[node.name].meta[_NAME] = node.name


def keep_name(old: fx.Node, new: fx.Node) -> None:
    """`new` takes the place of `old`."""
    if _NAME in old.meta:
        new.meta[_NAME] = old.meta[_NAME]


def name_value(node: fx.Node, value: object) -> None:
    """Gives the name of a node to the value that stands for it in a typed graph."""
    if _NAME in node.meta and isinstance(value, torch._C.Value):
        value.setDebugName(_PREFIX + node.meta[_NAME])


def name_in(value: Value) -> str:
    """The name that the value has from both graphs; "" if it has none."""
    name = value.debugName()
    return name.partition(".")[0] if name.startswith(_PREFIX) else ""
