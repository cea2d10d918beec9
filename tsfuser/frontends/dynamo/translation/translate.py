"""Translates an FX graph of ATen ops, as AOTAutograd makes it, to a typed torch._C.Graph.

In: an fx.GraphModule whose nodes carry `meta["val"]`. Out: a `Translation`: the graph, which outputs are
results, and which are copied to inputs at the end. Tensors that the module owns are further inputs. If such a
graph cannot hold some nodes: these nodes, with the reasons. Example:

    add = torch.ops.aten.add.Tensor(primals_1, 2)
becomes
    %4 : Float(4, 8, device=cpu) = aten::add(%primals_1, %2, %3)

A node is translated by the schema of its overload. TorchScript finds overloads by the arguments, so it is
checked that it finds the same one; a number instead of a tensor leads to another one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .... import _C
from ....errors import Refusal
from ....graph.wrapper import outputs, schema
from ....ops.left_to_python import reason_for
from ..fx import sizes
from ..fx.places import place_of
from ..fx.recomputed import name_value
from ..fx.types import hint, order_of, type_of
from ..fx.updates import last_updates
from ..joint_graph.saved_gaps import MAY_HAVE_GAPS
from .arguments import Arguments
from .numbers import CHECKS, Numbers

_INT = torch._C.IntType.get()
#: Op -> the kind of an op of ours that does the same, where TorchScript would not find that overload.
_OTHER_KINDS = {torch.ops.aten.view.dtype: "tsfuser::view_as_dtype"}


@dataclass
class Translation:
    """A typed graph, and what else the program needs. If there are `foreign` nodes, only these are valid."""

    graph: torch._C.Graph
    constants: list[torch.Tensor] = field(default_factory=list)  # tensors for the last inputs of `graph`
    results: list[int | None] = field(default_factory=list)  # the output that is each result; None for None
    updates: list[tuple[int, int]] = field(default_factory=list)  # (input, output that is copied to it)
    #: for each output, the order of its dims in memory; None if any order will do
    orders: list[list[int] | None] = field(default_factory=list)
    foreign: dict[fx.Node, str] = field(default_factory=dict)  # node -> why it cannot be part of a graph
    #: the number that a size was in the traced call, by `unique()` of its value
    numbers: dict[int, int] = field(default_factory=dict)
    donated: list[int] = field(default_factory=list)  # inputs over which groups may write
    #: outputs whose rows may lie apart -> what the backward calls them; those that do, with their strides
    may_have_gaps: dict[int, str] = field(default_factory=dict)
    gaps: dict[str, tuple[int, ...]] = field(default_factory=dict)


def translate(module: fx.GraphModule) -> Translation:
    """Translates the whole graph of the module, or finds all nodes that cannot be translated."""
    return Translator(module).run()


class Translator:
    """Translates one module. `values`: what stands for each node; `checks`: numbers that the graph has to
    return, so that no pass drops them."""

    def __init__(self, module: fx.GraphModule):
        self.module = module
        self.graph = torch._C.Graph()
        self.values: dict[fx.Node, Any] = {}  # a value, or a tuple of values
        self.arguments = Arguments(self.graph, self.values)
        self.numbers = Numbers(self.arguments, self._append)
        self.checks: list[torch._C.Value] = []
        self.made = Translation(self.graph)
        self.inputs: dict[fx.Node, int] = {}
        self.returned: dict[int, int] = {}  # value -> which output it is
        self.place: tuple[str, int, str] | None = None  # of the node that is translated

    def run(self) -> Translation:
        graph = self.module.graph
        copies = last_updates(graph)
        given = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
        self.translate_nodes(given, copies)
        if not self.made.foreign:
            self._outputs(graph.output_node(), copies)
        return self.made

    def translate_nodes(self, given: Sequence[fx.Node], copies: Sequence[fx.Node]) -> None:
        """The inputs, in the order of `given`, and all nodes but the `copies` to inputs, and the outputs."""
        for node in given:
            if node.op == "placeholder":
                self._input(node)
            else:
                self._attribute(node)
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output") or node in copies:
                continue
            self.place = place_of(node)
            try:
                self.values[node] = self._node(node)
                name_value(node, self.values[node])
                self._note_number(node)
            except Refusal as refusal:
                self._note_foreign(node, reason_for(node.target) or str(refusal))

    def _input(self, node: fx.Node) -> None:
        value = self.graph.addInput()
        type_ = type_of(node.meta.get("val"))
        self.inputs[node] = len(self.inputs)
        if type_ is not None:
            value.setType(type_)
            self.values[node] = value
            self._note_number(node)

    def _note_number(self, node: fx.Node) -> None:
        value, found = self.values[node], node.meta.get("val")
        if isinstance(found, torch.SymInt) and isinstance(value, torch._C.Value):
            number = hint(found)
            if number is not None:
                self.made.numbers[value.unique()] = number

    def _attribute(self, node: fx.Node) -> None:
        """Translates a tensor that the module owns. Other attributes, like modules, are for foreign nodes."""
        found = self.module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if isinstance(found, torch.Tensor):
            value = self.graph.addInput()
            value.setType(type_of(found))
            self.values[node] = value
            self.made.constants.append(found)

    def _note_foreign(self, node: fx.Node, reason: str) -> None:
        """Notes that the node is foreign. Its readers are translated as if it were an input."""
        self.made.foreign[node] = reason
        found = node.meta.get("val")
        several = isinstance(found, (list, tuple))
        values = []
        for item in found if several else [found]:
            value, type_ = self.graph.addInput(), type_of(item)
            value.setType(type_ or torch._C.NoneType.get())
            values.append(value if type_ is not None else None)
        self.values[node] = tuple(values) if several else values[0]

    def _node(self, node: fx.Node) -> Any:
        target = node.target
        if target is operator.getitem:
            return self._item(node)
        if node.op != "call_function":
            raise Refusal(f"a node of kind {node.op}")
        if self.numbers.takes(target):
            return self.numbers.value(node)
        if target in CHECKS:
            self.checks.append(self.numbers.check(node))
            return None
        if not isinstance(target, torch._ops.OpOverload):
            raise Refusal(f"{getattr(target, '__name__', target)} is Python's, no op of torch's dispatcher")
        if target is torch.ops.aten._local_scalar_dense.default:
            return self._number(node)
        return self._op(node, target)

    def _item(self, node: fx.Node) -> Any:
        source, at = node.args
        values = self.values.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(values, tuple) or not isinstance(at, int):
            raise Refusal("an item of something that is no list of values")
        if values[at] is None:
            raise Refusal("an item that is neither a tensor nor a number")
        return values[at]

    def _number(self, node: fx.Node) -> torch._C.Value:
        """Translates `item()`, whose result has the type of the tensor's elements."""
        type_ = type_of(node.meta.get("val"))
        if type_ is None or type_.kind() not in sizes.ITEMS:
            raise Refusal("a number of unknown type, from a tensor")
        return self._append(sizes.ITEMS[type_.kind()], [self.arguments.of_node(node.args[0])], [type_])[0]

    def _op(self, node: fx.Node, op: torch._ops.OpOverload) -> Any:
        """The value of a node of the op's kind; a tuple of values if it has several results, or a list."""
        its_schema = op._schema
        if its_schema.is_mutable:
            raise Refusal(f"{op} changes its operands in place")
        values = [
            self.arguments.make(given, argument.type)
            for given, argument in zip(_complete(node, its_schema), its_schema.arguments)
        ]
        found, listed = node.meta.get("val"), False
        if len(its_schema.returns) == 1:
            listed = its_schema.returns[0].type.kind() == "ListType"
            results = [found]
        else:
            results = list(found) if isinstance(found, (list, tuple)) else []
        if len(results) != len(its_schema.returns) or not results:
            raise Refusal(f"{op} returns nothing that a graph can hold")
        types = [its_schema.returns[0].type] if listed else [_result_type(v) for v in results]
        other = _OTHER_KINDS.get(op)
        made = self._append(other or its_schema.name, values, types, None if other else op)
        if listed:
            return self._unpacked(made[0], found)
        return made[0] if len(made) == 1 else tuple(made)

    def _unpacked(self, value: torch._C.Value, found: Any) -> tuple:
        if not isinstance(found, (list, tuple)):
            raise Refusal("a list of unknown length")
        return tuple(self._append("prim::ListUnpack", [value], [_result_type(v) for v in found]))

    def _append(self, kind: str, values: list, types: list, op=None) -> list[torch._C.Value]:
        node = self.graph.create(kind, values, len(types))
        self.graph.appendNode(node)
        if self.place is not None:
            _C.set_place(node, *self.place)
        for value, type_ in zip(outputs(node), types):
            value.setType(type_)
        if op is not None and (reason := _is_other_overload(node, values, op)):
            node.destroy()
            raise Refusal(reason)
        return outputs(node)

    def _outputs(self, last: fx.Node, copies: list[fx.Node]) -> None:
        """Registers the outputs: the results, and the values that are copied to inputs."""
        given = last.args[0]
        for item in given if isinstance(given, (list, tuple)) else [given]:
            self.made.results.append(None if item is None else self._output(item))
        for k, name in last.meta.get(MAY_HAVE_GAPS, {}).items():
            self.made.may_have_gaps[self.made.results[k]] = name
        for node in copies:
            target, source = node.args
            self.made.updates.append((self.inputs[target], self._output(source)))
        for value in self.checks:
            self.graph.registerOutput(value)
            self.made.orders.append(None)

    def _output(self, item: Any) -> int:
        value = self.arguments.make(item, _INT)  # of a node, or a plain number
        known = self.returned.get(value.unique())
        if known is not None:
            return known
        found = item.meta.get("val") if isinstance(item, fx.Node) else None
        own = isinstance(found, torch.Tensor) and item.op not in ("placeholder", "get_attr")
        self.graph.registerOutput(value)
        self.made.orders.append(order_of(found) if own else None)
        self.returned[value.unique()] = len(self.made.orders) - 1
        return self.returned[value.unique()]


