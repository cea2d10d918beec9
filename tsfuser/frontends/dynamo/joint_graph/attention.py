"""The gradient that cuDNN's attention reads gets the layout of the attention's result.

In: AOTAutograd's joint graph. Out: the same graph. torch stores the plans of this backward under the layouts
of query, key and value alone (`MHAParams` in cudnn/MHA.cpp). If a later call of the process, compiled or not,
has a gradient in another layout than the first call, its results are wrong (seen with torch 2.11). In eager
code the gradient mostly has the layout of the result. In torch 2.11 AOTAutograd gives a compiled graph a
row-major one.
"""

from __future__ import annotations

import torch
from torch import fx

from ..fx.insert import PART, Insert, laid_out
from ..fx.types import lies_in, order_of

_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def lay_out_gradients(joint: fx.GraphModule) -> None:
    """Inserts a copy where the layout of a gradient differs. The group that computes the gradient stores it
    in this layout, so the copy costs no kernel there."""
    for node in joint.graph.find_nodes(op="call_function", target=_BACKWARD):
        gradient, result = node.args[0], node.args[4]
        order = order_of(result.meta["val"])
        if order is not None and not lies_in(gradient.meta["val"], order):
            node.update_arg(0, laid_out(Insert(node, node, PART), gradient, order))
