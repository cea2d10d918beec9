"""Activations that the library applies as it multiplies matrices: relu, and gelu in its tanh form.

A product of matrices stores its result, which an activation that nothing else is fused with reads, and stores
once more. The libraries add a bias on their way, and apply these two as well. Before:

    %p = aten::linear(%x, %w, %b);  %y = aten::relu(%p)
becomes
    %y = tsfuser::activated_product(%b, %x, %w, "relu", True)

In: a graph with groups that have no guards yet, and are final otherwise. Out: the same graph without such
activations outside of groups, and without groups that compute nothing but one of them, after the bias.
Whatever else reads the product needs it in memory, as the backward of gelu does: it stays then. The gelu of
cuBLASLt has an absolute error of 5e-6, so it is taken for 16 bits only."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..graph.effects import Effects
from ..graph.wrapper import (
    GROUP,
    Graph,
    Node,
    Value,
    constant_of,
    facts,
    graph_inputs,
    graph_outputs,
    inputs,
    insert,
    is_constant,
    is_tensor,
    outputs,
)
from .activation_forms import GELU, RELU, WRITTEN_GELU, activation_of, is_cast, is_reshape, last_op
from .lone_biases import BIASED, PRODUCT, sum_in

ACTIVATED = "tsfuser::activated_product"
SAID = "a matrix product is left to torch's libraries, which apply this activation on their way"
LINEAR = "aten::linear"  # its right operand is transposed
#: Kind -> the positions of the bias and of both operands.
PRODUCTS = {LINEAR: (2, 0, 1), "aten::addmm": (0, 1, 2), BIASED: (0, 1, 2)}
_HALVES = ("bfloat16", "float16")
_DTYPES = {RELU: (*_HALVES, "float32"), GELU: _HALVES, WRITTEN_GELU: _HALVES}
#: What has the same answer for the activated product.
_QUESTIONS = ("aten::size", "aten::dim", "prim::dtype", "prim::device")


class Found(NamedTuple):
    """`reader` is all that reads a product, and computes the `activation` of it: a node, or a group, which
    may add a row to the product first."""

    reader: Node
    activation: str


def activation_behind(product: Node, effects: Effects) -> Found | None:
    """The activation that is all that is made of the product; None where there is none."""
    if not (product.kind() == PRODUCT or _adds_row(product)):
        return None
    read = product.output()
    while (reader := _only_reader(read, effects)) is not None and is_reshape(reader):
        read = reader.output()
    if reader is None or len(outputs(reader)) != 1 or reader.owningBlock() != product.owningBlock():
        return None
    if any(map(effects.is_written, [*inputs(product), reader.output()])):
        return None
    x, result = product.output(), reader.output()
    if reader.kind() == GROUP:
        subgraph = reader.g("Subgraph")
        (result,) = graph_outputs(subgraph)
        x = graph_inputs(subgraph)[[v.unique() for v in inputs(reader)].index(read.unique())]
    if product.kind() == PRODUCT:  # of which the group makes a sum
        add = sum_in(reader, product) if reader.kind() == GROUP else None
        if add is None:
            return None
        x = add.output()
    name, dtype = activation_of(result, x), facts(product.output().type()).dtype
    fits = name is not None and dtype in _DTYPES[name] and facts(result.type()).dtype == dtype
    return Found(reader, name) if name and fits else None


def _only_reader(value: Value, effects: Effects) -> Node | None:
    readers = [use.user for use in value.uses() if use.user.kind() not in _QUESTIONS]
    return readers[0] if len(readers) == 1 and not effects.is_written(value) else None


def _adds_row(product: Node) -> bool:
    """Whether the product adds a row of its own dtype, once."""
    if product.kind() not in PRODUCTS:
        return False
    operands = [product.inputsAt(i) for i in PRODUCTS[product.kind()]]
    numbers = inputs(product)[len(operands) :]
    if not all(map(is_tensor, operands)) or any(not is_constant(v) or constant_of(v) != 1 for v in numbers):
        return False
    dtypes = {facts(v.type()).dtype for v in [*operands, product.output()]}
    return len(dtypes) == 1 and facts(operands[0].type()).rank == 1


def activate(graph: Graph, product: Node, result: Value, activation: str) -> Node:
    """Has the product, which adds its bias, apply the activation, and returns it. `result` is what that
    gives, in the graph. What computed it is left as dead code."""
    bias, left, right = (product.inputsAt(i) for i in PRODUCTS[product.kind()])
    graph.setInsertPoint(product)
    rest = [graph.insertConstant(activation), graph.insertConstant(product.kind() == LINEAR)]
    graph.setInsertPoint(graph.return_node())
    made = insert(graph, product, ACTIVATED, [bias, left, right, *rest]).output()
    made.setType(product.output().type())
    outer, last = {product.output().unique(): made}, made
    for node in _kept(result, product.output()):
        others = [outer.get(v.unique(), v) for v in inputs(node)[1:]]
        copy = insert(graph, result.node(), node.kind(), [last, *others]).output()
        copy.setType(node.output().type().with_dtype(getattr(torch, str(facts(made.type()).dtype))))
        last = copy
    result.replaceAllUsesWith(last)
    for use in list(product.output().uses()):
        if use.user.kind() in _QUESTIONS:
            use.user.replaceInput(use.offset, made)
    return made.node()


def _kept(result: Value, x: Value) -> list[Node]:
    """What is left to do with the activated `x` for the result, in order: reshapes, and a cast at the end,
    which says what the dtype is in other calls."""
    way, end = _way(result, x), last_op(result)
    assert way is not None, "the result is computed from the product"
    return [node for node in way if is_reshape(node) or (node == end and is_cast(node))]


def _way(value: Value, x: Value) -> list[Node] | None:
    """The nodes between `x` and `value`, in order, on one of the ways from the one to the other."""
    if value.unique() == x.unique():
        return []
    for operand in inputs(value.node()):
        found = _way(operand, x) if is_tensor(operand) and not is_constant(operand) else None
        if found is not None:
            return [*found, value.node()]
    return None
