"""Autodiff's formulas, put right where they are wrong, or ask for more than they need.

In: `SavedValues`, of a differentiable graph. Out: its backward, changed in place; `cast_first` also changes
the forward, and what is kept. The steps:

  - choose_gradients: the gradient of `where(c, x, y)` is `grad * c.type_as(grad)`: NaN where `grad` is
    infinite and y was chosen. It becomes `where(c, grad, 0)`, as in eager.
  - share_ties: the gradient of `max(x, y)` is none for both where they are equal. Each gets half of it, as in
    eager; `min` likewise.
  - ask_derivatives: the gradient of `threshold(x, t, v)` passes where x is t, that of `hardtanh` where x is a
    bound; that of `relu` does not pass where x is NaN; those of `relu`, `hardshrink` and `hardswish` are NaN
    where `grad` is infinite and does not pass; that of `leaky_relu` rounds the slope to float32. Eager's
    derivatives are asked instead.
  - choose_inside: the gradient of `clamp(x, a, b)` is `grad * (a <= x <= b)`: NaN where `grad` is infinite
    and x outside. It becomes `where(a <= x <= b, grad, 0)`, as in eager.
  - leave_zero_bases: the gradient of an exponent, `grad * base ** x * log(base)`, is NaN or infinite where
    the base is 0. Where x is not negative, either, it becomes 0, as in eager.
  - multiply_as_eager: the gradients of `rsqrt`, `reciprocal` and of a divisor multiply in eager's order,
    which decides what overflows.
  - read_rows: the gradient of `linear`'s weight reads matrices, `x.reshape(-1, n)`, which raises where n
    is 0. They become `tsfuser::rows`.
  - multiply_at_once: the gradients of `matmul` are functions with a branch for each number of dims. They
    become one op each, as do those of `mm` and `bmm`. Its result has the layout of the operand whose gradient
    it is, where both operands get one and the program cannot tell.
  - cast_first: the gradient of `softmax(x, dim, dtype)` is asked for in the dtype of x. For that torch's op
    raises, or gives one in the dtype of the result. The forward becomes `softmax(x.to(dtype), dim)`, which is
    what eager computes.
  - cast_in_place: the gradient of a cast goes to the device and the dtype that the operand had. Where the
    forward names no device, it is that of the gradient, and what is left, a cast, can be fused.
  - read_dtypes_elsewhere: softmax and casts to another tensor's dtype keep their operand for its dtype alone.
    Another value that is kept and has that dtype, as the result of a softmax has, is asked instead.
  - invert_orders: the gradient of `permute` is permuted back, by an order that a loop writes into a list. The
    order becomes a constant, where that of the forward is one, or an op.
  - leave_dividends: the gradient of a rounded quotient is zeros like the dividend. They become zeros like the
    gradient, summed to the dividend's sizes, so that the dividend is not kept.
  - leave_biases: of a norm's bias the derivative only asks for the sizes and the dtype, which the weight has.
  - hand_gradients_on: a `prim::GradOf` that hands its gradient on, as of `prim::profile`, goes. Torch makes a
    branch of it where the gradient may be undefined, as that of a `Tensor?`, and an `IfThenElse` of an empty
    branch, which has no overload for its condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....graph.matmul_operands import BACKWARD_OTHER, BACKWARD_SELF, LINEAR
from ....graph.rows import row_of
from ....graph.wrapper import (
    CONSTANT,
    Block,
    Graph,
    Node,
    Value,
    all_blocks,
    all_nodes_of,
    blocks,
    constant_before,
    constant_of,
    graph_outputs,
    inputs,
    insert,
    is_constant,
    is_tensor,
    nodes_in,
    nodes_of,
    outputs,
    schema,
    use_count,
)
from ....ops import table, unsupported
from .saved import SavedValues, asks_for_dtype

#: Ops whose last operand may be a dtype -> their derivatives, whose operand 1 is the result, and 3 a dtype.
SOFTMAX = {
    "aten::softmax": "aten::_softmax_backward_data",
    "aten::log_softmax": "aten::_log_softmax_backward_data",
}

#: comparison of autodiff's formula -> the op, and the comparison by which an operand loses
_EXTREMES = {"aten::gt": ("aten::max", "aten::lt"), "aten::lt": ("aten::min", "aten::gt")}
_COMPARES = ("aten::ge", "aten::gt", "aten::le", "aten::lt")

_HEAVY = frozenset(unsupported.heavy_kinds())
#: What formulas call for a product, and what may come behind it.
_PRODUCTS = frozenset(("aten::matmul", "aten::mm", "prim::CallFunction", BACKWARD_SELF, BACKWARD_OTHER))
_ON_TOP = ("aten::_grad_sum_to_size", "aten::mul")

#: What the gradient of a dividend is without rounding: of a tensor divided by a tensor, or by a number.
_QUOTIENTS = ("aten::_grad_sum_to_size", "aten::div")
#: Derivatives, and the places of the weight and the bias.
_PARAMETERS = (("tsfuser::group_norm_backward", 3, 4), ("tsfuser::instance_norm_backward", 2, 3))


def choose_gradients(saved: SavedValues) -> None:
    """Of `where` and `masked_fill`."""
    stands_for = _stands_for(saved)
    forward = saved.forward
    conditions = {node.inputsAt(0).debugName(): False for node in nodes_of(forward, ("aten::where",))}
    fills = nodes_of(forward, ("aten::masked_fill",))
    conditions |= {node.inputsAt(1).debugName(): True for node in fills}
    for node in _nodes(saved, "aten::mul") if conditions else ():
        _choose_gradient(saved, node, stands_for, conditions)


def share_ties(saved: SavedValues) -> None:
    """Of `max` and `min` of two tensors."""
    stands_for = _stands_for(saved)
    found = nodes_of(saved.forward, ("aten::max", "aten::min"))
    extremes = {(node.kind(), _names(inputs(node))) for node in found}
    for node in _nodes(saved, "aten::mul") if extremes else ():
        _share(saved, node, stands_for, extremes)


def ask_derivatives(saved: SavedValues) -> None:
    """Of `relu`, `threshold`, `hardtanh`, `hardshrink`, `hardswish` and `leaky_relu`."""
    for name, (derivative, *kinds) in table.derivatives().items():
        for node, block in _derivatives(saved, name):
            compares = nodes_of(block, _COMPARES)
            if compares:  # the first one is of the operand, or of the result
                numbers = [list(inputs(nodes_of(block, (kind,))[0]))[-1] for kind in kinds]
                operands = [node.inputsAt(0), compares[0].inputsAt(0), *numbers]
                # `self_is_result` of leaky_relu's: what it gets is the operand
                flags = [_constant(saved, node, False) for _ in _arguments(derivative)[len(operands) :]]
                give(saved, block, derivative, [*operands, *flags])


def _arguments(kind: str) -> list[torch._C.Argument]:
    """Of the op's plain overload."""
    schemas = torch._C._jit_get_schemas_for_operator(kind)
    return next(s.arguments for s in schemas if not s.overload_name)


