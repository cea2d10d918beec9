"""Products of matrices whose library applies gelu, in its tanh form, as it multiplies.

A product stores its result, which a gelu that nothing else is fused with reads, and stores once more.
cuBLASLt adds a bias on its way, and applies this gelu as well. Before, perhaps with gelu written out:

    %p = aten::linear(%x, %w, %b);  %y = aten::gelu(%p, "tanh")
becomes
    %y = tsfuser::gelu_product(%b, %x, %w, True, False)

In: a graph with groups that have no guards yet, and are final otherwise. Out: the same graph without such
gelus outside of groups, and without groups that compute nothing but one, after the bias. A product that
anything else reads, as the backward of gelu does, stays: it has to be in memory. The gelu of cuBLASLt has an
absolute error of 5e-6, so it is taken for 16 bits only. Its relu is not taken: some of its kernels make 0 of
NaN (seen on an H100)."""

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
    ids,
    inputs,
    insert,
    is_constant,
    is_tensor,
    outputs,
)
from .gelu_forms import gelu_of, is_cast, is_reshape, last_op
from .lone_biases import BIASED, PRODUCT, sum_in

GELU_PRODUCT = "tsfuser::gelu_product"
SAID = "a matrix product is left to torch's libraries, which apply gelu on their way"
DTYPES = ("bfloat16", "float16")
LINEAR = "aten::linear"  # its right operand is transposed
#: Kind -> the positions of the bias and of both operands.
PRODUCTS = {LINEAR: (2, 0, 1), "aten::addmm": (0, 1, 2), BIASED: (0, 1, 2)}
#: What has the same answer for gelu of a product.
_QUESTIONS = ("aten::size", "aten::dim", "prim::dtype", "prim::device")


class Found(NamedTuple):
    """`reader` is all that reads a product, and computes gelu of it: a node, or a group, which may add a row
    to the product first. `written`: out, in the program."""

    reader: Node
    written: bool


def gelu_behind(product: Node, effects: Effects) -> Found | None:
    """The gelu that is all that is made of the product; None where there is none."""
    if not (product.kind() == PRODUCT or _adds_row(product)):
        return None
    x = read = product.output()
    while (reader := _only_reader(read, effects)) is not None and is_reshape(reader):
        read = reader.output()
    if reader is None or len(outputs(reader)) != 1 or reader.owningBlock() != product.owningBlock():
        return None
    if not reader.output().uses():
        return None
    if any(map(effects.is_written, [*inputs(product), reader.output()])):
        return None
    result = reader.output()
    if reader.kind() == GROUP:
        subgraph = reader.g("Subgraph")
        (result,) = graph_outputs(subgraph)
        x = graph_inputs(subgraph)[ids(inputs(reader)).index(read.unique())]
    if product.kind() == PRODUCT:
        is_summed = reader.kind() == GROUP and read.unique() == product.output().unique()
        add = sum_in(reader, product) if is_summed else None
        if add is None:
            return None
        x = add.output()
    if not is_tensor(result):
        return None
    dtypes = {facts(v.type()).dtype for v in (product.output(), result)}
    said = gelu_of(result, x) if len(dtypes) == 1 and dtypes <= {*DTYPES} else None
    return None if said is None else Found(reader, said == "written")


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


def apply_gelu(graph: Graph, product: Node, result: Value, written: bool) -> Node:
    """Has the product, which adds its bias, apply gelu, and returns it. `result` is what gelu gives, in the
    graph. What computed it is left as dead code."""
    bias, left, right = (product.inputsAt(i) for i in PRODUCTS[product.kind()])
    graph.setInsertPoint(product)
    flags = [graph.insertConstant(flag) for flag in (product.kind() == LINEAR, written)]
    graph.setInsertPoint(graph.return_node())
    made = insert(graph, product, GELU_PRODUCT, [bias, left, right, *flags]).output()
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
    """What is left to do with gelu of `x` for the result, in order: reshapes, and a cast at the end, which
    says what the dtype is in other calls."""
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
