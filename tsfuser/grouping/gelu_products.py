"""Products of matrices whose library applies gelu, in its tanh form, as it multiplies.

A product stores its result, which a gelu that nothing else is fused with reads, and stores once more.
cuBLASLt adds a bias on its way, and applies this gelu as well. Before, perhaps with gelu written out:

    %p = aten::linear(%x, %w, %b);  %y = aten::gelu(%p, "tanh")
becomes
    %ok = tsfuser::takes_gelu(%b, %x, %w, True)
    %y = prim::If(%ok) block0: tsfuser::gelu_product(%b, %x, %w, True)  block1: as before

In: a graph with groups that have no guards yet, and are final otherwise. Out: the same graph without such
gelus outside of groups, and without groups that compute nothing but one, after the bias. Calls with other
dtypes than the one that was profiled compute what the program says; where dtypes are known, there is no
check. A product that anything else reads, as the backward of gelu does, stays: it has to be in memory.

The gelu of cuBLASLt has an absolute error of 5e-6, so it is taken for 16 bits only. Its relu is not taken:
some of its kernels make 0 of NaN (seen on an H100)."""

from __future__ import annotations

import torch

from ..graph.effects import Effects
from ..graph.wrapper import (
    CONSTANT,
    GROUP,
    Graph,
    Node,
    Value,
    constant_before,
    constant_near,
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
from .gelu_forms import is_gelu, is_reshape
from .lone_biases import BIASED, PRODUCT, sum_in

GELU_PRODUCT, CHECK = "tsfuser::gelu_product", "tsfuser::takes_gelu"
REASON = "a matrix product is left to torch's libraries, which apply gelu on their way"
DTYPES = ("bfloat16", "float16")
LINEAR = "aten::linear"  # its right operand is transposed
#: Kind -> the positions of the bias and of both operands.
PRODUCTS = {LINEAR: (2, 0, 1), "aten::addmm": (0, 1, 2), BIASED: (0, 1, 2)}
#: What has the same answer for gelu of a product.
_QUESTIONS = ("aten::size", "aten::dim", "prim::dtype", "prim::device")


def gelu_behind(product: Node, effects: Effects) -> Node | None:
    """What computes gelu of the product, if that is all that is made of it: a node, or a group, which may add
    a row to the product first. None where there is no such thing."""
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
    fits = len(dtypes) == 1 and dtypes <= {*DTYPES}
    return reader if fits and is_gelu(result, x) else None


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


def apply_gelu(graph: Graph, product: Node, result: Value, checked: bool) -> tuple[Node, list[Value]]:
    """Has the product, which adds its bias, apply gelu, and returns what does both, and the values that are
    read now; `checked`: only in calls with the dtype of this one. `result` is what gelu gives, in the graph.
    What computed it is left as dead code."""
    both = _made(graph, product)
    made, instead = (both, both) if not checked else _in_calls_that_fit(graph, both, product, result)
    read = [made, instead]
    for reshape in _reshapes(result, product.output()):
        copy = insert(graph, result.node(), reshape.kind(), [made, *inputs(reshape)[1:]])
        copy.output().setType(reshape.output().type().with_dtype(product.output().type().dtype()))
        made = copy.output()
        read.append(made)
    result.replaceAllUsesWith(made)
    for use in list(product.output().uses()):
        if use.user.kind() in _QUESTIONS:
            use.user.replaceInput(use.offset, instead)
    return both.node(), read


def is_checked(node: Node) -> bool:
    """Whether the node is an If between gelu of a product and what it stands for."""
    return node.kind() == "prim::If" and node.inputsAt(0).node().kind() == CHECK


def _operands(product: Node) -> list[Value]:
    return [product.inputsAt(i) for i in PRODUCTS[product.kind()]]


def _made(graph: Graph, product: Node) -> Value:
    """Gelu of the product, made before it."""
    transposed = constant_before(graph, product, product.kind() == LINEAR)
    made = insert(graph, product, GELU_PRODUCT, [*_operands(product), transposed]).output()
    made.setType(product.output().type())
    return made


def _in_calls_that_fit(graph: Graph, made: Value, product: Node, result: Value) -> list[Value]:
    """Gelu of the product, and what has its sizes and its dtype: both are `made` in calls with the profiled
    dtype, else what the program computes, and the product."""
    dtype = product.output().type().dtype()
    is_bfloat16 = constant_before(graph, product, dtype == torch.bfloat16)
    check = insert(graph, product, CHECK, [*_operands(product), is_bfloat16])
    check.output().setType(torch._C.BoolType.get())
    choice = insert(graph, product, "prim::If", [check.output()], 2)
    together, apart = choice.addBlock(), choice.addBlock()
    made.node().moveBefore(together.returnNode())
    copies: dict[int, Value] = {}
    _copy(graph, product.output(), choice, apart.returnNode(), copies, product)
    other = _copy(graph, result, choice, apart.returnNode(), copies, product)
    for inner, unfused in ((made, other), (made, copies[product.output().unique()])):
        together.registerOutput(inner)
        apart.registerOutput(unfused)
    for outer in outputs(choice):
        outer.setType(made.type())
    return outputs(choice)


def _copy(
    graph: Graph, value: Value, outside: Node, inside: Node, copies: dict[int, Value], product: Node
) -> Value:
    """`value`, but for reshapes, computed anew from the operands of the product before `inside`; constants
    stand before `outside`."""
    node, key = value.node(), value.unique()
    if key in copies:
        return copies[key]
    if node.kind() == CONSTANT:
        made = constant_near(graph, outside, value)
    elif is_reshape(node):
        made = _copy(graph, node.inputsAt(0), outside, inside, copies, product)
    else:
        if node != product:
            for v in inputs(node):
                _copy(graph, v, outside, inside, copies, product)
        made = graph.createClone(node, lambda v: copies.get(v.unique(), v)).insertBefore(inside).output()
        if is_tensor(value):
            made.setType(torch._C.TensorType.get())
    copies[key] = made
    return made


def _reshapes(value: Value, x: Value) -> list[Node]:
    """The reshapes between `x` and `value`, in order."""
    way = _way(value, x)
    assert way is not None, "the result is computed from the product"
    return [node for node in way if is_reshape(node)]


def _way(value: Value, x: Value) -> list[Node] | None:
    """The nodes between `x` and `value`, in order, on one of the ways from the one to the other."""
    if value.unique() == x.unique():
        return []
    for operand in inputs(value.node()):
        found = _way(operand, x) if is_tensor(operand) and not is_constant(operand) else None
        if found is not None:
            return [*found, value.node()]
    return None
