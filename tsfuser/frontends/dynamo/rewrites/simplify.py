"""Simpler forms of nodes, in the FX graph, before it is translated.

In: a graph of ATen ops that changes nothing in place but inputs, at its end. Out: the same graph, each node
of `FORMS` in a form that groups take. Example: `where(mask, full([], -inf), x)`, which would fill a tensor of
one element on the device first, becomes `where(mask, -inf, x)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..fx.insert import has_sizes_of, is_alike
from ..fx.updates import move_last, updates
from . import copies, new_tensors
from .bools import without_bools
from .fused_multiply_add import as_aten
from .indexing import add_elements, add_parts, add_wide, put_at_one_place
from .late_casts import cast_what_is_read

aten = torch.ops.aten

#: In the `meta` of a view: its operand may have other strides than the traced one.
RELAID = "tsfuser_relaid"


def simplify(module: fx.GraphModule) -> None:
    """Changes the module's graph."""
    graph = module.graph
    move_last(graph)
    changed = bool(updates(graph))
    for node in list(graph.nodes):
        changed = (node.op == "call_function" and without_bools(node)) or changed
        form = _form(node)
        changed = (form is not None and form(node)) or changed
    graph.eliminate_dead_code()  # what nobody reads is no reader
    for node in list(graph.nodes):
        changed = (node.target is aten._to_copy.default and cast_what_is_read(node)) or changed
    if changed:
        graph.eliminate_dead_code()
        module.recompile()


def _form(node: fx.Node) -> Callable[[fx.Node], bool] | None:
    if node.op != "call_function":
        return None
    return FORMS.get(node.target) or NAMED_FORMS.get(str(node.target))


def without_detach(joint: fx.GraphModule) -> None:
    """Changes a joint graph before it is divided. Autograd saves the result of an op detached, and the
    partitioner, which takes a `detach` for an op that must not run twice, would have each of them saved."""
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and FORMS.get(node.target) is _replace_by_operand:
            _replace_by_operand(node)
    joint.graph.eliminate_dead_code()
    joint.recompile()


def _replace_by_operand(node: fx.Node) -> bool:
    """Readers of a `detach` read its operand, as nothing is differentiated here. A result of the graph stays
    a tensor of its own."""
    if any(user.op == "output" or user.target is aten.copy_.default for user in node.users):
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _slice(node: fx.Node) -> bool:
    """A slice of all of a tensor, as there are where sizes vary."""
    operand = node.args[0]
    return is_alike(node.meta["val"], operand.meta["val"]) and _replace_by_operand(node)


def _replaced(node: fx.Node) -> bool:
    """All of a tensor becomes another one: readers read that. What leaves the graph, perhaps as a view, stays
    a tensor of its own, and so does a copy of a tensor that may share memory with an input that changes."""
    source = node.args[1]
    if node.kwargs or _dtype(source) is None or _dtype(node) != _dtype(source):
        return False
    if not _is_made_here(source) or copies.is_exposed(node):
        return False
    old, new = (n.meta["val"] for n in (node, source))
    ends = all(user.target is aten.copy_.default for user in node.users)
    if old.device != new.device or not (has_sizes_of if ends else is_alike)(new, old):
        return False
    node.replace_all_uses_with(source)
    return True


def _is_made_here(node: fx.Node) -> bool:
    """Whether the tensor cannot share memory with an operand of its op."""
    if node.op != "call_function":
        return False
    its_schema = getattr(node.target, "_schema", None)
    return its_schema is not None and all(r.alias_info is None for r in its_schema.returns)


def _view(node: fx.Node) -> bool:
    """`_unsafe_view` differs from `view` for autograd alone. Where the operand has other strides than the
    traced ones, it becomes a `reshape`, since `view` may refuse these strides."""
    target = aten.reshape.default if RELAID in node.meta else aten.view.default
    changed, node.target = node.target is not target, target
    return changed


def _cast(node: fx.Node) -> bool:
    """A cast of the primitives that numbers become when they vary from call to call."""
    operand, dtype = node.args
    node.target = aten._to_copy.default
    node.args, node.kwargs = (operand,), {"dtype": dtype}
    return True


