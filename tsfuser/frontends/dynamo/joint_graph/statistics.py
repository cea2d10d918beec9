"""The dtype of a norm's saved statistics, where tracing takes another one than eager's kernel gives.

In: AOTAutograd's joint graph. A norm of 16-bit CPU tensors with a parameter in float32 saves its mean and its
1 / standard deviation in float32; torch's rule for tensors without elements says 16 bits. Then the norm's
backward seems to have parameters of two dtypes, which no group takes. Before, `mean` and `rstd` are traced as
bfloat16, and after it as float32:

    y, mean, rstd = native_layer_norm(x, [8], w, b, 1e-5)        # x is bfloat16, w and b are float32
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_PARAMETERS = frozenset(("weight", "bias", "running_mean", "running_var"))  # of norms, by torch's schemas
_STATISTICS = (1, 2)  # among the results


def trace_as_computed(joint: fx.GraphModule) -> None:
    """Corrects the traced statistics of each such norm."""
    for node in joint.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _is_norm(node.target) and _is_mixed(node):
            _correct(node)


def _is_norm(op: torch._ops.OpOverload) -> bool:
    """Whether it is a norm that gives its result, then its statistics."""
    names = {argument.name for argument in op._schema.arguments}
    backward = any("grad" in name for name in names)
    return (
        {"input", "weight", "bias"} <= names and len(op._schema.returns) > max(_STATISTICS) and not backward
    )


def _is_mixed(norm: fx.Node) -> bool:
    given = {x.name: value for x, value in zip(norm.target._schema.arguments, norm.args)}
    given.update(norm.kwargs)
    operand = given["input"].meta["val"]
    parameters = [given.get(name) for name in _PARAMETERS]
    return (
        operand.device.type == "cpu"
        and operand.dtype in (torch.float16, torch.bfloat16)
        and any(isinstance(x, fx.Node) and x.meta["val"].dtype == torch.float32 for x in parameters)
    )


def _correct(norm: fx.Node) -> None:
    traced = list(norm.meta["val"])
    for k in _STATISTICS:
        traced[k] = traced[k].to(torch.float32)
    norm.meta["val"] = tuple(traced)
    for item in norm.users:
        if item.target is operator.getitem and item.args[1] in _STATISTICS:
            item.meta["val"] = traced[item.args[1]]