def choose_inside(saved: SavedValues) -> None:
    """Of `clamp`."""
    for node, outer in _derivatives(saved, "aten::clamp"):
        for block in all_blocks(outer):
            for product in nodes_of(block, ("aten::mul",)):
                cast = product.inputsAt(1).node()
                if cast.kind() == "aten::type_as":
                    operands = [cast.inputsAt(0), node.inputsAt(0), _number(saved, product, 0)]
                    _replace(saved, product, "aten::where", operands)


def leave_zero_bases(saved: SavedValues) -> None:
    """Of `pow`: `grad * base ** x * log(base)` -> `grad * where(both, 0, base ** x * log(base))`, `both`:
    `x >= 0` and `base == 0`."""
    for _, block in _derivatives(saved, "aten::pow"):
        for product in nodes_of(block, ("aten::mul",)):
            scaled, logarithm = (v.node() for v in inputs(product))
            if logarithm.kind() != "aten::log" or scaled.kind() != "aten::mul":
                continue
            gradient, power = inputs(scaled)
            base, exponent = inputs(power.node())
            if is_constant(base) and constant_of(base) != 0:
                continue
            zero = _number(saved, product, 0)
            both = _insert(saved, product, "aten::ge", [exponent, zero])
            both = _insert(saved, product, "aten::mul", [both, _is_zero(saved, product, base)])
            both = both if is_tensor(base) else _insert(saved, product, "aten::gt", [both, zero])
            slope = _insert(saved, product, "aten::mul", [power, logarithm.output()])
            chosen = _insert(saved, product, "aten::where", [both, zero, slope])
            _replace(saved, product, "aten::mul", [gradient, chosen])


