"""Parts of a tensor that ops of groups make and read are made one by one: a group takes no op that gives a
list.

In: a joint graph with types. Out: the same, in place. Example:

    %l = aten::split(%x, %n, 1);  %a, %b = prim::ListUnpack(%l)
    ->  %s = aten::size(%x);  %g = prim::ListConstruct(%n);  %e = tsfuser::part_end(%s, %g, 0, 1, 2, 0);  ...
        %a = aten::slice(%x, 1, %b, %e, 1);  ...

The numbers raise where the op would give another number of parts.
"""

from __future__ import annotations

from ..graph.rows import row_of
from ..graph.wrapper import Graph, Node, Value, inputs, is_constant, nodes_of, outputs
from .node_facts import UNPACK, viewed
from .terms import Term, Writer

#: By the kind of op, how it parts its operand (csrc_stubs/torchscript/parts.h).
_WIDTHS, _UNBOUND = 1, 2
_HOW = {"aten::split": 0, "aten::split_with_sizes": _WIDTHS, "aten::unbind": _UNBOUND, "aten::chunk": 3}


def part_one_by_one(graph: Graph) -> None:
    """Rewrites those that give a list that is only unpacked, and parts that some op of a group reads."""
    writer = Writer(graph)
    for node in nodes_of(graph, tuple(_HOW)):
        readers = [use.user for use in node.output().uses()]
        if len(readers) != 1 or readers[0].kind() != UNPACK or not is_constant(inputs(node)[-1]):
            continue
        if _is_inside(node.inputsAt(0)) and any(map(_reaches_group, outputs(readers[0]))):
            _write(writer, node, readers[0])


def _is_inside(whole: Value) -> bool:
    """Whether a group makes what is parted, and need not store it: a sum, which is often that of
    a product and its bias, is stored for the backward."""
    maker = whole.node()
    if viewed(maker) is not None:
        return _is_inside(maker.inputsAt(0))
    return row_of(maker) is not None and maker.kind() != "aten::add"


def _reaches_group(value: Value) -> bool:
    """Whether an op of groups that computes something reads the value, or a view of it."""
    for node in (use.user for use in value.uses()):
        if viewed(node) is not None:
            if any(map(_reaches_group, outputs(node))):
                return True
        elif row_of(node) is not None:
            return True
    return False


def _write(writer: Writer, node: Node, unpack: Node) -> None:
    writer.place, writer.lines = unpack, node
    parts = outputs(unpack)
    whole, *given, dim = (Term(writer, value) for value in inputs(node))
    is_list = bool(given) and given[0].value.type().kind() == "ListType"
    how, widths = (_WIDTHS, given[0]) if is_list else (_HOW[node.kind()], given)
    for k, part in enumerate(parts):
        if not part.uses():
            continue
        numbers = [whole.sizes, widths, how, dim, len(parts), k]
        start = writer("tsfuser::part_start", *numbers)
        if how == _UNBOUND:
            made = whole.select(dim, start)
        else:
            made = whole.slice(dim, start, writer("tsfuser::part_end", *numbers), 1)
        made.value.setType(part.type())
        part.replaceAllUsesWith(made.value)
    unpack.destroy()
    node.destroy()
