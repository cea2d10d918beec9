"""Sums of matrix products in which each product is added as soon as it is computed.

In: an FX graph, before it is translated; later the typed graph. Out: products that add to the sum so far, in
place. The gradient of a weight that is used many times, as by the steps of a recurrent network, is such a
sum. One kernel for all additions would need all products in memory at the same time. Before:

    a = mm(g1, x1);  b = mm(g2, x2);  s = a + b;  c = mm(g3, x3);  return s + c
becomes
    a = mm(g1, x1);  s = addmm(a, g2, x2);  return addmm(s, g3, x3)
and in the typed graph `addmm_`. A sum of two products that a kernel reads stays: that kernel adds them at no
cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....graph.wrapper import Graph, Node, inputs
from ....grouping.support import Refusals
from ..fx.insert import Insert, is_alike

aten = torch.ops.aten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FRESH = ("aten::mm", "aten::addmm")


@dataclass(frozen=True)
class _Sum:
    """An `add` node: it adds the product `mm` to `total`, which is an earlier product or another such node.
    If `turned`, both are transposed before."""

    total: fx.Node
    mm: fx.Node
    turned: bool


def add_as_made(module: fx.GraphModule) -> None:
    """Changes the module's graph."""
    found = _sums(module.graph)
    totals = {it.total for it in found.values()}
    made: dict[fx.Node, fx.Node] = {}
    for node, it in found.items():
        if node in totals or it.total in made or _is_returned(node):
            ops = Insert(it.mm, node)
            made[node] = ops(aten.addmm.default, made.get(it.total, it.total), *it.mm.args)
            node.replace_all_uses_with(ops(aten.t.default, made[node]) if it.turned else made[node])
    if made:
        module.graph.eliminate_dead_code()
        module.recompile()


def _sums(graph: fx.Graph) -> dict[fx.Node, _Sum]:
    """The `add` nodes of products, in order."""
    found: dict[fx.Node, _Sum] = {}
    made_at: dict[fx.Node, int] = {}  # position of a product; of a sum, that of its last product
    for at, node in enumerate(graph.nodes):
        if node.target is aten.mm.default:
            made_at[node] = at
        elif node.target is aten.add.Tensor and not node.kwargs:
            operands = [_untransposed(x, node) for x in node.args]
            known = sorted((x for x in operands if x[0] in made_at), key=lambda x: made_at[x[0]])
            if len(known) == 2 and _is_known(node, *known):
                (total, turned), (mm, _) = known
                found[node] = _Sum(total, mm, turned)
                made_at[node] = made_at[mm]
    return found


def _untransposed(operand: Any, reader: fx.Node) -> tuple[Any, bool]:
    """The operand without `t` nodes, and whether these transpose it; None if it has other readers."""
    turned = False
    while isinstance(operand, fx.Node) and list(operand.users) == [reader]:
        if operand.target is not aten.t.default:
            return operand, turned
        operand, reader, turned = operand.args[0], operand, not turned
    return None, turned


def _is_known(node: fx.Node, total: tuple[fx.Node, bool], product: tuple[fx.Node, bool]) -> bool:
    """Whether the node adds two matrices of the same sizes and dtype, the second of which is a product."""
    (first, turned), (second, turned_too) = total, product
    a, b, result = (n.meta["val"] for n in (first, second, node))
    if first is second or second.target is not aten.mm.default or turned != turned_too:
        return False
    if not a.dtype == b.dtype == result.dtype or result.dtype not in _DTYPES or a.device != b.device:
        return False
    return is_alike(a, b) and is_alike(a.t() if turned else a, result)


def _is_returned(node: fx.Node) -> bool:
    """Whether nothing is computed from the node."""
    return all(u.op == "output" or (u.target is aten.t.default and _is_returned(u)) for u in node.users)


def add_in_place(graph: Graph, refusals: Refusals) -> None:
    """Makes an `addmm` work in place if its first operand is a new product that nobody else reads. Changes
    the graph's top block, whose nodes must stay in their order from then on."""
    found = [node for node in graph.findAllNodes("aten::addmm", False) if _is_free(node)]
    for node in found:
        made = graph.create("aten::addmm_", inputs(node), 1)
        made.copyMetadata(node)
        made.insertBefore(node)
        refusals.add(made, refusals.reason(node))
        node.output().replaceAllUsesWith(made.inputsAt(0))  # a result in place might be a view of an input
        node.destroy()


def _is_free(node: Node) -> bool:
    """Whether the result of an `addmm` may be in the memory of its first operand."""
    total, result = node.inputsAt(0), node.output()
    if total.node().kind() not in _FRESH or len(total.uses()) != 1:
        return False
    a, b = total.type(), result.type()
    return a.sizes() is not None and (a.sizes(), a.dtype()) == (b.sizes(), b.dtype())