def multiply_as_eager(saved: SavedValues) -> None:
    """Of `rsqrt`: `grad * -0.5 * result ** 3`; of `reciprocal`: `-grad * (result * result)`; of the divisor:
    `-grad * (dividend / divisor / divisor)`."""
    for node, block in _derivatives(saved, "aten::rsqrt"):
        gradient, result, end = _factors(node, block)
        half = _insert(saved, end, "aten::div", [gradient, _number(saved, end, -2)])
        cube = _insert(saved, end, "aten::pow", [result, _number(saved, end, 3)])
        give(saved, block, "aten::mul", [half, cube])
    for node, block in _derivatives(saved, "aten::reciprocal"):
        gradient, result, end = _factors(node, block)
        negative = _insert(saved, end, "aten::neg", [gradient])
        square = _insert(saved, end, "aten::mul", [result, result])
        give(saved, block, "aten::mul", [negative, square])
    for _, outer in _derivatives(saved, "aten::div"):
        for block in all_blocks(outer):
            for quotient in nodes_of(block, ("aten::div",)):
                product, square = (v.node() for v in inputs(quotient)[:2])
                if product.kind() == square.kind() == "aten::mul":
                    negative, dividend = inputs(product)
                    once = _insert(saved, quotient, "aten::div", [dividend, square.inputsAt(0)])
                    twice = _insert(saved, quotient, "aten::div", [once, square.inputsAt(0)])
                    _replace(saved, quotient, "aten::mul", [negative, twice])


def read_rows(saved: SavedValues) -> None:
    """Of `linear`."""
    for _, block in _derivatives(saved, "aten::linear"):
        for node in nodes_of(block, ("aten::reshape",)):
            _replace(saved, node, "tsfuser::rows", [node.inputsAt(0)])


def multiply_at_once(saved: SavedValues) -> None:
    """Of `matmul`, `mm` and `bmm`. For example `AD_matmul_bw_size(grad, AD_mat_transpose(other), sizes)` ->
    `tsfuser::matmul_backward_self(grad, other, sizes, self, ...)`, and so for `other`."""

    def replace(derivative: Node, node: Node, kind: str, *operands: Value | None) -> None:
        """By an op of these operands; the last one is the tensor whose layout the result shall have."""
        gradients = outputs(derivative)  # one, or those of both operands
        also_batches = not _may_be_seen(gradients[0 if kind == BACKWARD_SELF else -1])
        if len(gradients) < 2 or not all(map(use_count, gradients)):  # it would be kept for that alone
            operands = (*operands[:-1], None)
        made = [v or _constant(saved, node, None) for v in operands]
        _replace(saved, node, kind, [*made, _constant(saved, node, also_batches)])

    for node, block in _derivatives(saved, "aten::matmul"):
        for product in _calls(block, "AD_matmul_bw_size"):
            left, right, sizes = inputs(product)[1:]
            like = sizes.node().inputsAt(0)
            if left.debugName() == node.inputsAt(0).debugName():
                replace(node, product, BACKWARD_SELF, left, right.node().inputsAt(1), sizes, like)
            else:
                replace(node, product, BACKWARD_OTHER, left.node().inputsAt(1), right, sizes, like)
    for name in ("mm", "bmm"):
        for node, block in _derivatives(saved, f"aten::{name}"):
            of_self, of_other = (_calls(block, f"AD_{name}_backward_{which}") for which in ("self", "mat2"))
            other = next((n.inputsAt(2) for n in of_self), None)
            operand = next((n.inputsAt(2) for n in of_other), None)
            for n in of_self:
                replace(node, n, BACKWARD_SELF, n.inputsAt(1), other, None, operand)
            for n in of_other:
                replace(node, n, BACKWARD_OTHER, operand, n.inputsAt(1), None, other)


