"""Turns in-place ops into their functional forms, where no one can see the difference.

Before: `y = x * 2; y += 1`. After: `y = x * 2; z = y + 1`. `x += 1` on a graph input stays: the caller sees
it. So does `y += w` where `y + w` would be of another dtype than `y`, and what is of an unknown one. A later
call may bring operands of other dtypes: `tsfuser::as_written` follows, which casts to the dtype of `y`, or
raises what the op in place raises, as `abs_` does for complex numbers. It does not follow an op that leaves
each dtype as it is.

This pass is torch's own RemoveTensorMutation with a choice of nodes: alias analysis says what nobody can see,
and types say which ops keep the dtype. Most is rewritten earlier, before torch profiles and differentiates
the graph (csrc_stubs/torchscript/in_place.cpp), where that pass cannot run: it takes nodes out of the graph
that torch is walking over, there are no types yet, and what it makes has to suit autodiff. That step has a
rule of its own, which needs neither, and is narrower: the target is new by the kind of its maker, and the op
is the first to read it. `as_written` follows behind autodiff (written_dtypes.cpp). Which kinds are in place,
and new, both are told from here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from .. import _C, options
from ..ops import table, without_row
from ..ops.table import FLOATING
from .effects import Effects
from .rows import Knowledge, arguments, row_of
from .types import common_device, infer_missing_types
from .wrapper import (
    Graph,
    Node,
    all_blocks,
    all_nodes,
    constant_of,
    inputs,
    is_constant,
    is_tensor,
    nodes_of,
    schema,
)


def _in_place_kinds() -> tuple[str, ...]:
    names = dict.fromkeys(
        f"{row.name}_" for row in table.all_rows() if not row.is_view and not row.in_place_differs
    )
    return tuple(name for name in names if torch._C._jit_get_schemas_for_operator(name))


AS_WRITTEN = "tsfuser::as_written"
KINDS = _in_place_kinds()  #: the in-place forms of the ops in the table, `aten::add_`
#: In-place kinds that the extension rewrites, before any dtype is known.
EARLY = (
    *dict.fromkeys(f"{row.name}_" for row in table.all_rows() if row.in_place_early),
    *without_row.IN_PLACE_EARLY,
)


def retyped_kinds() -> list[str]:
    """Ops that the extension makes of those, whose result may have another dtype than their tensor."""
    rows = [row for row in table.all_rows() if row.in_place_early and row.family != "random"]
    rows = [row for row in rows if row.dtype_rule != "first" and not set(row.dtypes) <= set(FLOATING)]
    return sorted({row.name for row in rows})


def sized_kinds() -> list[str]:
    """Ops whose results have sizes that follow from their operands' sizes, and from numbers."""
    return sorted({row.name for row in table.all_rows()} | without_row.FRESH | without_row.SIZED)


@cache
def fresh_kinds() -> frozenset[str]:
    """Ops whose results are new tensors whatever the arguments: no view, no cast, which may hand its operand
    on, and no dropout, which does outside of training."""
    with_rows = {row.name for row in table.all_rows() if not row.is_view} - {
        row.name for row in table.all_rows() if not row.fresh
    }
    return frozenset(
        name
        for name in with_rows | without_row.FRESH
        if not any(
            r.alias_info is not None
            for schema in torch._C._jit_get_schemas_for_operator(name)
            if not name.endswith("_") and not any(a.is_out for a in schema.arguments)
            for r in schema.returns
        )
    )


def only_in_place() -> frozenset[str]:
    """In-place kinds that stay, as their random numbers are not those of their functional form: eager's
    dropout in place draws a Bernoulli tensor."""
    rows = table.all_rows() if options.enabled("eager_random") else ()
    return frozenset(f"{row.name}_" for row in rows if row.family == "random")


