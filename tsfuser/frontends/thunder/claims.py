"""Which symbols of a trace are claimed.

In: a bound symbol. Out: a `Claim`: how many ops that compute torch runs for it, all of which the op table
has; or the reason why it is left to thunder's other executors. Whole composites are asked about first, as
thunder asks; what is not claimed is taken apart, and its parts are asked about. Example: `softmax` is claimed
as `aten::_softmax`; `linear` is not: "aten::addmm is not in the op table".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, tracectx
from torch._subclasses.fake_tensor import FakeTensorMode

from ... import log
from ...graph.rows import Knowledge, row_of
from ...graph.wrapper import Graph, Node, is_tensor, outputs
from ...grouping.support import examine
from ...planning import interrupts
from ..dynamo.fx.compared import compared_operands, is_elementwise, selects
from ..dynamo.rewrites.simplify import simplify
from ..dynamo.translation.translate import translate
from . import dropout
from .narrow import is_float_op
from .retrace import function_of, graph_of

#: Symbols that change an operand, and the mark that thunder sets where others see that.
WRITES = {PrimIDs.COPY_, PrimIDs.UPDATE_ALIASES}
EFFECTS = {OpTags.IN_PLACE, OpTags.DONT_DCE}
_NOT_OURS = EFFECTS | {OpTags.RANDOM_OP, OpTags.DEVICE_SYNC_OP}
_NUMBERS = (int, float, bool)
_MOST = 4096  # answers that are kept


@dataclass(frozen=True)
class Claim:
    """`ops`: how many ops of torch compute elements, and do not just view them; `reason`: why the symbol is
    not claimed, None where it is; `is_float_op`: it is one op, elementwise, with a float32 result. The others
    are known of all symbols that torch can trace: `jumps`: whether it jumps in its operands; `is_elementwise`
    and `selects`: see `graph.compared.Step`."""

    ops: int = 0
    reason: str | None = None
    is_float_op: bool = False
    jumps: bool = False
    is_elementwise: bool = False
    selects: bool = False


class Claims:
    """Answers, each kept for symbols that differ in nothing but names."""

    def __init__(self):
        self._known: dict[Any, Claim] = {}

    def claim(self, symbol: BoundSymbol) -> Claim:
        """What the symbol is claimed as, or why it is not."""
        with tracectx(
            TraceCtx(None)
        ):  # under symbolic values, a proxy asked for its shape adds a symbol to the trace
            return self._claim(symbol)

    def _claim(self, symbol: BoundSymbol) -> Claim:
        reason = _out_of_question(symbol)
        if reason is not None:
            return Claim(reason=reason)
        key = _key(symbol)
        if key is None:
            return _claim(symbol)
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _claim(symbol)
            if log.enabled("partition", log.UPDATE) and self._known[key].reason:
                text = f"{symbol.sym.name} is not fused: {self._known[key].reason}"
                log.write("partition", text, str(symbol).rstrip(), log.UPDATE)
        return self._known[key]


def passable(proxy: Proxy) -> bool:
    """Whether a region can take or return such a thing: a plain tensor, or a number."""
    return type(proxy) is TensorProxy or (
        isinstance(proxy, NumberProxy) and isinstance(proxy.value, _NUMBERS)
    )


def _out_of_question(symbol: BoundSymbol) -> str | None:
    """Why nothing more is asked about a symbol; None where there is more to ask."""
    sym, operands, results = symbol.sym, symbol.flat_proxy_args, symbol.flat_outs
    if sym.id in dropout.NAMES:
        return None
    if sym.id == dropout.torchs_dropout.id:  # claimed as a whole, it would get the gradient rule, which draws
        return "a dropout that draws no mask, or one with numbers that vary, is thunder's"
    if sym.is_fusion or sym.executor is not None or sym.python_impl is not None:
        return "another executor, or Python, runs it"
    if sym.id in WRITES or has_tags(symbol, _NOT_OURS):
        return "it changes an operand, waits for the device, or draws random numbers"
    if not any(type(proxy) is TensorProxy for proxy in operands):
        return "it takes no tensor"
    if not all(map(passable, operands)):
        return "it takes something besides tensors and numbers"
    if not results or not all(type(result) is TensorProxy for result in results):
        return "it returns something besides tensors"
    return None


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


def _claim(symbol: BoundSymbol) -> Claim:
    operands = list({proxy.name: proxy for proxy in symbol.flat_proxy_args}.values())
    results = list({proxy.name: proxy for proxy in symbol.flat_proxy_outs}.values())
    try:
        module = graph_of(function_of([symbol], operands, results), [_example(proxy) for proxy in operands])
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        facts: dict[str, Any] = {
            "jumps": any(map(compared_operands, calls)),
            "is_elementwise": all(map(is_elementwise, calls)),
            "selects": any(map(selects, calls)),
        }
        if symbol.sym.id not in dropout.NAMES and any(map(_is_random, module.graph.nodes)):
            return Claim(reason="it draws random numbers", **facts)
        whole = len(calls) == 1 and is_float_op(calls[0])
        simplify(module)
        translation = translate(module)
        if translation.foreign:
            return Claim(reason=next(iter(translation.foreign.values())), **facts)
        return replace(_of_ops(translation.graph), is_float_op=whole, **facts)
    except Exception as error:  # what thunder's torch executor cannot run on such tensors is not ours either
        interrupts.pass_on(error)
        return Claim(reason=f"torch cannot trace it ({type(error).__name__}: {error})".split("\n")[0])


def _example(proxy: Proxy) -> Any:
    if not isinstance(proxy, TensorProxy):
        return proxy.value
    with FakeTensorMode():
        return torch.empty(
            sizes_of(proxy), dtype=dtypes.to_torch_dtype(proxy.dtype), device=to_torch_device(proxy.device)
        )


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _of_ops(graph: Graph) -> Claim:
    knowledge, count = Knowledge(), 0
    for node in graph.nodes():
        if not any(map(is_tensor, outputs(node))):
            continue
        reason = examine(node, knowledge).reason
        if reason is not None:
            return Claim(reason=reason or f"{node.kind()} computes no tensor")
        count += _computes(node)
    return Claim(count)


def _computes(node: Node) -> bool:
    row, _ = row_of(node)
    return not row.is_view
