"""What must hold of every Fusion.

In: a Fusion. Out: None, or the first thing wrong with it as a sentence. Run in tests after each build.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from .dtypes import BOOL, INT64
from .fusion import PLACES, Fusion, Located, Lookup, Pointwise, Random, Reshape, Scan, Value, Within, leaves
from .symbols import find
from .values import Window


def verify(fusion: Fusion) -> str | None:
    """None if `fusion` is well-formed."""
    known: dict[str, Value] = {}
    others = Counter([leaf.b for leaf in leaves(fusion)] + [axis.name for axis in fusion.axes])
    others.update({v.name for v in _named(fusion)})
    if twice := [name for name, count in others.items() if count > 1]:
        return f"{twice[0]} is the name of two things"
    for i in fusion.inputs:
        if len(i.strides) != len(i.value.dims):
            return f"{i.value.name} has {len(i.value.dims)} dims and {len(i.strides)} strides"
        if not _walks(i.value, i.windows):
            return f"{i.value.name} does not vary over the axes of its window"
        known[i.value.name] = i.value
    for n in fusion.numbers:
        if not n.value.is_number:
            return f"{n.value.name} is a number input but not a number"
        known[n.value.name] = n.value
    for op in fusion.ops:
        for operand in op.operands:
            if operand.literal is None and operand.size is None and known.get(operand.name) != operand:
                return f"{op.output.name} uses {operand.name} before it is defined"
        if op.output.name in known:
            return f"{op.output.name} is defined twice"
        complaint = _dims(op)
        if complaint:
            return complaint
        known[op.output.name] = op.output
    if [op.stream for op in fusion.drawing] != list(range(len(fusion.drawing))):
        return "random ops are not numbered in order"
    saved = [op.saved for op in fusion.randoms if op.saved is not None]
    if sorted(saved) != list(range(len(fusion.seeds))):
        return "the seeds are not those of random ops, one each"
    if any(op.saved is not None and (op.walk or op.seed is not None) for op in fusion.randoms):
        return "a seed is saved of numbers that do not follow from the call's own"
    for o in fusion.outputs:
        if known.get(o.value.name) != o.value:
            return f"output {o.value.name} is not defined"
        if len(o.sizes) != len(o.strides) or len(o.steps) != len(o.value.dims):
            return (
                f"output {o.value.name} has {len(o.value.dims)} dims, {len(o.sizes)} sizes, "
                f"{len(o.strides)} strides and {len(o.steps)} steps"
            )
    for u in fusion.updates:
        if any(known.get(value.name) != value or not set(value.axes) <= set(u.value.axes) for value in u.at):
            return f"where {u.value.name} is added is not defined, or varies over other axes"
        is_read = u.at or any(i.index == u.index for i in fusion.inputs)
        if known.get(u.value.name) != u.value or not is_read:
            return f"{u.value.name}, or argument {u.index} that it goes to, is not defined"
    for kind, k in fusion.results:
        if kind == "output" and int(k) >= len(fusion.outputs):
            return f"result {k} is not an output"
    return None


def _named(fusion: Fusion) -> Iterator[Value]:
    """The values that are printed under their names."""
    yield from [i.value for i in fusion.inputs] + [n.value for n in fusion.numbers]
    yield from [op.output for op in fusion.ops]


def _walks(value: Value, windows: tuple[Window, ...]) -> bool:
    """Whether `value` varies over all axes of `windows`."""
    return all(set(window.axes) <= set(value.axes) for window in windows)


def _dims(op) -> str | None:
    if len(set(op.output.axes)) < len(op.output.axes):
        return f"{op.output.name} has two dims along one axis"
    operands = set().union(*(v.axes for v in op.operands))
    if isinstance(op, Pointwise):
        try:
            templates = find(op.symbol).templates.values()
        except KeyError:
            return f"{op.output.name}: there is no symbol {op.symbol}"
        holes = {int(k) for template in templates for k in re.findall(r"\{(\d+)\}", template)}
        if not holes <= set(range(len(op.operands))):
            return f"{op.output.name}: the symbol {op.symbol} takes more operands"
        if not set(op.output.axes) >= operands:  # more, where it is expanded
            return f"{op.output.name} does not vary over the axes of its operands"
        return None
    if isinstance(op, Random):
        if len(op.linear_strides) != len(op.output.dims):
            return f"{op.output.name} has {len(op.output.dims)} dims and {len(op.linear_strides)} steps"
        return (
            None
            if set(op.output.axes) == operands
            else f"{op.output.name} does not vary over the axes of its operand"
        )
    if isinstance(op, PLACES):
        dtype = BOOL if isinstance(op, Within) else INT64
        good = op.output.axes == op.window.axes and op.output.dtype is dtype
        return None if good else f"{op.output.name} does not vary over the axes of its window"
    if isinstance(op, Reshape):
        if op.strides is not None and len(op.strides) != len(op.output.dims):
            return f"{op.output.name} has {len(op.output.dims)} dims and {len(op.strides)} strides"
        good = _walks(op.output, op.windows)
        return None if good else f"{op.output.name} does not vary over the axes of its window"
    if isinstance(op, Located):
        good = len(op.operands) == 1 and op.output.dims == op.operands[0].dims and op.output.dtype is INT64
        return None if good else f"{op.output.name} does not vary over the axes of its index"
    if isinstance(op, Lookup):
        if len(op.strides) != len(op.output.dims):
            return f"{op.output.name} has {len(op.output.dims)} dims and {len(op.strides)} strides"
        if not len(op.operands) == len(op.steps) == len(op.extents):
            return f"{op.output.name} has {len(op.operands)} indices and {len(op.steps)} steps"
        good = set(op.output.axes) >= operands
        return None if good else f"{op.output.name} does not vary over the axes of its indices"
    if isinstance(op, Scan):
        good = bool(op.axes) and set(op.axes) <= operands and op.output.dims == op.operands[0].dims
        return None if good else f"{op.output.name} does not vary over the axes of its operand"
    if not set(op.axes) <= operands or set(op.output.axes) != operands - set(op.axes):
        return f"{op.output.name}: axes of the reduction do not fit"
    return None