def _result_type(value: Any):
    type_ = type_of(value)
    return type_ if type_ is not None else torch._C.NoneType.get()


def _complete(node: fx.Node, its_schema) -> list[Any]:
    """The arguments in the schema's order, with defaults."""
    given = list(node.args)
    for argument in its_schema.arguments[len(given) :]:
        if argument.name in node.kwargs:
            given.append(node.kwargs[argument.name])
        elif argument.has_default_value():
            given.append(argument.default_value)
        else:
            raise Refusal(f"`{argument.name}` is missing")
    return given


def _is_other_overload(node: torch._C.Node, values: list, op: torch._ops.OpOverload) -> str | None:
    """Why TorchScript would not run this op; None if it does."""
    found = schema(node)
    own = op._schema
    if found is None:
        return f"TorchScript knows no {op} for these arguments"
    if found.name == own.name and found.overload == own.overload_name:
        return None
    number = [  # `x + 2` is add.Tensor in FX, and add.Scalar here
        argument.type.kind() == "TensorType" and value.type().kind() != "TensorType"
        for argument, value in zip(own.arguments, values)
    ]
    names = tuple(argument.name for argument in own.arguments)
    same = found.name == own.name and found.arguments == names and any(number)
    if same and all(t in ("number", "Scalar") for t, n in zip(found.types, number) if n):
        return None
    return f"TorchScript takes {found.name}.{found.overload} for {op}"
