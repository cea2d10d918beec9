"""Inputs that the program changes: AOTAutograd leaves one `copy_` to each of them, and no other in-place op.

In: an FX graph. Out: those copies, and what they change: `copy_(primals_1, sigmoid)` changes `primals_1` and
everything that shares memory with it. Example: `updates(graph)` -> `[copy_]`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

_COPY = torch.ops.aten.copy_.default


def updates(graph: fx.Graph) -> list[fx.Node]:
    """The copies to inputs whose result nobody reads, in order."""
    return [node for node in graph.nodes if node.target is _COPY and _is_update(node)]


def _is_update(node: fx.Node) -> bool:
    if node.users or node.kwargs or len(node.args) != 2:
        return False
    target, source = node.args
    return isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(source, fx.Node)


def sharing(graph: fx.Graph, changed: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that may share memory with one of `changed`: these nodes, and views of them."""
    found = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or not any(operand in found for operand in node.all_input_nodes):
            continue
        returns = getattr(getattr(node.target, "_schema", None), "returns", None)
        if returns is None or any(r.alias_info is not None for r in returns):  # Python's `getitem`, too
            found.add(node)
    return found


def return_inputs(graph: fx.Graph) -> None:
    """A copy gives its target back: where that is a result of the graph, the input is."""
    for node in graph.nodes:
        if node.target is _COPY and node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op == "output")


def move_last(graph: fx.Graph) -> None:
    """Moves the copies behind all other nodes, unless one of these reads what a copy changes."""
    return_inputs(graph)
    waiting = updates(graph)
    if not waiting:
        return
    last = next(iter(reversed(graph.nodes)))
    changed = sharing(graph, [copy.args[0] for copy in waiting])
    seen = False
    for node in graph.nodes:
        seen = seen or node is waiting[0]
        if seen and node.op != "output" and node not in waiting and changed & set(node.all_input_nodes):
            return
    for copy in waiting:
        last.prepend(copy)


def last_updates(graph: fx.Graph) -> list[fx.Node]:
    """The copies after which no other op runs."""
    found = []
    for node in reversed(graph.nodes):
        if node.op != "output":
            if node.target is not _COPY or not _is_update(node):
                break
            found.append(node)
    return found[::-1]
