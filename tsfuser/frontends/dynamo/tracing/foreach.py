"""Ops on lists of tensors, as optimizers call them, as one op per tensor: then the update of one parameter is
a group, and its plan and kernel serve all parameters of its class.

In: an op of ATen whose name begins with `_foreach_`. Out: a function that does the same by an op on tensors,
if there is one that takes the same arguments. Example: `_foreach_add.List([a, b], [c, d], alpha=2)` ->
`[add.Tensor(a, c, alpha=2), add.Tensor(b, d, alpha=2)]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_PREFIX = "_foreach_"
#: Where the op on tensors has another name, if the other operand is a number.
_WITH_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}


def foreach_ops() -> Iterator[tuple[Any, Any]]:
    """Pairs: an op on lists, and the op on tensors that does the same to each."""
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        single = name.removeprefix(_PREFIX)
        if overload.startswith("Scalar"):
            single = _WITH_NUMBERS.get(single, single)
        packet = getattr(torch.ops.aten, single, None)
        if not name.startswith(_PREFIX) or name.endswith("_") or packet is None:
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        found = None if op._schema.is_mutable else _of_elements(op, packet)
        if found is not None:
            yield op, found


def one_by_one(op: Any, element: Any) -> Callable[..., list]:
    """A function that does what `op` does by a call of `element` for each tensor."""
    names = [argument.name for argument in op._schema.arguments]

    def function(*args: Any, **kwargs: Any) -> list:
        given = {**dict(zip(names, args)), **kwargs}
        ordered = [given.get(argument.name, argument.default_value) for argument in op._schema.arguments]
        lists = [isinstance(x, (list, tuple)) for x in ordered]
        count = len(ordered[lists.index(True)])
        items = ([x[k] if many else x for x, many in zip(ordered, lists)] for k in range(count))
        return [_call(element, values) for values in items]

    return function


def _call(op: Any, values: list) -> Any:
    args, kwargs = [], {}
    for argument, value in zip(op._schema.arguments, values):
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return op(*args, **kwargs)


def _of_elements(op: Any, packet: Any) -> Any:
    """The overload of `packet` that takes single elements of the lists that `op` takes; None if there is
    none."""
    wanted = [_element(argument.type) for argument in op._schema.arguments]
    # not packet.__getattr__: it makes a new object for an overload, which is not equal to that in use
    # elsewhere
    for overload in (getattr(packet, name) for name in packet.overloads()):
        own = overload._schema.arguments
        if [str(a.type) for a in own[: len(wanted)]] == wanted and all(
            a.has_default_value() for a in own[len(wanted) :]
        ):
            return overload
    return None


def _element(type_: Any) -> str:
    return str(type_.getElementType() if type_.kind() == "ListType" else type_)
