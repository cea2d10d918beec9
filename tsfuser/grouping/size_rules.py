"""Size arithmetic for ops that change the number of dims, or their order.

In: a node of a group whose row names one of `RULES`. Out: a `Derived` name for the sizes of its result, and
the node outside of the group that computes them: `tsfuser::reduced_sizes(sizes, [1], True)`. It stands
before the guard, so it must be right for operands of any rank and for arguments of any value; the operators
(csrc_stubs/torchscript/sizes.cpp) look at their arguments, and no profiled fact goes in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..graph.rows import row_of
from ..graph.wrapper import (
    LIST,
    Graph,
    Node,
    Value,
    constant_before,
    constant_of,
    inputs,
    is_constant,
    is_tensor,
)
from ..ops import table

#: rule -> the operator, and the arguments of the op, by schema name, that it takes after the sizes
RULES = {
    "reduced": ("tsfuser::reduced_sizes", ("dim", "keepdim")),
    "squeezed": ("tsfuser::squeezed_sizes", ("dim",)),
    "unsqueezed": ("tsfuser::unsqueezed_sizes", ("dim",)),
    "permuted": ("tsfuser::permuted_sizes", ("dims",)),
    "swapped": ("tsfuser::swapped_sizes", ("dim0", "dim1")),
    "sliced": ("tsfuser::sliced_sizes", ("dim", "start", "end", "step")),
    "selected": ("tsfuser::selected_sizes", ("dim",)),
    "viewed": ("tsfuser::viewed_sizes", ("size", "shape")),
    "expanded": ("tsfuser::expanded_sizes", ("size",)),
    "flattened": ("tsfuser::flattened_sizes", ("start_dim", "end_dim")),
    "padded": ("tsfuser::padded_sizes", ("pad",)),
    "joined": ("tsfuser::joined_sizes", ("dim",)),  # of two tensors: others follow one by one
}
_ABSENT = {"keepdim": False}  # what stands for an argument that an overload lacks; None for all others
_OF_LISTS = {"reduced", "squeezed"}  # whose operators take a list where the op takes one number
_INTS = torch._C.ListType(torch._C.IntType.get())
_UNKNOWN = object()  # an argument that the group computes


class Derived(NamedTuple):
    """The sizes that an op makes of those named `of`, or of those and `other`. An argument is a constant (a
    list as a tuple), or `Outer`, or a tuple with such items."""

    of: frozenset
    rule: str
    arguments: tuple
    other: frozenset | None = None


class Outer(NamedTuple):
    """An input of the group, by the number of the value inside."""

    inner: int


def by_kind() -> dict[str, tuple[str, tuple[str, ...], bool]]:
    """Op -> its rule: the operator, the op's arguments that it takes, and whether it takes lists where the op
    takes one number. For what asks for sizes before groups are made (csrc_stubs/torchscript/early_sizes.cpp),
    which knows about joins itself."""
    return {
        kind: (*RULES[rule], rule in _OF_LISTS)
        for rule in RULES
        if rule != "joined"
        for kind in table.kinds_with_sizes(rule)
    }


def rule_of(value: Value) -> str | None:
    """The op table's rule for the sizes of a result; None for results of ops without a row."""
    found = row_of(value.node())
    if found is None:
        return None
    rule = found[0].sizes
    return rule if isinstance(rule, str) else rule[value.offset()]


def sized_by(value: Value) -> list[Value] | None:
    """The operands from whose sizes those of `value` follow; None if there is no rule."""
    rule = rule_of(value)
    if rule is None or rule == "own":
        return None
    if rule == "joined":
        made = value.node().inputsAt(0).node()
        return inputs(made) if made.kind() == LIST else None
    tensors = [v for v in inputs(value.node()) if is_tensor(v)]
    if rule == "broadcast":
        return tensors
    if rule == "first" or rule in RULES:
        return tensors[:1]
    named = value.node().inputsAt(row_of(value.node())[1].arguments.index(rule))
    return [named] if is_tensor(named) else None


def derived(node: Node, rule: str, of: frozenset, outer: dict[int, Value]) -> Derived | None:
    """The name of the sizes of the node's result; None if they depend on a value that the group computes.
    `outer`: number of an input of the subgraph -> the value outside."""
    _, schema = row_of(node)
    arguments: list[Any] = []
    for name in RULES[rule][1]:
        if name not in schema.arguments:
            arguments.append(_ABSENT.get(name))
            continue
        where = schema.arguments.index(name)
        found = _argument(node.inputsAt(where), outer)
        single = schema.types[where] in ("int", "Optional[int]") and rule in _OF_LISTS
        arguments.append((found,) if single and found is not None else found)
    if any(a is _UNKNOWN or (isinstance(a, tuple) and _UNKNOWN in a) for a in arguments):
        return None
    return Derived(of, rule, tuple(arguments))


def _argument(value: Value, outer: dict[int, Value]):
    if is_constant(value):
        return constant_of(value)
    if value.unique() in outer:
        return Outer(value.unique())
    if value.node().kind() == LIST:
        return tuple(_argument(v, outer) for v in inputs(value.node()))
    return _UNKNOWN


def emit(graph: Graph, before: Node, name: Derived, sizes: list[Value], outer: dict[int, Value]) -> Value:
    """The value of `name`, computed before a node from the `sizes` that it is derived from."""

    def insert(kind: str, operands: list[Value], type_) -> Value:
        node = graph.create(kind, operands, 1)
        node.output().setType(type_)
        return node.insertBefore(before).output()

    def value(argument) -> Value:
        if isinstance(argument, Outer):
            return outer[argument.inner]
        if isinstance(argument, tuple):
            return insert(LIST, [value(item) for item in argument], _INTS)
        return constant_before(graph, before, argument)

    operator = RULES[name.rule][0]
    return insert(operator, [*sizes, *map(value, name.arguments)], _INTS)
