"""Biases that nothing is fused with go back to the product of matrices that they are added to.

Torch takes `aten::addmm` apart before it profiles, which lets a group add the bias. Where no group has more
to do there, a kernel reads and writes the product once more, while the library that multiplies adds a bias
on its way, as in eager. Before, where the group casts %b and adds it to %p, no more:

    %p = aten::mm(%x, %w);  %s = prim::CudaFusionGroup(%b, %p)
becomes
    %c = aten::to(%b, 15);  %s = tsfuser::biased_product(%c, %x, %w)

In: a graph with groups that have no guards yet, and are final otherwise. Out: the same graph without those
groups, and without such additions outside of groups. The op multiplies and adds one after the other where
%c is no row of the product's dtype."""

from __future__ import annotations

import torch

from ..graph.effects import Effects
from ..graph.rows import is_cast
from ..graph.wrapper import (
    CONSTANT,
    GROUP,
    LIST,
    Graph,
    Node,
    Value,
    constant_before,
    constant_of,
    facts,
    graph_inputs,
    ids,
    inputs,
    insert,
    is_constant,
    is_tensor,
)

PRODUCT, ADD, BIASED = "aten::mm", "aten::add", "tsfuser::biased_product"
REASON = "it adds a bias to a product of matrices, which the library does as it multiplies"
PRODUCT_REASON = "a matrix product is left to torch's libraries, which add this bias on their way"


def reader_of(product: Node, effects: Effects) -> Node | None:
    """What adds a bias to the product, and is all that reads it: an addition, or a group that computes
    nothing else; None where there is no such node. In the same block: in a loop it would multiply anew."""
    readers = [use.user for use in product.output().uses() if use.user.kind() != "aten::size"]
    if len(readers) != 1 or any(map(effects.is_written, [*inputs(product), product.output()])):
        return None
    (reader,) = readers
    if reader.owningBlock() != product.owningBlock():
        return None
    if reader.kind() == ADD:
        return reader if _adds_row(reader, product.output()) else None
    if reader.kind() != GROUP or reader.outputsSize() != 1:
        return None
    *casts, last = [node for node in reader.g("Subgraph").nodes() if node.kind() != CONSTANT]
    return reader if sum_in(reader, product) == last and all(map(is_cast, casts)) else None


def sum_in(group: Node, product: Node) -> Node | None:
    """The node of the group that adds a row to the product, where nothing else in it reads the product."""
    subgraph = group.g("Subgraph")
    inner = graph_inputs(subgraph)[ids(inputs(group)).index(product.output().unique())]
    users = [use.user for use in inner.uses()]
    return users[0] if len(users) == 1 and users[0].kind() == ADD and _adds_row(users[0], inner) else None


def _adds_row(add: Node, product: Value) -> bool:
    """Whether the node adds a row of the product's dtype to it, once."""
    first, second, times = inputs(add)
    if not (is_tensor(first) and is_tensor(second) and is_constant(times)) or constant_of(times) != 1:
        return False
    mine = [v for v in (first, second) if v.unique() == product.unique()]
    (dtype, _, rank), wanted = facts((second if mine == [first] else first).type()), facts(product.type())
    same = dtype is not None and dtype == wanted.dtype == facts(add.output().type()).dtype
    return len(mine) == 1 and rank == 1 and same


def add_in_product(graph: Graph, product: Node) -> Value:
    """Has the product add the bias that its only reader adds, outside of groups; returns the sum."""
    (add,) = (use.user for use in product.output().uses() if use.user.kind() == ADD)
    (bias,) = (v for v in inputs(add)[:2] if v.unique() != product.output().unique())
    made = insert(graph, add, BIASED, [bias, *inputs(product)]).output()
    made.setType(add.output().type())
    made.copyMetadata(add.output())
    add.output().replaceAllUsesWith(made)
    add.destroy()
    for use in list(product.output().uses()):
        _answer(graph, use.user, product)
    product.destroy()
    return made


def _answer(graph: Graph, question: Node, product: Node) -> None:
    """Replaces a question for the sizes of the product, or for one of them, by one for its operands'."""
    with_dims = []
    for operand, dim in zip(inputs(product), (0, 1)):
        number = constant_before(graph, question, dim)
        size = insert(graph, question, "aten::size", [operand, number]).output()
        size.setType(torch._C.IntType.get())
        with_dims.append(size)
    sizes = insert(graph, question, LIST, with_dims).output()
    sizes.setType(torch._C.ListType(torch._C.IntType.get()))
    if question.inputsSize() == 2:
        sizes = insert(graph, question, "aten::__getitem__", [sizes, question.inputsAt(1)]).output()
        sizes.setType(torch._C.IntType.get())
    question.output().replaceAllUsesWith(sizes)
    question.destroy()
