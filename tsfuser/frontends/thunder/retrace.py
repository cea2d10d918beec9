"""Symbols of a trace, as torch runs them.

In: bound symbols, the proxies that they read and those that are asked for. Out: a Python function, which
calls what thunder's own torch executor would call; and, for given operands, its FX graph of ATen ops. So
thunder alone says what a symbol means (its casts, its broadcasts, its divisions of integers), and the op
table what can be fused. Example: `torch.nn.functional.silu(x)` -> `aten.silu.default(x)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.executors.torchex import ex as torch_executor
from thunder.executors.torchex import no_autocast
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..dynamo.decompositions import decompositions


def function_of(
    symbols: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]
) -> Callable[..., Any]:
    """A function of the inputs that returns the outputs, by torch's ops."""
    trace = TraceCtx(None)
    trace.args, trace.kwargs = list(inputs), {}
    trace.names = {proxy.name for proxy in inputs}
    with tracectx(trace):
        for proxy in inputs:
            prims.unpack_trivial(proxy, name=proxy.name)
    trace.bound_symbols += [*symbols, prims.python_return.bind(list(outputs), output=None)]
    for symbol in symbols:
        for inner in (symbol, *symbol.subsymbols):
            for proxy in inner.flat_proxy_outs:
                if proxy.name not in trace.names:
                    trace.add_name(proxy.name)
    trace._siginfo = SigInfo("region")
    trace._siginfo.args = [(proxy.name, None) for proxy in inputs]
    for_torch = transform_for_execution(trace, executors_list=(torch_executor,))
    return torch.no_grad()(no_autocast(for_torch.python_callable(include_decorators=False)))


def graph_of(function: Callable[..., Any], operands: Sequence[Any]) -> fx.GraphModule:
    """What the function does with such operands: with tensors of these sizes, strides, dtypes and devices, of
    which no element is read, and with these very numbers."""
    with FakeTensorMode() as mode:
        fakes = [_fake(operand, mode) for operand in operands]
        return make_fx(function, decomposition_table=decompositions())(*fakes)


def _fake(operand: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device=operand.device)