def functionalize(graph: Graph) -> Graph:
    """Rewrites the in-place nodes of `KINDS` whose target is made in the graph and aliased by nothing else;
    torch's alias analysis decides. A graph about which that analysis is wrong is left alone."""
    excluded = only_in_place()
    kinds = [kind for kind in KINDS if kind not in excluded]
    wanted = any(nodes_of(block, kinds) for block in all_blocks(graph))
    if not wanted or Effects(graph).misled:
        return graph
    changed = True
    while changed:  # later rewrites depend on the types of earlier ones
        knowledge = Knowledge()
        nodes = [node for block in all_blocks(graph) for node in nodes_of(block, kinds)]
        nodes = [
            node
            for node in nodes
            if not is_identity(node.inputsAt(0).node()) and _keeps_dtype(node, knowledge)
        ]
        before = {node.output().unique() for node in _with_one_result(graph)}
        changed = bool(nodes) and _C.remove_tensor_mutation(graph, nodes)
        if changed:
            for node in _with_one_result(graph):
                if node.output().unique() in before:
                    continue
                if node.kind() == "aten::full_like":
                    _fill(graph, node)
                elif _may_change_dtype(node):
                    _cast_to_target(graph, node)
            infer_missing_types(graph)
    return graph


def is_identity(node: Node) -> bool:
    """Whether it is `x * 1`, `x / 1`, `x + 0` or `x - 0`. Where nothing writes to its result, as in a
    fallback graph, torch's peephole pass takes it for `x`, whatever the dtypes: of bools it is a tensor of
    integers."""
    number = without_row.IDENTITIES.get(node.kind())
    if number is None or not is_constant(node.inputsAt(1)):
        return False
    found = constant_of(node.inputsAt(1))
    return type(found) in (int, float) and found == number


def _with_one_result(graph: Graph) -> list[Node]:
    return [node for node in all_nodes(graph) if node.outputsSize() == 1]


def _fill(graph: Graph, node: Node) -> None:
    """`full_like`, which torch makes of `fill_`, -> `fill`, whose result requires a gradient, of zeros, where
    the target does."""
    made = graph.create("aten::fill", inputs(node)[:2], 1)
    made.copyMetadata(node)
    made.insertBefore(node)
    made.output().setType(node.output().type())
    node.output().replaceAllUsesWith(made.output())
    node.destroy()


def _cast_to_target(graph: Graph, node: Node) -> None:
    """Readers of a functional op read its result in the dtype of the in-place op's target. The profiled
    operands have one dtype; those of a later call may have several."""
    cast = graph.create(AS_WRITTEN, [node.output(), node.inputsAt(0)], 1)
    cast.copyMetadata(node)
    node.output().replaceAllUsesWith(cast.insertAfter(node).output())
    cast.replaceInput(0, node.output())


def _may_change_dtype(node: Node) -> bool:
    """Whether the result of a functional op may have another dtype than its first operand."""
    row, found = row_of(node) or (None, None)
    tensors = sum(map(is_tensor, inputs(node)))
    if row is None or tensors != 1:
        return row is not None and tensors > 1
    given = arguments(node, found, Knowledge())
    first = found.arguments[0]
    for dtype in row.dtypes:
        results = row.infer({**given, first: replace(given[first], dtype=dtype)})
        if isinstance(results, tuple) and results[0] is not None and results[0][0] != dtype:
            return True
    return False


def _keeps_dtype(node: Node, knowledge: Knowledge) -> bool:
    """Whether the functional form gives a tensor of the dtype that the in-place op leaves in its target."""
    found = schema(node)
    functional = _functional(found.name, found.overload) if found else None
    device = common_device(node, knowledge)
    if functional is None or device is None or len(functional[1]) != len(found.arguments):
        return False
    row, names = functional
    given = zip(names, arguments(node, found, knowledge).values())
    results = row.infer(dict(given), device, knowledge.default)
    target = knowledge.facts(node.inputsAt(0)).dtype
    return isinstance(results, tuple) and results[0] is not None and results[0][0] == target


@cache
def _functional(name: str, overload: str) -> tuple[table.Row, tuple[str, ...]] | None:
    """The row of an in-place op without its underscore, and the names of its arguments, which may be others
    than the in-place op's."""
    for known in (overload, f"Tensor_{overload}"):  # pow_.Tensor, pow.Tensor_Tensor
        row = table.find(name[:-1], known)
        for form in torch._C._jit_get_schemas_for_operator(name[:-1]) if row else ():
            if form.overload_name == known:
                return row, tuple(argument.name for argument in form.arguments)
    return None


def is_idle_cast(node: Node) -> bool:
    """Whether the node is a cast of autocast that is constantly off."""
    if not node.kind().startswith("aten::_autocast_to_"):
        return False
    return all(is_constant(v) and constant_of(v) is False for v in inputs(node)[1:3])
