"""Reductions. For now those that undo a broadcast in a backward graph."""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import INT64
from ..ir.fusion import Value
from .table import ALL, composite


@composite("aten::sum_to_size", dtypes=ALL, sizes="own", symbolic=("size",))
@composite("aten::_grad_sum_to_size", dtypes=ALL, sizes="own", symbolic=("size",))
def sum_to_size(b: Builder, self, size: "list | None") -> Value:
    """`self` summed over leading dims and over dims that become 1, so that its sizes are `size`"""
    if size is None:
        return self
    leading = len(self.dims) - len(size)
    if leading < 0:
        raise Refusal("sum_to_size to more dimensions")
    summed, kept = list(range(leading)), []
    for d, target in enumerate(size, leading):
        own = 1 if self.dims[d] is None else b.axis(self.dims[d]).extent
        if b.call.decide(sz.eq(target, own)):
            continue
        if self.dims[d] is None or not b.call.decide(sz.eq(target, 1)):
            raise Refusal("sum_to_size to sizes that do not broadcast to those of the operand")
        summed.append(d)
        kept.append(d)
    if not summed:
        return self
    dtype = INT64 if self.dtype.kind in "bi" else self.dtype
    return b.reduce("sum", "sum", self, summed, kept, dtype)