def _may_be_seen(gradient: Value) -> bool:
    """Whether the program may get a gradient whose layout is that of this one. A product has a layout of its
    own; the gradient of what `addmm` adds to one has that of the product's gradient."""
    seen, pending = set[int](), [gradient]
    while pending:
        for use in pending.pop().uses():
            node = use.user
            while (around := node.owningBlock().owningNode()) is not None:
                node = around
            if node.kind() == "prim::Return":
                return True
            made = [v for k, v in enumerate(outputs(node)) if not _is_product(node, k)]
            pending += [v for v in made if v.unique() not in seen]
            seen.update(v.unique() for v in made)
    return False


def _is_product(derivative: Node, result: int) -> bool:
    """Whether the formula computes that gradient as a product of matrices, or sums up that of a bias."""
    if derivative.kind() != "prim::GradOf" or derivative.s("name") not in _HEAVY:
        return False
    if derivative.s("name") == LINEAR:  # whose bias has one dim
        return True
    node = list(blocks(derivative)[0].outputs())[result].node()
    while node.kind() in _ON_TOP:
        node = node.inputsAt(0).node()
    return node.kind() in _PRODUCTS


def cast_first(saved: SavedValues) -> SavedValues:
    """Of `softmax` and `log_softmax` with a dtype. `saved`, where the forward also keeps the operands'
    dtypes."""
    stands_for = _stands_for(saved)
    for name, kind in SOFTMAX.items():
        for whole, block in _derivatives(saved, name):
            for derivative in nodes_of(block, (kind,)):
                value = stands_for.get(derivative.inputsAt(1).debugName())
                if value is not None and value.node().kind() == name and _has_dtype(value.node()):
                    saved = _cast_first(saved, value.node(), whole, derivative)
    return saved


def _has_dtype(softmax: Node) -> bool:
    return softmax.inputsAt(2).type().kind() != "NoneType"


def _cast_first(saved: SavedValues, softmax: Node, whole: Node, derivative: Node) -> SavedValues:
    """Of one softmax, whose `derivative` stands in `whole`, a `prim::GradOf`."""
    forward, backward = saved.forward, saved.backward
    operand, dtype = softmax.inputsAt(0), softmax.inputsAt(2)
    no, nothing = constant_before(forward, softmax, False), constant_before(forward, softmax, None)
    dtype_of_operand = insert(forward, softmax, "prim::dtype", [operand]).output()
    dtype_of_operand.setType(torch._C.IntType.get())
    softmax.replaceInput(0, insert(forward, softmax, "aten::to", [operand, dtype, no, no]).output())
    softmax.replaceInput(2, nothing)
    saved, wanted = saved.keeping(dtype_of_operand)

    asked = derivative.inputsAt(3).node()
    has = _insert(saved, derivative, "prim::dtype", [derivative.inputsAt(1)])
    has.setType(torch._C.IntType.get())
    derivative.replaceInput(3, has)
    if asked.kind() == "prim::dtype" and not use_count(asked.output()):
        asked.destroy()
    gradient = whole.output()
    cast = backward.create("prim::GradOf", [gradient], 1)
    cast.s_("name", "aten::to")
    cast.insertAfter(whole)
    gradient.replaceAllUsesAfterNodeWith(cast, cast.output())
    block = cast.addBlock()
    end = block.returnNode()
    no, nothing = constant_before(backward, end, False), constant_before(backward, end, None)
    block.registerOutput(_insert(saved, end, "aten::to", [gradient, wanted, no, no, nothing]))
    return saved


