"""The backward computes again what costs less to compute than to keep.

In: `SavedValues`, of a differentiable graph. Out: the same with a backward that needs fewer of the values
that are kept, and which it does not. These are elementwise results of values that are kept anyway: the
forward does not write them, the backward does not read them, and where it is fused computing them takes next
to no time. Example, for `r = rsqrt(mean(x * x) + eps); y = x * r * w`, of which autodiff keeps x, r, w and
x * r:

    forward  %n = aten::mul(%x, %r);  ... return (%y, %x, %r, %w, %n)
    backward(%grad, %x, %r, %w, %n):  ... aten::mul(%grad, %n)
becomes
    forward  %n = aten::mul(%x, %r);  ... return (%y, %x, %r, %w)
    backward(%grad, %x, %r, %w):  %m = aten::mul(%x, %r) ... aten::mul(%grad, %m)

What is computed again may take several ops, and the forward keeps the narrow operand of a cast to float32
rather than the cast, where nothing that is fused has made that operand, so that it is in memory as it is:
`silu(linear(x))` under autocast, of which autodiff keeps float32 copies.

A kept value also has a gradient of its own, which double backward makes; for one that is dropped there is
none (`prim::AutogradZero`): what would have come through it comes through those that it is computed of.
Inputs of the forward that are not kept stay so: the program may write to them before the backward. An
exception is what the program itself has made and does not change, such as the result of a convolution: if the
forward would keep a float32 copy of it, it keeps the tensor of 16 bits instead. Masks and all else that jumps
are kept: a group computes with more digits than it stores, so that the backward could take another branch
than the forward did.
"""

from __future__ import annotations

from collections.abc import Collection

from ....graph.effects import may_return_operand
from ....graph.rows import row_of
from ....graph.wrapper import (
    CONSTANT,
    Graph,
    Node,
    Value,
    graph_inputs,
    graph_outputs,
    inputs,
    is_tensor,
    nodes_in,
    outputs,
    schema,
    use_count,
)
from ....ir.dtypes import DTYPES
from ....ops import table
from .saved import SavedValues, is_of_an_input, source

STEPS = 8  # ops at most that a value is computed again by
_WIDEN = "aten::_autocast_to_full_precision"
LEAVES = 3  # tensors at most that these read
# dtypes of numbers with fractions
_FRACTIONAL = frozenset(table.scalar_type_code(DTYPES[name]) for name in (*table.FLOATING, *table.COMPLEX))


def compute_again(saved: SavedValues, own: Collection[int] = ()) -> set[int]:
    """Has the backward compute what it can; the outputs of the forward that it needs no more. `own`: inputs
    of the forward that are in the backward what they were."""
    given = graph_inputs(saved.forward)
    stays_same = {given[i].debugName() for i in own}
    known = {value.debugName(): argument for value, argument in saved.of_inputs()}
    places_of: dict[str, list[tuple[int, Value]]] = {}
    for j, value, argument in saved.of_outputs():
        places_of.setdefault(value.debugName(), []).append((j, argument))
    # Autodiff keeps some inputs that no formula reads, as that of `to`. To read one here would forbid the
    # program to write to it before the backward.
    known.update(
        (v.debugName(), argument)
        for v in given
        for _, argument in places_of.get(v.debugName(), [])[:1]
        if use_count(argument)
    )
    returned = {v.debugName() for v in graph_outputs(saved.forward)[: saved.real]}
    first = nodes_in(saved.backward)[0]
    dropped: set[int] = set()
    for node in nodes_in(saved.forward):
        for value in outputs(node):
            places = places_of.get(value.debugName(), [])
            if not places:
                continue
            # what has a gradient has fractions
            fractional = not _has_dtype_of_another(node) or all(j in saved.gradients for j, _ in places)
            in_memory = value.debugName() in returned or not is_read_by_groups(value)
            stays = (
                in_memory or not fractional or not all(is_read_by_groups(argument) for _, argument in places)
            )
            narrow = None if stays else _narrow_operand(node, returned, stays_same)
            if narrow is not None and narrow.debugName() not in known and narrow.debugName() not in places_of:
                known[narrow.debugName()] = places[0][1]
                again = known[value.debugName()] = _keep_instead(saved, node, *places.pop(0), first)
            elif stays or not _is_computable(node, known, [STEPS], set()):
                if use_count(places[0][1]) or not is_of_an_input(value):
                    known[value.debugName()] = places[0][1]
                continue
            else:
                again = computed(node, saved.backward, first, known)
            for j, argument in places:
                argument.replaceAllUsesWith(again)
                dropped.add(j)
    return dropped


