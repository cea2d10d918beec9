"""Reductions whose innermost axes are short: what lies further out is reduced first, column by column.

In: a Fusion. Out: the Fusion in which such a reduction is two. A group norm in channels last reduces pixels,
which lie outside of its groups, and the few channels of a group, which lie inside. One block a group would
read 20 bytes of each 640. Example, x[n, g, c, p] with strides (g * c * p, c, 1, g * c):

    s[n, g] = sum(x, (c, p))        becomes        t[n, g, c] = sum(x, p);  s[n, g] = sum(t, c)

Neighbours in memory are then read by neighbouring threads, and t is small. Mean and sum of squared distances
are put together as in Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances, 1979: with k elements a column,

    squares = sum(squares of a column + k * (mean of the column - mean) ** 2)

Sums over more axes, as of the gradient of a weight, are divided too, as the same pass adds up their columns.

Elementwise ops over the data read values of a group, as s above. These are stored for each channel, so that
the loops over g and c are one, along which accesses are wide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeGuard

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Axis, Fusion, Op, Pointwise, Reduce, Reshape, TensorInput, Value
from ..ir.symbols import define
from ..ir.values import extent
from .machine import Machine

define("squares_around", "({0} + {2} * (({1} - {3}) * ({1} - {3})))")

SHORT = 64  # bytes of neighbours in memory; a GPU reads 32 at once
LARGE = 1 << 20  # elements of the data: below, another launch costs more than reads in vain
_COMBINED = ("sum", "mean", "squares")


def by_columns(call: Call, fusion: Fusion, machine: Machine) -> Fusion:
    """`fusion`, with such reductions in two; itself if there are none, or blocks have one thread."""
    if not machine.has_threads or not any(_may_be_divided(op) for op in fusion.ops):
        return fusion
    sources = _sources(fusion)
    chosen: dict[frozenset[Axis], _Parts] = {}  # by the axes of the data
    for op in fusion.ops:
        if _may_be_divided(op) and (source := sources.get(op.operands[0].name)) is not None:
            parts = _parts(call, op, source)
            if parts is not None:
                chosen.setdefault(frozenset(op.operands[0].axes), parts)
    return _rewritten(fusion, chosen) if chosen else fusion


def _may_be_divided(op: Op) -> TypeGuard[Reduce]:
    """Whether it keeps an axis and reduces several, so that one that is kept may lie between these."""
    if not isinstance(op, Reduce) or op.combine not in _COMBINED or len(op.operands) > 1:
        return False
    return 1 < len(op.axes) < len(op.operands[0].axes) and op.output.dtype.is_floating


def _sources(fusion: Fusion) -> dict[str, TensorInput]:
    """For each value the first input over all of its axes from which it is computed."""
    found = {i.value.name: i for i in fusion.inputs}
    for op in fusion.ops:
        for operand in op.operands:
            source = found.get(operand.name)
            if source is not None and set(source.value.axes) == set(op.output.axes):
                found.setdefault(op.output.name, source)
    return found


class _Parts(NamedTuple):
    """The reduced axes that lie outside of one that is kept, which are reduced first; those that lie inside;
    and the ones that are kept between them."""

    outer: set[Axis]
    inner: tuple[Axis, ...]
    between: set[Axis]


def _parts(call: Call, op: Reduce, source: TensorInput) -> _Parts | None:
    """None unless what lies inside is short and the data are large."""
    steps = {axis: step for axis, step in zip(source.value.dims or (), source.strides) if axis is not None}
    kept = [a for a in steps if a not in op.axes]
    inner = tuple(a for a in steps if a in op.axes and all(_lies_in(call, steps[a], steps[k]) for k in kept))
    outer = set(op.axes) - set(inner)
    if not inner or not outer:
        return None
    axes = op.operands[0].axes
    short = sz.product([a.extent for a in inner]) * source.value.dtype.itemsize
    data, columns = (sz.product([a.extent for a in some]) for some in (axes, set(axes) - outer))
    conditions = sz.lt(short, SHORT), sz.le(LARGE, data), sz.le(columns * 16, data)
    if not all(call.decide(condition) for condition in conditions):
        return None
    between = {k for k in kept if any(_lies_in(call, steps[k], steps[o]) for o in outer)}
    return _Parts(outer, inner, between)


def _lies_in(call: Call, one: sz.Size, other: sz.Size) -> bool:
    return bool(call.decide(sz.lt(one, other)))


def _rewritten(fusion: Fusion, chosen: dict[frozenset[Axis], _Parts]) -> Fusion:
    known: dict[str, Value] = {}  # what was added, by name
    ops: list[Op] = []
    for op in fusion.ops:
        parts = chosen.get(frozenset(op.output.axes))
        if isinstance(op, Pointwise) and parts is not None:
            op = replace(
                op, operands=tuple(_by_channel(v, op.output, parts, known, ops) for v in op.operands)
            )
        parts = chosen.get(frozenset(op.operands[0].axes)) if _may_be_divided(op) else None
        if parts is None or not _may_be_divided(op) or not parts.outer < set(op.axes):
            ops.append(op)
            continue
        columns = _Columns(op, parts.outer, known, ops)
        rest = tuple(a for a in op.axes if a not in parts.outer)
        if op.combine == "squares":
            columns.squares(op, rest)
        else:
            ops.append(replace(op, operands=(columns.reduced(op.combine),), axes=rest))
    return replace(fusion, ops=tuple(ops))


def _by_channel(value: Value, like: Value, parts: _Parts, known: dict[str, Value], ops: list[Op]) -> Value:
    """`value`, stored once more for each place along the inner axes if it varies along what lies between."""
    own = set(value.axes)
    if own.isdisjoint(parts.between) or not own.isdisjoint((*parts.inner, *parts.outer)):
        return value
    name = f"{value.name}_by_channel"
    if name not in known:
        axes = tuple(a for a in like.axes if a in own or a in parts.inner)
        copy = Value(f"{name}_stored", value.dtype, axes)
        ops.append(Pointwise("copy", "copy", (value,), None, copy))
        known[name] = Value(name, value.dtype, axes)
        ops.append(Reshape("reshape", (copy,), known[name]))  # what is reshaped is stored
    return known[name]


class _Columns:
    """The data of a reduction with one element for each column; adds ops to `ops`."""

    def __init__(self, op: Reduce, outer: set[Axis], known: dict[str, Value], ops: list[Op]):
        [self.data], self.dtype = op.operands, op.output.dtype.register
        self.axes = tuple(a for a in op.axes if a in outer)
        self.dims = tuple(None if a in outer else a for a in self.data.dims or ())
        self.known, self.ops = known, ops

    def reduced(self, combine: str) -> Value:
        """Those of the data by `combine`."""
        where = "_".join([self.data.name, *sorted(a.name for a in self.axes), self.dtype.name])
        output = Value(f"column_{combine}_of_{where}", self.dtype, self.dims)
        if self.known.setdefault(output.name, output) is output:
            self.ops.append(Reduce(combine, combine, (self.data,), self.axes, output))
        return self.known[output.name]

    def squares(self, op: Reduce, rest: tuple[Axis, ...]) -> None:
        """The sum of squared distances from the mean of all."""
        name, count = op.output.name, extent(sz.product([a.extent for a in self.axes]))
        means, squares = self.reduced("mean"), self.reduced("squares")
        mean = Value(f"mean_for_{name}", self.dtype, op.output.dims)
        self.ops.append(Reduce("mean", "mean", (means,), rest, mean))
        around = Value(f"squares_for_{name}", self.dtype, self.dims)
        operands = (squares, means, count, mean)
        self.ops.append(Pointwise("squares", "squares_around", operands, self.dtype, around))
        self.ops.append(Reduce(op.name, "sum", (around,), rest, op.output))