def cast_in_place(saved: SavedValues) -> None:
    """Of casts."""
    stands_for = _stands_for(saved)
    if not any(_names_a_device(node) for node in nodes_in(saved.forward)):
        for node in _nodes(saved, "aten::to"):
            _cast(saved, node, stands_for)


def invert_orders(saved: SavedValues) -> None:
    """Of `permute`: `AD_permute_backward(grad, dims)` -> `permute(grad, inverse order)`."""
    for node in _calls(saved.backward, "AD_permute_backward"):
        gradient, dims = inputs(node)[1:]
        if is_constant(dims):
            inverse = _constant(saved, node, _inverse(constant_of(dims)))
        else:
            inverse = _insert(saved, node, "tsfuser::inverse_order", [dims])
            inverse.setType(dims.type())
        _replace(saved, node, "aten::permute", [gradient, inverse])


def leave_dividends(saved: SavedValues) -> None:
    """Of `div` with a rounding mode."""
    for node in _nodes(saved, "prim::If"):
        around = node.owningBlock().owningNode()
        if around is None or around.kind() != "prim::GradOf" or around.s("name") != "aten::div":
            continue
        rounded, other = ([v.node() for v in inputs(block.returnNode())] for block in reversed(blocks(node)))
        for zeros, quotient in zip(rounded, other):
            if zeros.kind() != "aten::zeros_like" or quotient.kind() not in _QUOTIENTS:
                continue
            zeros.replaceInput(0, around.inputsAt(0))
            if quotient.kind() == "aten::_grad_sum_to_size":
                summed = saved.backward.create(quotient.kind(), [zeros.output(), quotient.inputsAt(1)], 1)
                summed.insertAfter(zeros)
                zeros.output().replaceAllUsesAfterNodeWith(summed, summed.output())


def leave_biases(saved: SavedValues) -> None:
    """Of `group_norm` and `instance_norm`."""
    for kind, weight, bias in _PARAMETERS:
        for node in _nodes(saved, kind):
            if is_tensor(node.inputsAt(weight)) and is_tensor(node.inputsAt(bias)):
                node.replaceInput(bias, node.inputsAt(weight))


def give(saved: SavedValues, block: Block, kind: str, operands: Sequence[Value]) -> None:
    """Has the block give the result of an op, and nothing else stand in it."""
    end = block.returnNode()
    end.replaceInput(0, insert(saved.backward, end, kind, list(operands)).output())
    for node in reversed(nodes_in(block)):
        if not node.hasUses():
            node.destroy()


def _inverse(dims: tuple[int, ...]) -> list[int]:
    inverse = [0] * len(dims)
    for i, dim in enumerate(dims):
        inverse[dim] = i
    return inverse


def _stands_for(saved: SavedValues) -> dict[str, Value]:
    """Name in the backward -> the value of the forward that is kept."""
    values = {argument.debugName(): value for value, argument in saved.of_inputs()}
    values.update((argument.debugName(), value) for _, value, argument in saved.of_outputs())
    return values


def _derivatives(saved: SavedValues, name: str) -> list[tuple[Node, Block]]:
    """Where the backward has the derivative of an op, and the formula in it."""
    return [(node, blocks(node)[0]) for node in _nodes(saved, "prim::GradOf") if node.s("name") == name]


def _factors(node: Node, block: Block) -> tuple[Value, Value, Node]:
    """The gradient, the result that the formula multiplies it by, and the formula's end."""
    product = nodes_of(block, ("aten::mul",))[0]
    return node.inputsAt(0), product.inputsAt(1), block.returnNode()