def _number_last(node: fx.Node) -> bool:
    """`2 - x` as `rsub(x, 2)`, as the op table has numbers behind tensors."""
    if len(node.args) != 2 or isinstance(node.args[0], fx.Node) or node.kwargs.get("alpha", 1) != 1:
        return False
    number, operand = node.args
    if type(number) not in (int, float) or not isinstance(operand, fx.Node) or _dtype(operand) is torch.bool:
        return False
    node.args, node.kwargs = (operand, number), {}
    if node.target is aten.sub.Tensor:
        node.target = aten.rsub.Scalar
    return True


def _reciprocal(node: fx.Node) -> bool:
    """`1 / x`, as the op table has no number in front of a tensor."""
    number = node.args[0]
    if type(number) not in (int, float) or number != 1:
        return False
    node.target, node.args = aten.reciprocal.default, node.args[1:]
    return True


def _filled_with_bool(node: fx.Node) -> bool:
    """`full(sizes, True)` as `full(sizes, 1, dtype=bool)`, as TorchScript's scalars are no bools."""
    *others, number = node.args
    if type(number) is not bool:
        return False
    node.args, node.kwargs = (*others, int(number)), {**node.kwargs, "dtype": _dtype(node)}
    return True


def _with_number(node: fx.Node) -> bool:
    """`where` with a number instead of a tensor that holds it, in the dtype of the result."""
    condition, *choices = node.args
    for k, choice in enumerate(choices):
        number = _number(choice)
        dtype = _dtype(choice)
        if number is not None and _holds(dtype, number) and dtype == _dtype(choices[1 - k]) == _dtype(node):
            choices[k] = number
            node.target = (aten.where.ScalarSelf, aten.where.ScalarOther)[k]
            node.args = (condition, *choices)
            return True
    return False


def _holds(dtype: torch.dtype | None, number: int | float) -> bool:
    """Whether the number alone, beside a tensor of the dtype, leads to that dtype. Not so 1.7 in a tensor of
    ints, where it is 1, and 1 in a tensor of bools."""
    if dtype is None or dtype == torch.bool:
        return False
    return type(number) is int or dtype.is_floating_point or dtype.is_complex


def _number(choice: Any) -> int | float | None:
    """The int or float that fills a tensor of no dims; None where that is no constant."""
    if not isinstance(choice, fx.Node):
        return None
    found = None
    if choice.target is aten.full.default and list(choice.args[0]) == []:
        found = choice.args[1]
    elif choice.target is aten.scalar_tensor.default:
        found = choice.args[0]
    elif choice.op == "get_attr":
        found = _owned(choice.graph.owning_module, choice.target)
    return found if type(found) in (int, float) else None


def _owned(module: fx.GraphModule | None, name: str) -> Any:
    """The element of a tensor of no dims that the module owns, which nothing changes."""
    found = getattr(module, name, None)
    if not isinstance(found, torch.Tensor) or found.dim() or found.device.type != "cpu":
        return None
    with unset_fake_temporarily():
        return found.item()


def _dtype(value: Any) -> torch.dtype | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found.dtype if isinstance(found, torch.Tensor) else None


#: op -> what gives a node of it a simpler form, and says whether it did
FORMS: dict[Any, Callable[[fx.Node], bool]] = {
    aten.detach.default: _replace_by_operand,
    aten.alias.default: _replace_by_operand,
    aten.copy.default: lambda node: _replaced(node) or copies.copied(node),
    aten.lift_fresh_copy.default: copies.lifted,
    aten.repeat.default: copies.repeated,
    aten.empty_like.default: new_tensors.empty,
    aten.new_zeros.default: new_tensors.zeros,
    aten.select_scatter.default: copies.part_replaced,
    aten.full.default: _filled_with_bool,
    aten.full_like.default: _filled_with_bool,
    aten.new_full.default: _filled_with_bool,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: lambda node: _replaced(node) or copies.part_replaced(node),
    aten.index_put.default: add_elements,
    aten.index_add.default: add_wide,
    aten.scatter_add.default: lambda node: put_at_one_place(node) or add_parts(node),
    aten.scatter.src: put_at_one_place,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.where.self: _with_number,
    aten.div.Tensor: _reciprocal,
    aten.add.Tensor: _number_last,
    aten.mul.Tensor: _number_last,
    aten.sub.Tensor: _number_last,
    torch.ops.prims.convert_element_type.default: _cast,
}

#: The same by the name of the op, for ops that exist only after an import.
NAMED_FORMS: dict[str, Callable[[fx.Node], bool]] = {
    "prims.fma.default": as_aten,
    "prims.iota.default": copies.iota,
}
