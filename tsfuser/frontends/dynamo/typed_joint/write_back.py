"""What passes have changed in a typed joint graph, written into AOTAutograd's joint graph.

In: a `Translated`, whose typed graph has changed since. Out: the FX graph with the same changes: new nodes
for those that passes have written, and other operands where passes have replaced them. Example:

    typed   %y = aten::sub(%x, %mean);  %z = aten::mul(%y, %rstd);  aten::silu_backward(%g, %z)
    becomes sub = sub(x, mean);  mul = mul(sub, rstd);  silu_backward(g, mul)

Nodes of values that are equal to others, and so are gone, lose their readers.

Sizes that a node asks for are numbers where they are known while torch traces, else nodes. Raises Refusal
where a pass has written what FX has no node for; the FX graph is half changed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ....errors import Refusal
from ....graph.wrapper import CONSTANT, LIST, Node, Value, facts, inputs, is_tensor, nodes_in, outputs, schema
from ....ir.dtypes import DTYPES
from ..fx.insert import PART, Insert
from .translate import FOREIGN, Translated, maker, read

aten = torch.ops.aten
_BY_CODE = {d.code: getattr(torch, name) for name, d in DTYPES.items() if hasattr(torch, name)}
_SIZE, _TO = "aten::size", "aten::to"


def write_back(translated: Translated, module: fx.GraphModule, merged: Mapping[int, int]) -> None:
    """Changes the module's graph, and notes the new nodes in `translated`. `merged`: by the numbers
    of values that are gone, those of what stands for them."""
    writer = _Writer(translated)
    values = {v.unique(): v for node in nodes_in(translated.joint.graph) for v in outputs(node)}
    for number, kept in merged.items():
        if kept in values:
            writer.take_item(number, values[kept])
    for node in nodes_in(translated.joint.graph):
        writer.write(node)
    for number, kept in merged.items():
        if kept in values:
            writer.merge(number, values[kept])
    if writer.changed:
        module.graph.lint()
        module.recompile()


class _Writer:
    def __init__(self, translated: Translated):
        self.nodes, self.read, self.numbers = translated.nodes, translated.read, translated.numbers
        self.translated, self.changed = translated.translated, False

    def write(self, node: Node) -> None:
        if node.kind() in (CONSTANT, LIST):
            return
        first = outputs(node)[0].unique()
        if first in self.read:
            self._update(node, *self.read[first])
        elif first in self.translated:
            return
        elif node.kind() == _SIZE:
            self.numbers[first] = self._sizes(*inputs(node))
        else:
            self._add(node)

    def take_item(self, number: int, kept: Value) -> None:
        """Makes the node that takes an item of several results, where nothing has taken it of these."""
        if number in self.nodes and kept.unique() in self.translated and kept.unique() not in self.nodes:
            call, _ = self.read[outputs(maker(kept))[0].unique()]
            item = self.nodes[number][0]
            with call.graph.inserting_after(call):
                new = call.graph.call_function(item.target, (call, *item.args[1:]))
            new.meta = dict(item.meta)
            self.nodes[kept.unique()] = [new]

    def merge(self, number: int, kept: Value) -> None:
        """Has all that read the nodes of a value that is gone read another's."""
        for node in self.nodes.get(number, ()):
            new = self._argument(kept)
            if isinstance(new, fx.Node):
                self.changed = True
                node.replace_all_uses_with(new)

    def _update(self, node: Node, given: fx.Node, before: list[tuple[int, ...]]) -> None:
        """Gives a known node the operands that its typed node has now."""
        for place, (value, old) in enumerate(zip(inputs(node), before)):
            if read(value) == old:
                continue
            self.changed = True
            if node.kind() == FOREIGN:
                given.replace_input_with(self.nodes[old[0]][0], self._argument(value))
            else:
                self._replace(given, place, self._argument(value))

    def _replace(self, node: fx.Node, place: int, argument: Any) -> None:
        name = node.target._schema.arguments[place].name
        if place < len(node.args):
            node.update_arg(place, argument)
        else:
            node.update_kwarg(name, argument)

    def _sizes(self, tensor: Value, dim: Value | None = None) -> Any:
        of = self._argument(tensor)
        rank = of.meta["val"].dim()
        dims = range(rank) if dim is None else [self._argument(dim) % rank]
        found = [self._size(of, d) for d in dims]
        return found if dim is None else found[0]

    def _size(self, tensor: fx.Node, d: int) -> Any:
        size = tensor.meta["val"].shape[d]
        return size if isinstance(size, int) else _behind(tensor)(aten.sym_size.int, tensor, d)

    def _add(self, node: Node) -> None:
        made = outputs(node)[0]
        if node.outputsSize() != 1 or not is_tensor(made):
            raise Refusal(f"{node.kind()} of a joint graph is not written for torch")
        op, args, kwargs = self._call(node)
        operands = [n for n in leaves((args, kwargs)) if isinstance(n, fx.Node)]
        if not operands:
            raise Refusal(f"{node.kind()} of nothing that torch has traced")
        new = _behind(max(operands))(op, *args, **kwargs)
        value = new.meta["val"]
        known = facts(made.type())
        if known.dtype is not None and getattr(torch, known.dtype) != value.dtype:
            raise Refusal(f"{node.kind()} has another dtype in torch")
        self.nodes[made.unique()] = [new]

    def _call(self, node: Node) -> tuple[Any, list, dict[str, Any]]:
        """The op, and its arguments, of a typed node."""
        found = schema(node)
        if found is None or not node.kind().startswith("aten::"):
            raise Refusal(f"{node.kind()} of a joint graph is not written for torch")
        if node.kind() == _TO:
            names = dict(zip(found.arguments, inputs(node)))
            dtype = self._argument(names["dtype"])
            return aten._to_copy.default, [self._argument(names["self"])], {"dtype": _BY_CODE[dtype]}
        packet = getattr(aten, node.kind().partition("::")[2])
        op = getattr(packet, found.overload or "default")
        args, kwargs = [], {}
        for argument, value in zip(op._schema.arguments, inputs(node)):
            given = self._argument(value)
            if "ScalarType" in str(argument.real_type) and given is not None:
                given = _BY_CODE[given]
            if argument.kwarg_only:
                if given != argument.default_value:
                    kwargs[argument.name] = given
            else:
                args.append(given)
        return op, args, kwargs

    def _argument(self, value: Value) -> Any:
        if value.unique() in self.nodes:
            return self.nodes[value.unique()][0]
        if value.unique() in self.numbers:
            return self.numbers[value.unique()]
        if value.node().kind() == CONSTANT:
            return value.toIValue() if value.type().kind() != "NoneType" else None
        if value.node().kind() == LIST:
            return [self._argument(item) for item in inputs(value.node())]
        raise Refusal(f"{value.node().kind()} of a joint graph is not written for torch")


def _behind(node: fx.Node) -> Insert:
    """What inserts nodes behind this one; behind all inputs, if it is one."""
    place = node
    if node.op == "placeholder":
        place = node.graph.find_nodes(op="placeholder")[-1]
    return Insert(place.next, node, _KEPT)


_KEPT = tuple(name for name in PART if name not in ("recompute", "ac_graph_id"))


def leaves(given: Any) -> list[Any]:
    """The items of lists in lists."""
    if isinstance(given, dict):
        return [leaf for item in given.values() for leaf in leaves(item)]
    if isinstance(given, (list, tuple)):
        return [leaf for item in given for leaf in leaves(item)]
    return [given]