def _is_zero(saved: SavedValues, place: Node, value: Value) -> Value:
    """Whether a tensor or number is 0: a tensor, or 0 or 1."""
    equal = _insert(saved, place, "aten::eq", [value, _number(saved, place, 0)])
    if is_tensor(value):
        return equal
    equal.setType(torch._C.BoolType.get())
    number = _insert(saved, place, "aten::Int", [equal])
    number.setType(torch._C.IntType.get())
    return number


def _calls(within: Graph | Block, function: str) -> list[Node]:
    """Where one of the functions is called that autodiff's formulas are written with."""
    calls = [(node, node.inputsAt(0).node()) for node in all_nodes_of(within, ("prim::CallFunction",))]
    return [node for node, of in calls if of.hasAttribute("name") and of.s("name") == function]


def _constant(saved: SavedValues, place: Node, value: object) -> Value:
    return constant_before(saved.backward, place, value)


def _nodes(saved: SavedValues, kind: str) -> list[Node]:
    return all_nodes_of(saved.backward, (kind,))


def _replace(saved: SavedValues, node: Node, kind: str, operands: list[Value]) -> None:
    new = saved.backward.create(kind, operands, 1)
    new.copyMetadata(node)
    new.insertBefore(node)
    new.output().setType(node.output().type())
    node.output().replaceAllUsesWith(new.output())
    node.destroy()


def _choose_gradient(
    saved: SavedValues, node: Node, stands_for: dict[str, Value], conditions: dict[str, bool]
) -> None:
    """`grad * c.type_as(grad)` -> `where(c, grad, 0)`; with `c.bitwise_not()` the other way round, or
    `grad.masked_fill(c, 0)`, which is row-major."""
    for gradient, mask in (inputs(node)[:2], inputs(node)[1::-1]):
        cast = mask.node()
        if cast.kind() != "aten::type_as" or cast.inputsAt(1).debugName() != gradient.debugName():
            continue
        condition, swapped = cast.inputsAt(0), False
        if condition.node().kind() == "aten::bitwise_not":
            condition, swapped = condition.node().inputsAt(0), True
        known = stands_for.get(condition.debugName())
        if known is None or known.debugName() not in conditions:
            continue
        zero = _number(saved, node, 0)
        pair = [zero, gradient] if swapped else [gradient, zero]
        if swapped and conditions[known.debugName()]:
            return _replace(saved, node, "aten::masked_fill", [gradient, condition, zero])
        return _replace(saved, node, "aten::where", [condition, *pair])


def _share(
    saved: SavedValues, node: Node, stands_for: dict[str, Value], extremes: set[tuple[str, frozenset[str]]]
) -> None:
    """`grad * (x > y).type_as(grad)`, of `max(x, y)`, -> `where(x < y, 0, where(x == y, grad / 2, grad))`; of
    `min` the other way round."""
    for gradient, mask in (inputs(node)[:2], inputs(node)[1::-1]):
        cast = mask.node()
        compare = cast.inputsAt(0).node() if cast.kind() == "aten::type_as" else cast
        if compare.kind() not in _EXTREMES or cast.inputsAt(1).debugName() != gradient.debugName():
            continue
        pair, (extreme, loses) = inputs(compare), _EXTREMES[compare.kind()]
        operands = [stands_for.get(v.debugName()) for v in pair]
        if None in operands or (extreme, _names(operands)) not in extremes:
            continue
        half = _insert(saved, node, "aten::div", [gradient, _number(saved, node, 2)])
        shared = _insert(saved, node, "aten::where", [_insert(saved, node, "aten::eq", pair), half, gradient])
        return _replace(
            saved, node, "aten::where", [_insert(saved, node, loses, pair), _number(saved, node, 0), shared]
        )


def _names(values: list[Value]) -> frozenset[str]:
    return frozenset(value.debugName() for value in values)


