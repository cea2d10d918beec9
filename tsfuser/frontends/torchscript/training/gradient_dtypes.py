"""Gradients in the dtype of what they are the gradients of.

Eager's engine casts each gradient to the dtype of the result that it is for. Autodiff's formulas hand a
gradient on as it comes: of `torch.mm(x, w) * c`, of halves x and w and a float c, the product gets a gradient
of floats, and `mm` of this and a half raises. So the backward of such an op casts its gradient first. Before:

    %grad_x = prim::GradOf[name="aten::mm"](%g) block0: ... AD_mm_backward_self(%g, %w)

after:

    %grad_x = prim::GradOf[name="aten::mm"](%g) block0:
        %d = aten::type_as(%g, %w);  ... AD_mm_backward_self(%d, %w)

The engine casts what the backward gives in the same way, by a kernel that reads it once more. What is given
for an input of 16 bits is cast in the backward's group, which computes it. Of `x + y`, of floats x and halves
y, before and after:

    return (%g, %g)
    %d = prim::GradOf[name="aten::type_as"](%g) block0: aten::type_as(%g, %like_y);  return (%g, %d)

In: `SavedValues` of a differentiable graph. Out: its backward, changed in place. There is no cast where the
gradient surely has the dtype already, whatever the dtypes of a call: the engine casts the gradients that the
backward gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....graph.rows import row_of
from ....graph.wrapper import (
    Block,
    Node,
    Value,
    all_nodes,
    blocks,
    graph_inputs,
    graph_outputs,
    inputs,
    insert,
    is_tensor,
    nodes_in,
    nodes_of,
)
from ....ops import table, without_row
from .saved import SavedValues
from .stand_ins import saved_small

CAST = "aten::type_as"

#: Ops whose derivative needs a gradient of the result's dtype, and those whose derivative casts what it gets.
_STRICT = table.kinds_with_gradient("strict") | without_row.STRICT_GRADIENT
_CASTS = table.kinds_with_gradient("cast") | without_row.CAST_GRADIENT


def cast_gradients(saved: SavedValues) -> None:
    """Inserts the casts."""
    passing = _passing_kinds(saved)
    kept = {argument.unique() for _, argument in saved.of_inputs()}
    kept |= {argument.unique() for _, _, argument in saved.of_outputs()}
    for node in nodes_of(saved.backward, ("prim::GradOf",)):
        if node.inputsSize() != 1 or not _is_strict(node):
            continue
        (block,) = blocks(node)
        gradient = node.inputsAt(0)
        like = next((value for value in _read(block) if value.unique() in kept), None)
        if like is not None and not _has_dtype(gradient, passing):
            _cast(saved, block, gradient, like)


def cast_results(saved: SavedValues, narrow: Sequence[int]) -> SavedValues:
    """Casts what the backward gives to the dtypes of the inputs `narrow`, numbers by result, -1 where there
    is nothing to do. Returns what is saved then, of the inputs small stand-ins."""
    passing, given = _passing_kinds(saved), graph_inputs(saved.forward)
    for end in {result.node() for result in graph_outputs(saved.backward)}:
        if end.kind() != "prim::TupleConstruct" or end.inputsSize() != len(narrow):
            continue
        for k, (gradient, number) in enumerate(zip(inputs(end), narrow)):
            if number < 0 or not is_tensor(given[number]) or not is_tensor(gradient):
                continue
            if _has_dtype(gradient, passing):
                continue
            saved, like = saved_small(saved, given[number])
            whole = insert(saved.backward, end, "prim::GradOf", [gradient])
            whole.s_("name", CAST)
            block = whole.addBlock()
            block.registerOutput(block.addNode(CAST, [gradient, like]).output())
            end.replaceInput(k, whole.output())
    return saved


def _passing_kinds(saved: SavedValues) -> set[str]:
    """The kinds of ops that give their one tensor operand's dtype in all places of the forward."""
    passing, other = {"prim::profile"}, set[str]()
    for node in nodes_in(saved.forward):
        found = row_of(node)
        single = sum(is_tensor(value) for value in inputs(node)) == 1
        keeps = found is not None and (found[0].keeps_dtype or found[0].is_view)
        (passing if single and keeps else other).add(node.kind())
    return passing - other


def _has_dtype(gradient: Value, passing: set[str]) -> bool:
    """Whether the gradient surely has the dtype of what it is the gradient of."""
    node = gradient.node()
    if node.kind() == "prim::Param":
        return True
    if node.kind() == "prim::AutogradAdd":
        return all(_has_dtype(part, passing) for part in inputs(node))
    if node.kind() != "prim::GradOf":
        return False
    name = node.s("name")
    if name in _CASTS or _is_strict(node):
        return True
    if _is_of_an_index(node):
        return _has_dtype(node.inputsAt(0), passing)
    plain = name.replace("tsfuser::", "aten::")  # a view's twin stands for it
    return (name in passing or plain in passing) and _has_dtype(node.inputsAt(0), passing)


def _is_strict(node: Node) -> bool:
    return node.s("name") in _STRICT and not _is_of_an_index(node)


def _is_of_an_index(node: Node) -> bool:
    """Whether it is the derivative of `x[index]`, which shares a name with norms and takes any dtype."""
    return bool(nodes_of(blocks(node)[0], ("tsfuser::index_backward",)))


def _read(block: Block) -> Iterator[Value]:
    """The tensors that the ops of the block read, but for what is only asked for its dtype, or whether it is
    there."""
    for node in nodes_in(block):
        if node.kind() not in ("prim::dtype", "aten::__is__", "aten::__isnot__"):
            yield from (value for value in inputs(node) if is_tensor(value))


def _cast(saved: SavedValues, block: Block, gradient: Value, like: Value) -> None:
    """Has the block read the gradient in the dtype of `like`."""
    first = nodes_in(block)[0]
    cast = saved.backward.create(CAST, [gradient, like], 1)
    cast.insertBefore(first)
    for node in all_nodes(block):
        for k, value in enumerate(inputs(node)):
            if value.unique() == gradient.unique() and node != cast:
                node.replaceInput(k, cast.output())
