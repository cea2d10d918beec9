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

from ..dynamo.tracing.decompositions import decompositions


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


def say_sizes(module: fx.GraphModule) -> None:
    """Sizes that `expand` has as numbers, as those of inputs of the same size, in the graph of one set of
    sizes. So `expand(x, [3, 8])` for a batch of 3 and of 5 is one graph, whose kernels are compiled once."""
    graph = module.graph
    values = {node: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}
    tensors = {node: tuple(value.shape) for node, value in values.items() if isinstance(value, torch.Tensor)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default):
        own = node.args[0].meta["val"].shape
        wanted = tuple(node.meta["val"].shape)
        sizes = list(node.args[1])
        for dim, size in enumerate(wanted):
            grows = dim < len(wanted) - len(own) or own[dim - len(wanted)] != size
            if grows and size > 1 and sizes[dim] == size:
                sizes[dim] = _size_of(tensors, wanted, dim, node)
        node.args = (node.args[0], sizes)


def _size_of(
    tensors: dict[fx.Node, tuple[int, ...]], wanted: tuple[int, ...], dim: int, reader: fx.Node
) -> fx.Node | int:
    """The size of `wanted` in `dim` as that of the input that is most like it; the number for none."""
    found = [
        ((shape == wanted, k - len(shape) == dim - len(wanted)), tensor, k)
        for tensor, shape in tensors.items()
        for k in range(len(shape))
        if shape[k] == wanted[dim]
    ]
    if not found:
        return wanted[dim]
    _, tensor, k = max(found, key=lambda entry: entry[0])
    with reader.graph.inserting_before(reader):
        node = reader.graph.call_function(torch.ops.aten.sym_size.int, (tensor, k))
    node.meta["val"] = wanted[dim]
    return node
