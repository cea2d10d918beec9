"""Translates AOTAutograd's joint graph to a joint graph of typed ops.

In: an FX graph with forward and backward: `primals_*`, then `tangents_*`; its outputs are the results of the
forward, then the gradients. Out: a `Joint`, and which node of FX each of its values is. Example:

    mul = mul(primals_1, primals_2);  mul_1 = mul(tangents_1, primals_2);  return (mul, mul_1, None)
becomes
    graph(%primals_1, %primals_2, %tangents_1):
      %3 = aten::mul(%primals_1, %primals_2);  %4 = aten::mul(%tangents_1, %primals_2)
      return (%3, %4)

What is copied to inputs at the end, and checks, count as results of the forward, which has to compute them.
An op that typed graphs cannot hold becomes a node of no known kind: nothing moves or repeats such a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....errors import Refusal
from ....graph.wrapper import LIST, Node, Value, inputs, nodes_in, outputs
from ....joint.names import WRITTEN
from ....joint.node_facts import UNPACK
from ....joint.reverse import Joint
from ..fx.types import type_of
from ..fx.updates import last_updates
from ..translation.translate import Translator

FOREIGN = "tsfuser::foreign"
_TANGENTS = "tangents"


@dataclass(frozen=True)
class Translated:
    """`nodes`: by the number of a value, the nodes of FX for whose results it stands. `read`: by the number
    of the first result of a typed node, the call of FX that it stands for, and what each operand was.
    `translated`: the numbers of all values; `numbers`: what stands for numbers that passes have written."""

    joint: Joint
    nodes: dict[int, list[fx.Node]]
    read: dict[int, tuple[fx.Node, list[tuple[int, ...]]]]
    translated: frozenset[int]
    numbers: dict[int, Any] = field(default_factory=dict)


def read(operand: Value) -> tuple[int, ...]:
    """The numbers of the operand's values: its own, or those of the items of a list that is made for it."""
    made_of = inputs(operand.node()) if operand.node().kind() == LIST else [operand]
    return tuple(value.unique() for value in made_of)


def translate(module: fx.GraphModule, results: int) -> Translated:
    """The first `results` outputs of the module are those of its forward. Raises Refusal."""
    return _Translator(module).joint(results)


class _Translator(Translator):
    def joint(self, results: int) -> Translated:
        graph = self.module.graph
        copies = last_updates(graph)
        placeholders = graph.find_nodes(op="placeholder")
        tangents = [node for node in placeholders if _TANGENTS in str(node.target)]
        given = [node for node in placeholders if node not in tangents]
        if any("primals" not in str(node.target) for node in given):
            raise Refusal("an input is neither the program's nor a gradient")
        self.translate_nodes([*given, *graph.find_nodes(op="get_attr"), *tangents], copies)
        for copy in copies:
            target = self.arguments.of_node(copy.args[0])
            if not target.debugName().endswith(WRITTEN):
                target.setDebugName(copy.args[0].name + WRITTEN)
        returned = list(graph.output_node().args[0])
        made = [*self._all(returned[:results]), *self._all(copy.args[1] for copy in copies), *self.checks]
        gradients = self._all(returned[results:])
        for value in (*made, *gradients):
            self.graph.registerOutput(value)
        joint = Joint(self.graph, len(made), tuple(range(len(tangents))), tuple(range(len(gradients))))
        nodes: dict[int, list[fx.Node]] = {}
        calls: dict[int, tuple[fx.Node, list[tuple[int, ...]]]] = {}
        for node, value in self.values.items():
            if isinstance(value, torch._C.Value):
                nodes.setdefault(value.unique(), []).append(node)
            if isinstance(node.target, torch._ops.OpOverload) and value is not None:
                made = maker(value)
                calls[outputs(made)[0].unique()] = node, [read(operand) for operand in inputs(made)]
        known = frozenset(v.unique() for node in nodes_in(self.graph) for v in outputs(node))
        return Translated(joint, nodes, calls, known)

    def _all(self, items: Any) -> list[Value]:
        """The values of those that are nodes."""
        return [self.arguments.of_node(item) for item in items if isinstance(item, fx.Node)]

    def _input(self, node: fx.Node) -> None:
        if type_of(node.meta.get("val")) is None:
            raise Refusal("an input is neither a tensor nor a number")
        super()._input(node)

    def _note_foreign(self, node: fx.Node, reason: str) -> None:
        """Makes a node of no known kind, unless it has graphs of its own, or writes."""
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
            raise Refusal(reason)
        found = node.meta.get("val")
        results = found if isinstance(found, (list, tuple)) else [found]
        types = [type_of(item) for item in results]
        if None in types or not types:
            raise Refusal(reason)
        made = self._append(FOREIGN, self._operands(node), types)
        self.values[node] = tuple(made) if isinstance(found, (list, tuple)) else made[0]

    def _operands(self, node: fx.Node) -> list[Value]:
        return [self.arguments.of_node(operand) for operand in node.all_input_nodes]


def maker(result: Value | tuple[Value, ...]) -> Node:
    """The node of the op that gives it; of the items of a list, that which gives the list."""
    node = (result[0] if isinstance(result, tuple) else result).node()
    return node.inputsAt(0).node() if node.kind() == UNPACK else node
