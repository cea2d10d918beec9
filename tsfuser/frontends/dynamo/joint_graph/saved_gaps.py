"""Results of products that the forward saves with gaps between their rows (graph/matrix_room.py).

In: a forward and its backward. Out: marks at the values that may be saved so: no op of the backward that
depends on strides reads them, and the program does not get them. When the forward is compiled, it tells
`SavedGaps` the strides of the tensors that it saves with gaps. The backward, which is compiled next, takes
these for the traced ones:

    mm = mm(x, w)                      # 50,257 columns, saved in rows of 50,264 elements
    ... backward(mm, ...):             # Tensor [4096, 50257], strides [50264, 1]

so that the kernels of both are compiled for them at once. What a call really brings may be without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ..fx.strides import is_view, reads_strides, relies_on_strides

#: In the `meta` of the output of a forward: position of a result that may have gaps -> its name.
MAY_HAVE_GAPS = "tsfuser_may_have_gaps"


class SavedGaps:
    """Of one forward and its backward."""

    def __init__(self) -> None:
        self._strides: dict[str, tuple] = {}  # by name

    def note(self, found: Mapping[str, tuple]) -> None:
        """What a forward saves with gaps."""
        self._strides.update(found)

    def apply(self, backward: fx.GraphModule) -> None:
        """Gives inputs of the backward the strides that the forward has chosen."""
        for node in backward.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if node.name in self._strides and isinstance(value, torch.Tensor):
                node.meta["val"] = value.as_strided(value.shape, self._strides[node.name])


def mark_gaps(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Marks what may be saved with gaps: outputs of the forward after the first `results`."""
    readers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    (last,) = (node for node in forward.graph.nodes if node.op == "output")
    returned = list(last.args[0])
    shown = {_source(node) for node in returned[:results] if isinstance(node, fx.Node)}
    last.meta[MAY_HAVE_GAPS] = {
        k: node.name
        for k, node in enumerate(returned)
        if k >= results
        and isinstance(node, fx.Node)
        and node not in shown  # with gaps, it would be kept beside the program's copy without
        and _is_new_matrix(node)
        and node.name in readers
        and not _shows_strides(readers[node.name])
    }


def _source(node: fx.Node) -> fx.Node:
    """What owns the memory of the node's result."""
    while is_view(node):
        node = node.args[0]
    return node


def _is_new_matrix(node: fx.Node) -> bool:
    found = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(found, torch.Tensor)
        and found.dim() == 2
        and not is_view(node)
    )


def _shows_strides(node: fx.Node) -> bool:
    """Whether an op may tell a tensor in this order, but with gaps, from the traced one."""
    return any(
        user.op == "output"
        or reads_strides(user)
        or relies_on_strides(user)
        or (is_view(user) and _shows_strides(user))
        for user in node.users
    )
