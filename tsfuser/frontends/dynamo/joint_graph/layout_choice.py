"""Whether the convolutions of a graph run in channels last.

In: a graph of ATen ops, and its convolutions of images. Out: None, or why they keep their layout. The rules
are inductor's (torch/_inductor/graph.py, `decide_layout_opt`), which were measured on torchbench and timm. A
size that varies counts with its value in the traced call. Example: if a network has convolutions with groups
of several channels each, its training keeps the layout, because cuDNN is up to 31 times slower for them in
channels last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from ..fx.types import hint

CONVOLUTION = torch.ops.aten.convolution.default

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The most nodes of a graph per convolution: in a graph with more, convolutions do not decide what is fast.
_MOST_NODES = {True: 300, False: 900}  # without a backward, and with one
#: Time in channels last divided by the time in eager's layout, without a backward.
_TIMES = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "": 0.823}


def why_not(graph: fx.Graph, convolutions: Sequence[fx.Node], inference: bool) -> str | None:
    """Why the convolutions keep their layout. `inference`: the graph has no backward."""
    for node in convolutions:
        x, weight = (node.args[k].meta["val"] for k in (0, 1))
        if x.device.type != "cuda" or x.dtype not in _DTYPES:
            return "not all of them are of floating CUDA tensors of at most 32 bits"
        if None in _sizes(x) or None in _sizes(weight):
            return "data decide on a size"
    if len(graph.nodes) >= _MOST_NODES[inference] * len(convolutions):
        return "there are few of them"
    kinds = [_kind(node) for node in convolutions]
    if inference:
        return _slower(convolutions, kinds)
    if "grouped" in kinds:
        return "one has groups of several channels"
    if any(_is_narrowing(node) for node in convolutions):
        return "one has half as many channels behind it as before it"
    if all(_is_small(node) for node in convolutions):
        return "all of them have few channels"
    return None


def _slower(convolutions: Sequence[fx.Node], kinds: Sequence[str]) -> str | None:
    work: Counter[str] = Counter()
    for node, kind in zip(convolutions, kinds):
        work[kind] += _products(node)
    if sum(_TIMES[kind] * work[kind] for kind in work) > sum(work.values()):
        return "most of their work is that of groups of several channels"
    return None


def _kind(node: fx.Node) -> str:
    if _is_grouped(node):
        return "grouped"
    if _is_small(node):
        return "small"
    return "narrowing" if _is_narrowing(node) else ""


def _is_grouped(node: fx.Node) -> bool:
    """Whether it has groups of several channels each, so is not depthwise."""
    return node.args[8] > 1 and _weight(node)[1] > 1


def _is_small(node: fx.Node) -> bool:
    return max(_weight(node)[:2]) <= 64


def _is_narrowing(node: fx.Node) -> bool:
    results, operands, height, _ = _weight(node)
    return 2 * results <= operands and height > 1


def _products(node: fx.Node) -> int:
    """The number of multiplications of the convolution."""
    transposed = node.args[6]
    image = node.args[0].meta["val"] if transposed else node.meta["val"]
    batch, _, height, width = _sizes(image)
    return prod((batch, height, width, *_weight(node)))


def _weight(node: fx.Node) -> list[int]:
    return _sizes(node.args[1].meta["val"])


def _sizes(tensor: torch.Tensor) -> list[int]:
    return [hint(size) for size in tensor.shape]
