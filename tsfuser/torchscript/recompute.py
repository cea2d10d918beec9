"""The backward computes again what costs less to compute than to keep.

In: `Kept`, of a differentiable graph. Out: the same with a backward that needs fewer of the values that are kept, and which it does not. These are
elementwise results of values that are kept anyway: the forward does not write
them, the backward does not read them, and where it is fused computing them takes next to no time. Example, for
`r = rsqrt(mean(x * x) + eps); y = x * r * w`, of which autodiff keeps x, r, w and x * r:

    forward  %n = aten::mul(%x, %r);  ... return (%y, %x, %r, %w, %n)     becomes  ... return (%y, %x, %r, %w)
    backward(%grad, %x, %r, %w, %n): ... aten::mul(%grad, %n)         becomes  (%grad, %x, %r, %w): %m = aten::mul(%x, %r) ... aten::mul(%grad, %m)

A kept value also has a gradient of its own, which double backward makes; for one that is dropped there is none (`prim::AutogradZero`): what would
have come through it comes through those that it is computed of. Inputs of the forward that are not kept stay so: the program may write to them
before the backward. So do masks and all else that jumps: a group computes with more digits than it stores, so that the backward could take another
branch than the forward did.
"""

from __future__ import annotations

from ..ir.dtypes import DTYPES
from ..ops import table
from .graph import CONSTANT, Graph, Node, Value, inputs, is_tensor, schema
from .kept import Kept
from .partition import row_of

#: Families of ops each of whose elements follows from elements of the operands, always in the same way.
ELEMENTWISE = frozenset(("activations", "arithmetic", "casts", "elementwise", "pointwise", "selection"))
#: Those whose results jump where an operand hardly moves. Casts to integers and divisions that are rounded do, too.
JUMPS = frozenset(
    f"aten::{name}"
    for name in """
        eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isposinf isneginf signbit
        bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
        sign sgn copysign heaviside ceil floor round trunc frac floor_divide remainder fmod nextafter threshold hardshrink
    """.split()
)
_FRACTIONAL = frozenset(table.scalar_type_code(DTYPES[name]) for name in (*table.FLOATING, *table.COMPLEX))  # dtypes of numbers with fractions


def compute_again(kept: Kept) -> "set[int]":
    """Has the backward compute what it can; the outputs of the forward that it needs no more."""
    known = {value.debugName(): argument for value, argument in kept.of_inputs()}
    saved: "dict[str, list[tuple[int, Value]]]" = {}
    for j, value, argument in kept.of_outputs():
        saved.setdefault(value.debugName(), []).append((j, argument))
    known.update((v.debugName(), saved[v.debugName()][0][1]) for v in kept.forward.inputs() if v.debugName() in saved)
    returned = {v.debugName() for v in list(kept.forward.outputs())[: kept.real]}  # in memory anyway
    first = next(iter(kept.backward.nodes()))
    dropped: "set[int]" = set()
    for node in kept.forward.nodes():
        for value in node.outputs():
            places = saved.get(value.debugName(), [])
            if not places:
                continue
            fractional = not _follows_another(node) or all(j in kept.gradients for j, _ in places)  # what has a gradient has fractions
            able = fractional and _is_elementwise(node) and all(v.debugName() in known or v.node().kind() == CONSTANT for v in inputs(node))
            if value.debugName() in returned or not able or not all(_is_read_by_groups(argument) for _, argument in places):
                known[value.debugName()] = places[0][1]
                continue
            again = known[value.debugName()] = _again(node, kept.backward, first, known)
            for j, argument in places:
                argument.replaceAllUsesWith(again)
                dropped.add(j)
    return dropped


def _is_read_by_groups(argument: Value) -> bool:
    """Whether ops read an input of the backward that can be in a group with what computes it; others, such as a convolution's, would have it in
    memory again."""
    return all(row_of(use.user) is not None for use in argument.uses())


def _is_elementwise(node: Node) -> bool:
    """Whether the op may be computed again: it gives the same result, and costs next to nothing where it is fused."""
    if node.outputsSize() != 1 or not is_tensor(node.output()) or node.kind() in JUMPS:
        return False
    found, row = schema(node), row_of(node)
    if row is None or row[0].family not in ELEMENTWISE or "rounding_mode" in found.arguments:
        return False
    return "dtype" not in found.arguments or not _may_be_whole(node.inputsAt(found.arguments.index("dtype")))


def _follows_another(node: Node) -> bool:
    """Whether the op casts to the dtype of a tensor, which may be one of integers."""
    return node.kind() == "aten::type_as" or (node.kind() == "aten::to" and "other" in schema(node).arguments)


def _may_be_whole(dtype: Value) -> bool:
    """Whether `dtype`, an operand, may be one of integers or bool."""
    if dtype.node().kind() != CONSTANT:
        return True
    return dtype.type().kind() != "NoneType" and dtype.toIValue() not in _FRACTIONAL


def _again(node: Node, backward: Graph, first: Node, known: "dict[str, Value]") -> Value:
    """The result of `node`, of the forward, computed at the beginning of the backward, before `first`."""
    for v in inputs(node):
        if v.debugName() not in known:
            known[v.debugName()] = _again(v.node(), backward, first, known)
    copy = backward.createClone(node, lambda v: known[v.debugName()])
    copy.insertBefore(first)
    return copy.output()
