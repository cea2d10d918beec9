"""Sums of columns over what the group stores anyway, where rows of the operands begin at no whole access.

In: a Fusion. Out: the Fusion in which such a sum reads what has been stored, in a kernel of its own. Example,
the gradient of 50,265 logits and of their bias, with operands of 50,265 columns and room behind the rows of
the result:

    g = f(x, y), stored with stride 50272;  s = sum(g, 0)
becomes
    g = f(x, y), stored with stride 50272;  r = reshape(g), read with stride 50272;  s = sum(r, 0)

One kernel for both would read and store one element of 16 bits at a time, as neighbouring threads add up
neighbouring columns, and its rows would lie far apart. The first of two goes along rows, and the second
reads eight elements at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Axis, Fusion, Op, Output, Reduce, Reshape, TensorInput, Value
from .machine import Machine

LARGE = 1 << 20  # elements of the data: of fewer, another launch costs more
#: Bytes of an access with which one kernel for both takes no longer than two: on an H200 it moved 2.5 TB/s
#: (the gradient of [16384, 30522] logits and of their bias).
LEAST_ACCESS = 4


def from_memory(call: Call, fusion: Fusion, machine: Machine) -> Fusion:
    """`fusion`, with such sums of what is stored; itself if there are none."""
    if not machine.has_threads or not any(isinstance(op, Reduce) for op in fusion.ops):
        return fusion
    outputs = {o.value.name: o for o in fusion.outputs}
    reads: dict[str, Value] = {}  # of what is stored, by its name
    ops: list[Op] = []
    for op in fusion.ops:
        if isinstance(op, Reduce) and len(op.operands) == 1 and op.operands[0].name in outputs:
            stored = outputs[op.operands[0].name]
            if _is_better_read(call, fusion, op, stored, machine):
                value = stored.value
                if value.name not in reads:
                    reads[value.name] = replace(value, name=f"{value.name}_stored")
                    ops.append(Reshape("reshape", (value,), reads[value.name], stored.steps))
                op = replace(op, operands=(reads[value.name],))
        ops.append(op)
    return replace(fusion, ops=tuple(ops)) if reads else fusion


def _is_better_read(call: Call, fusion: Fusion, op: Reduce, stored: Output, machine: Machine) -> bool:
    """Whether columns are added up, rows of the result begin at whole accesses, and those of some operand not
    even at short ones."""
    dims = stored.value.dims or ()
    inner = next((a for a, step in zip(dims, stored.steps) if a is not None and step is sz.const(1)), None)
    if inner is None or inner in op.axes or set(stored.value.axes) - set(op.axes) != {inner}:
        return False
    if not call.decide(sz.le(LARGE, sz.product([a.extent for a in stored.value.axes]))):
        return False
    if not _rows_begin_at(call, machine.access, stored.value, stored.steps, inner):
        return False
    needed = {op.operands[0].name}
    for other in reversed(fusion.ops):
        if other.output.name in needed:
            needed.update(v.name for v in other.operands)
    operands = [i for i in fusion.inputs if i.value.name in needed and _walks(call, i, inner)]
    return not all(_rows_begin_at(call, LEAST_ACCESS, i.value, i.strides, inner) for i in operands)


def _walks(call: Call, read: TensorInput, axis: Axis) -> bool:
    """Whether neighbours along the axis are neighbours in memory."""
    step = dict(zip(read.value.dims or (), read.strides)).get(axis)
    return step is not None and bool(call.decide(sz.eq(step, 1)))


def _rows_begin_at(call: Call, access: int, value: Value, strides: Sequence[sz.Size], inner: Axis) -> bool:
    """Whether each step along another dim than `inner` is one of whole accesses, of so many bytes."""
    whole = max(1, access // value.dtype.itemsize)
    return all(
        call.decide(sz.eq(step % whole, 0))
        for a, step in zip(value.dims or (), strides)
        if a is not None and a is not inner
    )
