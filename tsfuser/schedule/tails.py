"""Reductions whose results are only viewed and cast: the view and the cast are dropped.

In: a Fusion. Out: a Fusion in which such a reduction gives the output itself, so that no kernel reads its
result again. Unlike eager's, this output is not rounded to 16 bits in between. Example, the gradient of a
bias with autocast:

    sum_3 = sum(x), bfloat16 [1, 8];  view_4 = view(sum_3);  to_5 = convert(view_4), float32 [8]
becomes
    to_5 = sum(x), float32 [8]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..ir.fusion import MOMENTS, Fusion, Op, Pointwise, Reduce, Value

_SAME = ("copy", "convert")  # symbols of views and casts


def joined(fusion: Fusion) -> Fusion:
    """The fusion without the views and casts after reductions; `fusion` itself if there are none."""
    producer = {op.output.name: op for op in fusion.ops}
    readers = Counter(v.name for op in fusion.ops for v in op.operands)
    readers.update(u.value.name for u in fusion.updates)
    readers.update(o.value.name for o in fusion.outputs)
    becomes: dict[str, Value] = {}
    dropped: set[str] = set()
    for output in fusion.outputs:
        tail, found = _source(output.value, producer, readers)
        if tail and isinstance(found, Reduce) and _may_give(found, tail):
            becomes[found.output.name] = output.value
            dropped.update(v.name for v in tail)
    if not becomes:
        return fusion
    ops = [op for op in fusion.ops if op.output.name not in dropped]
    return replace(
        fusion,
        ops=tuple(
            replace(op, output=becomes[op.output.name]) if op.output.name in becomes else op for op in ops
        ),
    )


def _source(value: Value, producer: dict[str, Op], readers: Counter) -> tuple[list[Value], Op | None]:
    """Goes back from `value` over views and casts that nobody else reads: their results, the last one first,
    and the op before them."""
    tail: list[Value] = []
    while (op := producer.get(value.name)) is not None and readers[value.name] == 1:
        if not (isinstance(op, Pointwise) and op.symbol in _SAME and len(op.operands) == 1):
            return tail, op
        tail.append(value)
        value = op.operands[0]
    return tail, None


def _may_give(reduction: Reduce, tail: list[Value]) -> bool:
    """Whether the reduction, which accumulates in its result's register dtype, could store the end of the
    tail itself. It may not if a dtype in between is narrower than the result, or an integer: that changes
    values."""
    found = reduction.output
    return (
        reduction.combine not in MOMENTS
        and all(v.dtype in (found.dtype, found.dtype.register) for v in tail)
        and found.dtype.is_floating
        and set(tail[0].axes) == set(found.axes)
    )
