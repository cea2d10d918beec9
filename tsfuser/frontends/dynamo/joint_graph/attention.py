"""The plans of cuDNN's attention backward, which torch may reuse for gradients of another layout.

In: AOTAutograd's joint graph. Out: the same graph. torch stores the plans of this backward under the layouts
of query, key and value, and not of the gradient (`MHAParams` in cudnn/MHA.cpp). If a later call of the
process, compiled or not, has a gradient in another layout than the first call, its results are wrong (seen
with torch 2.11). So two things are done:

- The gradient gets the layout of the attention's result, which follows from that of the query. In this way
  all graphs that tsfuser compiles agree, whatever layout AOTAutograd gave to the gradient.
- Where nothing is dropped, the call gets plans of its own: the probability of dropout is part of a plan's
  key, byte by byte, and -0.0 has other bytes than 0.0. Eager code of the same process, whose
  gradients may have any layout, neither uses these plans nor leaves its own to them.
"""

from __future__ import annotations

import torch
from torch import fx

from ..fx.insert import PART, Insert, laid_out
from ..fx.types import lies_in, order_of

_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_DROPPED = [argument.name for argument in _BACKWARD._schema.arguments].index("dropout_p")


def part_plans(joint: fx.GraphModule) -> None:
    """Inserts a copy where the layout of a gradient differs. The group that computes the gradient stores it
    in this layout, so the copy costs no kernel there."""
    for node in joint.graph.find_nodes(op="call_function", target=_BACKWARD):
        gradient, result = node.args[0], node.args[4]
        order = order_of(result.meta["val"])
        if order is not None and not lies_in(gradient.meta["val"], order):
            node.update_arg(0, laid_out(Insert(node, node, PART), gradient, order))
        if order is not None and node.args[_DROPPED] == 0.0:
            node.update_arg(_DROPPED, -0.0)
