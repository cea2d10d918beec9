"""How one value is made from another one by ops that have an in-place form.

In: values of a typed graph. Out: the ops between them, and for the last of a row of such values the others.
Example: a cache that is written twice, and read between:

    %first = aten::index_copy(%cache, %dim, %i, %key);  %second = aten::index_copy(%first, %dim, %j, %key)

`way(cache, first).last` is the first op, and `made_from(second) == [second, first, cache]`. A write to
a part is three ops; the first and the last one name the same part:

    %s = aten::slice(%x, ...);  %c = aten::copy(%s, %y);  %new = aten::slice_scatter(%x, %c, ...)

The in-place op is found by its schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from ....graph.effects import draws
from ....graph.wrapper import LIST, Node, Value, constant_of, inputs, is_constant, is_tensor, schema

_SCATTER = "_scatter"


class Way(NamedTuple):
    """How a new value is made from an old one. `scatters`, the outermost first: each writes the result of the
    next one to a view. `last`: the op that makes what the innermost one writes; None if that is only copied.
    """

    scatters: tuple[Node, ...]
    last: Node | None

    @property
    def first_written(self) -> Node:
        return self.scatters[-1] if self.last is None else self.last

    @property
    def others(self) -> list[Value]:
        """The values that the ops read while the input is written, without the input."""
        return [self.scatters[-1].inputsAt(1)] if self.last is None else inputs(self.last)[1:]


def made_from(new: Value) -> list[Value]:
    """`new`, the value that it is made from, and so on: the last of them is made otherwise."""
    found = [new]
    while True:
        first = next(iter(inputs(found[-1].node())), None)
        if first is None or not is_alike(first, found[-1]) or way(first, found[-1]) is None:
            return found
        found.append(first)


def way(old: Value, new: Value) -> Way | None:
    """How the new value is made from the old one; None if an op on the way has no in-place form."""
    scatters: list[Node] = []
    value = new
    while True:
        node = value.node()
        if scatters and len(value.uses()) > 1:
            return Way(tuple(scatters), None)
        if not node.kind().startswith("aten::") or not _is_part(node.inputsAt(0), old, scatters):
            return Way(tuple(scatters), None) if scatters else None
        if view_of(node) is not None:
            scatters.append(node)
            value = node.inputsAt(1)
        elif in_place_form(node) is not None and not draws(node) and is_alike(node.inputsAt(0), value):
            return Way(tuple(scatters), node)
        else:
            return Way(tuple(scatters), None) if scatters else None


def _is_part(value: Value, old: Value, scatters: Sequence[Node]) -> bool:
    """Whether `value` is the view of `old` to which the innermost of the scatters writes."""
    if not scatters:
        return value.unique() == old.unique()
    node, scatter = value.node(), scatters[-1]
    if node.kind() != view_of(scatter):
        return False
    same = all(map(_is_equal, inputs(node)[1:], inputs(scatter)[2:]))
    return same and _is_part(node.inputsAt(0), old, scatters[:-1])


def _is_equal(a: Value, b: Value) -> bool:
    """Whether both are the same value, or equal constants."""
    if a.unique() == b.unique():
        return True
    if not (is_constant(a) and is_constant(b)):
        return False
    return type(constant_of(a)) is type(constant_of(b)) and constant_of(a) == constant_of(b)


def view_of(node: Node) -> str | None:
    """The kind of the view to which the node writes; None if it is no scatter. (`as_strided_scatter` is not
    taken: its strides may reach memory outside of the operand.)"""
    kind = node.kind().removesuffix(_SCATTER)
    return kind if kind != node.kind() and kind != "aten::as_strided" and _has_view(node.kind()) else None


@cache
def _has_view(kind: str) -> bool:
    """Whether the view has the arguments that the op has after the source."""
    scatter = _arguments(getattr(torch.ops.aten, kind.removeprefix("aten::")).default)
    packet = getattr(torch.ops.aten, kind.removeprefix("aten::").removesuffix(_SCATTER), None)
    views = [getattr(packet, name) for name in packet.overloads()] if packet else []
    return scatter[1:2] == [("src", "Tensor")] and any(
        _arguments(view) == [scatter[0], *scatter[2:]] and view.is_view for view in views
    )


def in_place_form(node: Node) -> str | None:
    """The kind of the op that does the same in place, on its first operand; None if there is none."""
    found = schema(node)
    return None if found is None else _in_place_form(found.name, found.overload)


@cache
def _in_place_form(name: str, overload: str) -> str | None:
    plain, in_place = (
        getattr(getattr(torch.ops.aten, name.removeprefix("aten::") + end, None), overload or "default", None)
        for end in ("", "_")
    )
    if plain is None or in_place is None or torch.Tag.inplace_view in in_place.tags:
        return None
    made, taken = plain._schema.returns, in_place._schema.arguments
    fresh = len(made) == 1 and made[0].alias_info is None and not plain._schema.is_mutable
    written = [k for k, a in enumerate(taken) if a.alias_info is not None and a.alias_info.is_write]
    return name + "_" if fresh and written == [0] and _arguments(plain) == _arguments(in_place) else None


def _arguments(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def is_alike(old: Value, new: Value) -> bool:
    """Whether both tensors have the same dtype, device and, in the traced call, sizes."""
    a, b = old.type(), new.type()
    if not (is_tensor(old) and is_tensor(new)) or None in (a.sizes(), a.dtype(), a.device()):
        return False
    return (a.sizes(), a.dtype(), a.device()) == (b.sizes(), b.dtype(), b.device())


def is_view(node: Node) -> bool:
    """Whether the node reads no elements of its operand."""
    found = schema(node) if node.kind().startswith("aten::") else None
    return node.kind() == LIST or (found is not None and found.aliases and not found.writes)


def is_read(value: Value) -> bool:
    """Whether a node reads the value."""
    return any(use.user.kind() != "prim::Return" for use in value.uses())
