"""Reshapes that copy, made by the groups that compute what they copy.

`aten::reshape` gives a view or, where memory has another order, a copy; `aten::contiguous` its operand, or a
copy. A view must not leave a group, so such an op whose result leaves one stays outside, and torch's copy
reads and writes the tensor once more. Before:

    %p = aten::permute(%y, [0, 1, 3, 2, 4, 5]);  %w = aten::reshape(%p, %s)
becomes
    %p = aten::permute(%y, [0, 1, 3, 2, 4, 5]);  %w = tsfuser::reshaped(%p, %s)

which groups take for a new tensor. In: a graph with types. Out: the same graph, changed where the op copied
what was profiled, and nobody could tell a copy from a view: nothing writes to the memory, and either the
result does not leave the graph, or an op of the graph has made the memory and nothing else that shares it
leaves. Where a later call gives a view, the op gives that, too, and a group stores what has its strides."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from .effects import Effects, may_return_operand
from .functionalize import fresh_kinds
from .rows import row_of
from .worth import LEAST, shape
from .wrapper import (
    Graph,
    Node,
    Value,
    all_blocks,
    constant_of,
    inputs,
    insert,
    is_constant,
    is_tensor,
    nodes_of,
    outputs,
    schema,
)

RESHAPE, RESHAPED = "aten::reshape", "tsfuser::reshaped"
CONTIGUOUS, ORDERED = "aten::contiguous", "tsfuser::ordered"
SUMMED = "aten::_grad_sum_to_size"
_COPIES = {RESHAPE: RESHAPED, CONTIGUOUS: ORDERED}
_PLAIN = {copy: plain for plain, copy in _COPIES.items()}
#: Rules of sizes (`Row.sizes`) of views that leave no elements out. Where one repeats elements, and the
#: reshape gives a view of those, a group cannot store it.
_WHOLE = frozenset(
    ("first", "permuted", "swapped", "viewed", "flattened", "squeezed", "unsqueezed", "padded", "expanded")
)
#: A slice that ends there or later ends with its dim.
_LAST = 2**62
#: Readers that hand nothing on: they ask a tensor for its sizes or dtype only, or give a gradient, which
#: autograd takes as it comes, the same tensor or a new one.
_ENDS = frozenset(("aten::size", "aten::dim", "prim::dtype", "prim::device", SUMMED))


def copy_reshapes(graph: Graph) -> None:
    """Rewrites them, and takes back those that were made before and gave a view (training/repeats.py)."""
    restore_reshapes(graph, lambda node: not _copies(node))
    if all(graph.findNode(kind, True) is None for kind in _COPIES):
        return
    effects, fresh = None, fresh_kinds()
    for block in all_blocks(graph):
        for node in [n for n in nodes_of(block, tuple(_COPIES)) if _copies(n)]:
            operand = node.inputsAt(0)
            if not _may_be_copy(node, fresh):
                continue
            if node.kind() == CONTIGUOUS and _is_repeated(node.output(), prod(shape(operand)[0])):
                continue
            effects = effects or Effects(graph)
            if not any(effects.is_written(v) for v in (operand, node.output())):
                _replace(graph, node, _COPIES[node.kind()])


def gives_own_copy(node: Node) -> bool:
    """Whether the op of a graph without writes copied what was profiled, and nobody could tell that from a
    view."""
    return node.kind() in _COPIES and _copies(node) and _may_be_copy(node, fresh_kinds())


def _may_be_copy(node: Node, fresh: frozenset[str]) -> bool:
    operand = node.inputsAt(0)
    return _is_whole(operand) and (not _leaves(node.output()) or _is_hidden(operand, node, fresh))


def restore_reshapes(graph: Graph, which: Callable[[Node], bool] = lambda node: True) -> None:
    """Makes those that are in no group what they were."""
    for block in all_blocks(graph):
        for node in filter(which, nodes_of(block, tuple(_PLAIN))):
            _replace(graph, node, _PLAIN[node.kind()])


def _replace(graph: Graph, node: Node, kind: str) -> None:
    made = insert(graph, node, kind, inputs(node)).output()
    made.setType(node.output().type())
    node.output().replaceAllUsesWith(made)
    node.destroy()


def _copies(node: Node) -> bool:
    """Whether the op copied a tensor of some size when it was profiled."""
    (sizes, strides), (wanted, steps) = shape(node.inputsAt(0)), shape(node.output())
    if sizes is None or wanted is None or prod(sizes) < LEAST:
        return False
    if node.kind() in (CONTIGUOUS, ORDERED):
        return any(have != step for size, have, step in zip(sizes, strides, steps) if size != 1)
    try:
        torch.empty_strided(sizes, strides, device="meta").view(wanted)
        return False
    except RuntimeError:
        return True


def _is_repeated(value: Value, elements: int) -> bool:
    """Whether an op of a group may read the value's `elements`, or those of a view of it, several times each.
    It would read them out of order each time: a copy of its own is read in order."""
    for node in [use.user for use in value.uses() if row_of(use.user) is not None]:
        for made in filter(is_tensor, outputs(node)):
            sizes, _ = shape(made)
            if sizes is not None and prod(sizes) > elements:
                return True
            if may_return_operand(node) and _is_repeated(made, elements):
                return True
    return False


def _leaves(value: Value, but: Node | None = None) -> bool:
    """Whether the value, or what may be a view of it, leaves its block by another way than the node `but`."""
    readers = [use.user for use in value.uses() if use.user != but and use.user.kind() not in _ENDS]
    return any(_hands_out(node, but) for node in readers)


def _hands_out(reader: Node, but: Node | None) -> bool:
    found = schema(reader)
    if found is None or found.writes:  # a return, a list, a branch...; or it is put into a list
        return True
    return may_return_operand(reader) and any(_leaves(made, but) for made in outputs(reader))


def _is_whole(value: Value) -> bool:
    """Whether the value has all elements of its base, as far as the graph shows."""
    maker = value.node()
    found = row_of(maker)
    if found is None or not (found[0].is_view or may_return_operand(maker)):
        return True
    # a gradient that is summed to a size is new, or, where it has that size already, the operand itself
    if found[0].sizes not in _WHOLE and maker.kind() != SUMMED and not _is_whole_slice(maker):
        return False
    return is_tensor(maker.inputsAt(0)) and _is_whole(maker.inputsAt(0))


def _is_hidden(value: Value, reader: Node, fresh: frozenset[str]) -> bool:
    """Whether an op of the graph has made the memory of `value`, and nothing of it leaves but by `reader`."""
    maker = value.node()
    if _leaves(value, reader):
        return False
    if maker.kind() in fresh:
        return True
    found = row_of(maker)
    if found is None or not (found[0].is_view or may_return_operand(maker)):
        return False
    return _is_hidden(maker.inputsAt(0), reader, fresh)


def _is_whole_slice(node: Node) -> bool:
    if node.kind() != "aten::slice" or not all(is_constant(v) for v in inputs(node)[2:]):
        return False
    start, end, step = (constant_of(v) for v in inputs(node)[2:])
    return start in (None, 0) and (end is None or end >= _LAST) and step == 1