def _insert(saved: SavedValues, place: Node, kind: str, operands: list[Value]) -> Value:
    return insert(saved.backward, place, kind, operands).output()


def _number(saved: SavedValues, place: Node, number: int) -> Value:
    new = saved.backward.create(CONSTANT, [], 1)
    new.i_("value", number)
    new.output().setType(torch._C.IntType.get())
    return new.insertBefore(place).output()


def _names_a_device(node: Node) -> bool:
    """Whether the node, or one inside of it, may move a tensor to a device that an operand names."""
    if blocks(node):
        return True
    found = schema(node) if node.kind() == "aten::to" else None
    if found is None or "device" not in found.arguments:
        return False
    device = node.inputsAt(found.arguments.index("device"))
    return device.node().kind() != CONSTANT or device.type().kind() != "NoneType"


def _cast(saved: SavedValues, node: Node, stands_for: dict[str, Value]) -> None:
    """`grad.to(device, dtype)`, of the operand's, -> `grad.to(dtype)`."""
    if schema(node).overload != "device":
        return
    gradient, device, *rest = inputs(node)
    known = stands_for.get(device.debugName())
    if known is not None and known.node().kind() == "prim::device":
        _replace(saved, node, "aten::to", [gradient, *rest])


def read_dtypes_elsewhere(saved: SavedValues) -> None:
    """Has values that are kept for their dtype stood in for by others that are kept anyway."""
    first = _equal_dtypes(saved)
    values = [*saved.of_inputs(), *((value, argument) for _, value, argument in saved.of_outputs())]
    asked = [(value, argument) for value, argument in values if is_asked_for_dtype(argument)]
    names = {argument.debugName() for _, argument in asked}
    witnesses = {first(value): argument for value, argument in values if argument.debugName() not in names}
    for value, argument in asked:
        if first(value) in witnesses:
            argument.replaceAllUsesWith(witnesses[first(value)])


def is_asked_for_dtype(argument: Value) -> bool:
    """Whether nothing but the dtype of `argument` is asked for."""
    uses = list(argument.uses())
    return bool(uses) and all(map(asks_for_dtype, uses))


def _equal_dtypes(saved: SavedValues) -> Callable[[Value], str]:
    """Value of the forward -> the name of the first one that surely has its dtype and device. Only values
    with a gradient count, which have fractions."""
    results = graph_outputs(saved.forward)
    moving = {results[j].debugName() for j in saved.gradients}
    same: dict[str, str] = {}  # name -> that of one before with the same dtype

    def first(value: Value) -> str:
        name = value.debugName()
        while name in same:
            name = same[name]
        return name

    def join(result: Value, operand: Value) -> None:
        if first(result) != first(operand):
            same[first(result)] = first(operand)

    for node in nodes_in(saved.forward):
        if node.kind() == "aten::type_as":
            join(node.output(), node.inputsAt(1))
        elif node.kind() in ("aten::contiguous", "aten::masked_fill") or (
            node.kind() in SOFTMAX and not _has_dtype(node)
        ):
            join(node.output(), node.inputsAt(0))
        elif _keeps_dtype(node) and node.output().debugName() in moving:
            operands = inputs(node)[node.kind() == "aten::where" :]
            tensors = [v for v in operands if is_tensor(v)]
            if len(tensors) == 1 and not any(
                v.type().kind() in ("ComplexType", "NumberType") for v in operands
            ):
                join(node.output(), tensors[0])
    return first


def _keeps_dtype(node: Node) -> bool:
    """Whether the op gives the dtype of its operand, where that is one floating tensor beside numbers."""
    found = row_of(node)
    return found is not None and found[0].keeps_dtype


def hand_gradients_on(saved: SavedValues) -> None:
    for node in nodes_of(saved.backward, ("prim::GradOf",)):
        given, (block,) = inputs(node), blocks(node)
        if len(given) == 1 and not nodes_in(block) and len(outputs(node)) == 1:
            node.output().replaceAllUsesWith(given[0])
            node.destroy()
