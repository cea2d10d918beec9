"""Where the 16-bit values of a trace are rounded.

A region computes in float32 and rounds a 16-bit value where it stores it. Not in between: thunder's rules
cast between 16 bits and float32 at each step, which is where most of the error would come from. Two casts
round all the same: one that the program asks for, and one whose float32 operand the program reads, too
(`p - p.bfloat16().float()` is what rounding loses). And what a region stores is rounded for its readers in
it, also where another region computes it again: the statistics that a forward saves, and the values from
which the backward subtracts them, are of the same numbers.

In: a trace, forward and backward together. Out: marks on its symbols. They are tags, as thunder makes the
callable of a region several times, and copies symbols from one region to another. Then, for one region: its
symbols, with `tsfuser_rounded` and `tsfuser_unrounded` where the marks say so. Example, a gradient:

    t1 = prims.convert_element_type(t0, dtypes.bfloat16)  ->  t1 = tsfuser_unrounded(t0, dtypes.bfloat16)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import FusionExecutor

_NARROW = (dtypes.float16, dtypes.bfloat16)
BoundSymbolTag.register_tag("TSFUSER_ROUNDED")
BoundSymbolTag.register_tag("TSFUSER_UNROUNDED")
_ROUNDED, _UNROUNDED = BoundSymbolTag("TSFUSER_ROUNDED"), BoundSymbolTag("TSFUSER_UNROUNDED")
_BACKWARD, _AGAIN = BoundSymbolTag("BACKWARD"), BoundSymbolTag("RECOMPUTE_IN_BACKWARD")


class Roundings:
    """The two symbols, and what puts them into a region."""

    def __init__(self, executor: FusionExecutor):
        self._rounded: Symbol = executor.register_operator(
            "tsfuser_rounded", meta=lambda a: TensorProxy(like=a), fn=torch.ops.tsfuser.rounded
        )
        self._unrounded: Symbol = executor.register_operator(
            "tsfuser_unrounded", meta=lambda a, dtype: TensorProxy(like=a, dtype=dtype), fn=_unrounded
        )

    def put_in(self, symbols: Sequence[BoundSymbol]) -> list[BoundSymbol]:
        """The symbols of a region as their marks say."""
        read = {proxy.name for symbol in symbols for proxy in symbol.flat_proxy_args}
        made: list[BoundSymbol] = []
        with tracectx(TraceCtx(None)):
            for symbol in symbols:
                if _ROUNDED in symbol.tags:
                    made += self._with_rounded_results(symbol, read)
                elif _UNROUNDED in symbol.tags:
                    made.append(self._unrounded.bind(*symbol.args, output=symbol.output))
                else:
                    made.append(symbol)
        return made

    def _with_rounded_results(self, symbol: BoundSymbol, read: set[str]) -> list[BoundSymbol]:
        found = [x for x in symbol.flat_proxy_outs if _is_narrow(x) and x.name in read]
        before = {x.name: x.replace_name(f"{x.name}_before") for x in found}
        swap = {variableify(x): before[x.name] for x in found}
        whole = symbol.from_bsym_swap_proxies(swap, skip_inputs=True) if found else symbol
        return [whole, *(self._rounded.bind(before[x.name], output=x) for x in found)]


def mark_casts(trace: TraceCtx, is_float_op: Callable[[BoundSymbol], bool]) -> None:
    """Marks the casts to 16 bits of a trace without regions. `is_float_op`: whether torch has one op for a
    symbol, elementwise, with a float32 result."""
    makers = {proxy.name: symbol for symbol in trace.bound_symbols for proxy in symbol.flat_proxy_outs}
    readers = defaultdict(list)
    for symbol in trace.bound_symbols:
        for proxy in symbol.flat_proxy_args:
            readers[proxy.name].append(symbol)
    for cast in trace.bound_symbols:
        source, wide = _cast_from(cast, *_NARROW), cast.args[0] if cast.args else None
        if source is not dtypes.float32:
            continue
        if _is_gradient(cast):  # of a rule: what a program writes is `to`, `bfloat16` or `half`
            cast.tags.add(_UNROUNDED)
        elif _is_of_16_bits(makers.get(wide.name), makers, cast.output.dtype, is_float_op):
            others = [x for x in readers[wide.name] if _cast_from(x, cast.output.dtype) is None]
            cast.tags.add(_UNROUNDED if all(map(_is_gradient, others)) else _ROUNDED)


def mark_stored(trace: TraceCtx) -> None:
    """Marks what regions store, in all regions of a trace that compute it."""
    regions = [symbol for symbol in trace.bound_symbols if symbol.sym.is_fusion]
    stored = {proxy.name for region in regions for proxy in region.flat_proxy_outs}
    for region in regions:
        for symbol in region.subsymbols:
            if any(_is_narrow(proxy) and proxy.name in stored for proxy in symbol.flat_proxy_outs):
                symbol.tags.add(_ROUNDED)


def _is_of_16_bits(
    op: BoundSymbol | None,
    makers: dict[str, BoundSymbol],
    dtype: dtypes.dtype,
    is_float_op: Callable[[BoundSymbol], bool],
) -> bool:
    """Whether `op`, of float32, is one of 16-bit values that thunder has taken apart into casts around it."""
    if op is None or _cast_from(op, dtypes.float32) is dtype:
        return op is not None
    operands = [x for x in op.flat_proxy_args if isinstance(x, TensorProxy) and x.dtype is not dtypes.bool8]
    makers_of = [makers.get(x.name) for x in operands]
    casts = all(maker is not None and _cast_from(maker, dtypes.float32) is dtype for maker in makers_of)
    return bool(operands) and casts and is_float_op(op)


def _cast_from(symbol: BoundSymbol, *wanted: dtypes.dtype) -> dtypes.dtype | None:
    """The dtype that thunder casts from, where the symbol is a cast of it to one of `wanted`."""
    if symbol.sym.id is not PrimIDs.CONVERT_ELEMENT_TYPE or not isinstance(symbol.args[0], TensorProxy):
        return None
    return (
        dtypes.to_strong_dtype(symbol.args[0].dtype)
        if dtypes.to_strong_dtype(symbol.output.dtype) in wanted
        else None
    )


def is_widening(symbol: BoundSymbol) -> bool:
    """Whether the symbol casts 16 bits to float32."""
    return _cast_from(symbol, dtypes.float32) in _NARROW


def _is_gradient(symbol: BoundSymbol) -> bool:
    """Whether a rule for gradients has made the symbol; unknown for those computed again."""
    return _BACKWARD in symbol.tags and _AGAIN not in symbol.tags


def _is_narrow(proxy: Any) -> bool:
    return isinstance(proxy, TensorProxy) and dtypes.to_strong_dtype(proxy.dtype) in _NARROW


def _unrounded(a: torch.Tensor, dtype: dtypes.dtype) -> torch.Tensor:
    return torch.ops.tsfuser.unrounded(a, dtypes.to_torch_dtype(dtype))
