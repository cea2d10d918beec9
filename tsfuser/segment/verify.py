"""What must hold for every Segment.

In: a Segment. Out: None, or a sentence that names the first fault. Tests run it after each cut.
"""

from __future__ import annotations

from ..ir.fusion import Value
from .records import Segment


def verify(segment: Segment) -> str | None:
    """None if every value is loaded or computed before it is used or stored, and every axis is one of the
    segment's."""
    known: dict[str, Value] = {}
    for buffer in (*segment.loads, *segment.stores):
        if len(buffer.strides) != len(buffer.value.dims):
            return f"{buffer.value.name} has {len(buffer.value.dims)} dims and {len(buffer.strides)} strides"
    for buffer in segment.loads:
        if buffer.value.name in known:
            return f"{buffer.value.name} is loaded twice"
        known[buffer.value.name] = buffer.value
    for op in segment.ops:
        for operand in op.operands:
            if not operand.is_number and known.get(operand.name) != operand:
                return f"{op.output.name} uses {operand.name} before it is loaded or computed"
        if op.output.name in known:
            return f"{op.output.name} is defined twice"
        known[op.output.name] = op.output
    for buffer in segment.stores:
        if known.get(buffer.value.name) != buffer.value:
            return f"{buffer.value.name} is stored but not computed"
        if buffer.index < 0:
            return f"{buffer.value.name} is stored to a temporary that nobody allocates"
    missing = {axis.name for v in known.values() for axis in v.axes if axis not in segment.axes}
    return f"{sorted(missing)[0]} is not among the axes" if missing else None