def _is_computable(node: Node, known: dict[str, Value], steps: list[int], leaves: set[str]) -> bool:
    """Whether a few elementwise ops compute the node's result of what is known, which is little to read."""
    steps[0] -= 1
    if steps[0] < 0 or not is_elementwise(node):
        return False
    for v in inputs(node):
        if v.debugName() in known:
            leaves.update([v.debugName()] if is_tensor(v) else [])
        elif v.node().kind() != CONSTANT and (
            _has_dtype_of_another(v.node()) or not _is_computable(v.node(), known, steps, leaves)
        ):
            return False
    return len(leaves) <= LEAVES


def _narrow_operand(node: Node, returned: set[str], own: set[str]) -> Value | None:
    """What the node casts to float32 for autocast, where that may be kept instead."""
    if node.kind() != _WIDEN:
        return None
    operand = node.inputsAt(0)
    return operand if has_own_memory(operand, returned, own) else None


def has_own_memory(value: Value, returned: set[str], own: set[str]) -> bool:
    """Whether the value is in memory as it is, which nothing writes to: what an op that is not fused has
    made, and nobody else has, or one of the inputs `own`. Autocast's casts to float32 are of 16 bits."""
    if source(value).debugName() in own:
        return True
    maker = value.node()
    if (
        not maker.kind().startswith("aten::")
        or row_of(maker) is not None
        or may_return_operand(maker)
        or value.debugName() in returned
    ):
        return False
    return not any(may_return_operand(use.user) and use.user.kind() != _WIDEN for use in value.uses())


def _keep_instead(saved: SavedValues, cast: Node, j: int, argument: Value, first: Node) -> Value:
    """Has output `j` of the forward, for which `argument` stands in the backward, be the operand of `cast`;
    the cast in the backward."""
    backward, operand = saved.backward, cast.inputsAt(0)
    again = computed(cast, backward, first, {operand.debugName(): argument})
    argument.replaceAllUsesWith(again)
    again.node().replaceInput(0, argument)
    saved.forward.return_node().replaceInput(j, operand)
    if j in saved.gradients:  # which comes in the narrow dtype now, if it does
        gradient = graph_inputs(backward)[list(saved.gradients).index(j)]
        wide = backward.create("prim::GradOf", [], 1)
        wide.s_("name", cast.kind())
        wide.insertBefore(first)
        gradient.replaceAllUsesWith(wide.output())
        wide.addInput(gradient)
        block = wide.addBlock()
        made = backward.createClone(
            again.node(), lambda v: gradient if v.debugName() == argument.debugName() else v
        )
        made.insertBefore(block.returnNode())
        block.registerOutput(made.output())
    return again


def is_read_by_groups(value: Value) -> bool:
    """Whether the value, and all views of it, are read by ops that can be in a group with what computes it;
    others, such as a product of matrices, have it in memory."""
    return all(_is_read_in_group(use.user) for use in value.uses())


def _is_read_in_group(node: Node) -> bool:
    found = row_of(node)
    if found is None:  # a graph's end says what is kept; others ask what is known without the elements
        return node.kind() in ("prim::Return", "prim::dtype", "aten::size")
    return not found[0].is_view or all(is_read_by_groups(v) for v in outputs(node))


def is_elementwise(node: Node) -> bool:
    """Whether the op may be computed again: it gives the same result, and costs next to nothing where it is
    fused."""
    if node.outputsSize() != 1 or not is_tensor(node.output()):
        return False
    found, row = schema(node), row_of(node)
    if row is None or not row[0].smooth or "rounding_mode" in found.arguments:
        return False
    return "dtype" not in found.arguments or not _may_be_whole(node.inputsAt(found.arguments.index("dtype")))


def _has_dtype_of_another(node: Node) -> bool:
    """Whether the op casts to the dtype of a tensor, which may be one of integers."""
    found = row_of(node)
    return found is not None and bool(found[0].dtype_from)


def _may_be_whole(dtype: Value) -> bool:
    """Whether `dtype`, an operand, may be one of integers or bool."""
    if dtype.node().kind() != CONSTANT:
        return True
    return dtype.type().kind() != "NoneType" and dtype.toIValue() not in _FRACTIONAL


def computed(node: Node, backward: Graph, first: Node, known: dict[str, Value]) -> Value:
    """The result of `node`, of the forward, computed at the beginning of the backward, before `first`."""
    for v in inputs(node):
        if v.debugName() not in known:
            known[v.debugName()] = computed(v.node(), backward, first, known)
    copy = backward.createClone(node, lambda v: known[v.debugName()])
    copy.insertBefore(first)
    return copy.output()
