"""The fusion executor: what thunder asks of it.

In: a trace. Out: the trace with `tsfuser0(...)`, `tsfuser1(...)` in the places of the ops that it claims. A
region is made where two ops of it compute something: one alone is no faster here than in torch, and views
have nothing to compute at all. What is claimed and in no region is thunder's torch executor's. Example:
`view` and `transpose` of one tensor make no region; `mul` and `add` do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from thunder.core import prims, utils
from thunder.core.compile_data import get_compile_option
from thunder.core.proxies import unvariableify
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import dce
from thunder.executors.data_dependent_partition import Node, consecutive_fusion, dataflow_fusion
from thunder.executors.passes import update_fusion_call_ctx
from thunder.executors.utils import Region
from thunder.extend import FusionExecutor

from ...version import __version__
from . import dropout
from .claims import EFFECTS, WRITES, Claims, passable
from .compared import rematerialized, values_compared
from .region import RegionCall
from .roundings import Roundings, mark_casts, mark_stored

NAME = "tsfuser"
_LEAST = 2  # ops of a region that compute


class TsfuserExecutor(FusionExecutor):
    """Claims what torch runs as ops that have rows in the op table, and makes regions of it."""

    def __init__(self):
        super().__init__(NAME, version=__version__)
        self._claims = Claims()
        dropout.register(self)
        self._roundings = Roundings(self)

    def can_execute(self, bsym: BoundSymbol) -> bool:
        """Whether the symbol, as a whole, is claimed."""
        return super().can_execute(bsym) or self._claims.claim(bsym).reason is None

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """The same: a composite with parts that are not claimed is taken apart."""
        return self.can_execute(bsym)

    def fuse(self, region: Region, fusion_counter: int) -> BoundSymbol:
        """The symbol that stands for a region."""
        inputs = [unvariableify(x) for x in region.inputs]
        outputs = [unvariableify(x) for x in region.outputs]
        name = f"{NAME}{fusion_counter}"
        call = RegionCall(name, region.bound_symbols, inputs, outputs, self._roundings)
        return self.register_temporary_operation(
            name, call, inputs=inputs, outputs=outputs, bsyms=list(region.bound_symbols)
        )

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The trace with regions."""
        start = time.perf_counter_ns()
        producers, consumers = utils.producers_and_consumers(trace)
        mark_casts(trace, lambda symbol: self._claims.claim(symbol).is_float_op)
        changes = any(_writes(symbol) for symbol in trace.bound_symbols)
        # thunder's default would leave `silu(linear(x)) * linear(x)` in two parts
        asked = get_compile_option(
            "fusion_type", "Which symbols join a region: consecutive ones, or dataflow"
        )
        fuse = consecutive_fusion if changes or asked == "consecutive" else dataflow_fusion
        groups = fuse(trace, self._go_together)
        made: list[BoundSymbol] = []
        count = 0
        for symbols in groups:
            region = Region(producers, consumers, symbols) if self._is_worth_it(symbols) else None
            if region is None or not _can_be_called(region):
                made.extend(symbols)
            else:
                made.append(self.fuse(region, count))
                count += 1
        fused = from_trace(trace)
        fused.bound_symbols = made
        if not changes:  # what is computed again behind a write could read what was written
            fused = rematerialized(fused, values_compared(trace, self._claims.claim))
        fused = dce(fused)
        mark_stored(fused)
        fused = update_fusion_call_ctx(fused)
        took = (time.perf_counter_ns() - start) // 1_000_000
        fused.set_provenance(TraceProvenance(f"Fusion by tsfuser (took {took} milliseconds)"))
        return fused

    def _go_together(self, a: Node, b: Node) -> bool:
        return self._may_join(a) and self._may_join(b)

    def _may_join(self, node: Node) -> bool:
        return len(node.group_bsyms) > 1 or self.can_fuse(node.group_bsyms[0])

    def _is_worth_it(self, symbols: Sequence[BoundSymbol]) -> bool:
        found = [self._claims.claim(symbol) for symbol in symbols]
        return all(claim.reason is None for claim in found) and sum(claim.ops for claim in found) >= _LEAST


def _writes(symbol: BoundSymbol) -> bool:
    """Whether the symbol changes an operand: then others keep their order, which data do not say."""
    return symbol.sym.id != prims.PrimIDs.RETURN and (
        has_tags(symbol, EFFECTS) or symbol.sym.id in WRITES or any(map(_writes, symbol.subsymbols))
    )


def _can_be_called(region: Region) -> bool:
    return bool(region.outputs) and all(passable(unvariableify(x)) for x in (*region.inputs, *region.outputs))
