"""Values that no region must compute again, since they are compared with a saved result.

In: a trace, forward and backward together. Out: the names of the values that `graph/compared.py` finds, and
the trace in which thunder has regions compute others again. Example, the gradient of `y = exp(x); m =
amax(y)`: the backward takes `y`, or `eq(y, m)`, from the forward.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.core import dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.rematerialization import rematerialize
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...graph.compared import Step, met_again
from .claims import Claim
from .roundings import is_widening

_STAYS = OpTags.RANDOM_OP  # thunder computes nothing again that has this tag


def values_compared(trace: TraceCtx, claim: Callable[[BoundSymbol], Claim]) -> set[str]:
    """The names, of a trace without regions."""
    symbols = trace.bound_symbols
    makers: dict[str, int] = {}
    steps: list[Step | None] = []
    for k, symbol in enumerate(symbols):
        steps.append(_step(symbol, makers, claim))
        if steps[-1] is not None:
            makers |= {proxy.name: k for proxy in symbol.flat_proxy_outs}
    found: set[str] = set()
    for value in {value for value, _ in met_again(steps)}:
        while is_widening(symbols[value]) and symbols[value].args[0].name in makers:
            value = makers[symbols[value].args[0].name]  # the narrower value takes fewer bytes to save
        found.update(proxy.name for proxy in symbols[value].flat_proxy_outs)
    return found


def _step(symbol: BoundSymbol, makers: dict[str, int], claim: Callable[[BoundSymbol], Claim]) -> Step | None:
    given = {proxy.name for proxy in symbol.flat_proxy_args}
    if not given or all(proxy.name in given for proxy in symbol.flat_proxy_outs):
        return None
    known = claim(symbol)
    floating = {x.name for x in symbol.flat_proxy_args if isinstance(x, TensorProxy) and _has_fractions(x)}
    compared = floating if known.jumps else set()
    operands, jumps = (
        tuple(sorted({makers[x] for x in names & makers.keys()})) for names in (given, compared)
    )
    return Step(operands, jumps, known.is_elementwise, known.selects)


def _has_fractions(proxy: TensorProxy) -> bool:
    return dtypes.is_float_dtype(proxy.dtype) or dtypes.is_complex_dtype(proxy.dtype)


def rematerialized(trace: TraceCtx, saved: set[str]) -> TraceCtx:
    """The trace of which regions compute values of others again, but none of those `saved`."""
    marked = [
        symbol
        for region in trace.bound_symbols
        if region.sym.is_fusion
        for symbol in region.subsymbols
        if any(proxy.name in saved for proxy in symbol.flat_proxy_outs)
    ]
    for symbol in marked:
        symbol.tags.add(_STAYS)
    try:
        return rematerialize(trace)
    finally:
        for symbol in marked:
            symbol.tags.discard(_STAYS)
