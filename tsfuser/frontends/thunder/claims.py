"""Which symbols of a trace are claimed.

In: a bound symbol. Out: how many ops that compute torch runs for it, all of which the op table has; None
where it is left to thunder's other executors. Whole composites are asked about first, as thunder asks; what
is not claimed is taken apart, and its parts are asked about. Example: `softmax` is claimed as
`aten::_softmax`; of `linear` nothing is.
"""

from __future__ import annotations

from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, has_tags
from torch._subclasses.fake_tensor import FakeTensorMode

from ...graph.rows import Knowledge, row_of
from ...graph.wrapper import Graph, Node, is_tensor, outputs
from ...grouping.support import examine
from ...planning import interrupts
from ..dynamo.simplify import simplify
from ..dynamo.translate import translate
from . import dropout
from .retrace import function_of, graph_of

#: Symbols that change an operand, and the mark that thunder sets where others see that.
WRITES = {PrimIDs.COPY_, PrimIDs.UPDATE_ALIASES}
EFFECTS = {OpTags.IN_PLACE, OpTags.DONT_DCE}
_NOT_OURS = EFFECTS | {OpTags.RANDOM_OP, OpTags.DEVICE_SYNC_OP}
_NUMBERS = (int, float, bool)
_MOST = 4096  # answers that are kept


class Claims:
    """Answers, each kept for symbols that differ in nothing but names."""

    def __init__(self):
        self._known: dict[Any, int | None] = {}

    def computing_ops(self, symbol: BoundSymbol) -> int | None:
        """How many ops of torch compute elements, and do not just view them; None: not claimed."""
        if not _may_be_asked(symbol):
            return None
        key = _key(symbol)
        if key is None:
            return _computing_ops(symbol)
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _computing_ops(symbol)
        return self._known[key]


def passable(proxy: Proxy) -> bool:
    """Whether a region can take or return such a thing: a plain tensor, or a number."""
    return type(proxy) is TensorProxy or (
        isinstance(proxy, NumberProxy) and isinstance(proxy.value, _NUMBERS)
    )


def _may_be_asked(symbol: BoundSymbol) -> bool:
    sym, results = symbol.sym, symbol.flat_outs
    if sym.id in dropout.NAMES:
        return True
    if sym.is_fusion or sym.executor is not None or sym.python_impl is not None:
        return False
    if sym.id in WRITES or has_tags(symbol, _NOT_OURS):
        return False
    operands = symbol.flat_proxy_args
    return (
        any(type(proxy) is TensorProxy for proxy in operands)
        and all(map(passable, operands))
        and bool(results)
        and all(type(result) is TensorProxy for result in results)
    )


def _key(symbol: BoundSymbol) -> Any:
    """What the answer depends on; None where that cannot be said."""
    flat, form = tree_flatten((symbol.args, symbol.kwargs))
    inner = tuple(part.sym.id for part in symbol.subsymbols)
    key = (symbol.sym.id, symbol.sym.name, inner, str(form), tuple(map(_described, flat)))
    try:
        hash(key)
    except TypeError:
        return None
    return key if symbol.sym.id is not None else None


def _described(operand: Any) -> Any:
    if isinstance(operand, TensorProxy):
        return (sizes_of(operand), operand.dtype, str(operand.device))
    if isinstance(operand, NumberProxy):
        return ("number", type(operand.value), operand.value)
    return (type(operand), operand)


def sizes_of(proxy: TensorProxy) -> tuple[int, ...]:
    """The sizes of the traced call, also where they are symbols."""
    return tuple(int(getattr(size, "value", size)) for size in proxy.shape)


def _computing_ops(symbol: BoundSymbol) -> int | None:
    operands = list({proxy.name: proxy for proxy in symbol.flat_proxy_args}.values())
    results = list({proxy.name: proxy for proxy in symbol.flat_proxy_outs}.values())
    try:
        module = graph_of(function_of([symbol], operands, results), [_example(proxy) for proxy in operands])
        if symbol.sym.id not in dropout.NAMES and any(map(_is_random, module.graph.nodes)):
            return None
        simplify(module)
        translation = translate(module)
        return None if translation.foreign else _count(translation.graph)
    except Exception as error:  # what thunder's torch executor cannot run on such tensors is not ours either
        interrupts.pass_on(error)
        return None


def _example(proxy: Proxy) -> Any:
    if not isinstance(proxy, TensorProxy):
        return proxy.value
    with FakeTensorMode():
        return torch.empty(
            sizes_of(proxy), dtype=dtypes.to_torch_dtype(proxy.dtype), device=to_torch_device(proxy.device)
        )


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _count(graph: Graph) -> int | None:
    knowledge, count = Knowledge(), 0
    for node in graph.nodes():
        if not any(map(is_tensor, outputs(node))):
            continue
        if examine(node, knowledge).reason is not None:
            return None
        count += _computes(node)
    return count


def _computes(node: Node) -> bool:
    row, _ = row_of(node)
    return not row.is_view
