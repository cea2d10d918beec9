"""The last step of a build: canonical axes, and no dead ops.

In: a Draft, whose values have the axes that they were made with. Out: its Fusion, in which each axis is the
loops that it was joined to or cut into, named `a0`, `a1`... as they appear. Raises Refusal where no kernel
could do the same as eager. Example, x + y with y of one dim:

    x0 over (a0_0, a0_1), x1 over (a1_0,), where a1_0 was joined to a0_1
    -> x0 over (a0, a1), x1 over (a1,)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..errors import Refusal
from . import size as sz
from .axes import Axes, loop_strides
from .draft import Draft
from .fusion import (
    PLACES,
    Axis,
    Fusion,
    Lookup,
    Op,
    Output,
    Pointwise,
    Random,
    Reduce,
    Reshape,
    Scan,
    TensorInput,
    Update,
    Value,
)
from .layout import contiguous
from .symbols import ROUNDING
from .values import Window


def finish(draft: Draft) -> Fusion:
    """The Fusion, with every axis replaced by those it was joined to or cut into, and dead ops dropped."""
    stored = [o.value for o in draft.outputs] + [v for u in draft.updates for v in (u.value, *u.at)]
    ops = draft.needed(stored)
    live = {v.name for v in stored}.union(v.name for op in ops for v in op.operands)
    _join_splits(draft, {v.name for v in stored}, live)
    new = _Canonical(draft.axes, {seed.uniform.name: k for k, seed in enumerate(draft.seeds)})
    inputs = _inputs([i for i in draft.reads if i.value.name in live], new)
    numbers = tuple(n for n in draft.numbers.values() if n.value.name in live)
    kept = _ops(ops, {v.name for v in stored}, new)
    outputs = tuple(
        replace(o, value=new.value(o.value), steps=new.strides(o.value, o.strides)) for o in draft.outputs
    )
    updates = tuple(
        replace(
            u,
            value=new.value(u.value),
            strides=new.strides(u.value, u.strides),
            at=tuple(map(new.value, u.at)),
        )
        for u in draft.updates
    )
    seeds = tuple(seed.length for seed in draft.seeds)
    kept = _read_results(draft, kept, outputs)
    fusion = Fusion(inputs, numbers, kept, outputs, tuple(draft.results), updates, draft.drawn, seeds)
    if len(seeds) != sum(op.saved is not None for op in fusion.randoms):
        raise Refusal("a seed is asked for of a dropout whose result nobody reads, or twice")
    _check_updates(fusion)
    _check_lookups(draft, fusion)
    return fusion


def _join_splits(draft: Draft, stored: set[str], live: set[str]) -> None:
    """Some stored values were computed a second time, over finer axes, for a view of them, and some inputs
    were read a second time. They get these axes, so that both are one: `y = x + 1`, x[N * K], beside
    `y.view(N, K) * 2`, or beside `x.view(N, K) * 2`. Not along a scan: it needs its loops one behind the
    other, and a transpose of the view would walk them otherwise."""
    scans = [op for op in draft.ops if isinstance(op, Scan) and op.output.name in live]
    scanned = {part for op in scans for a in op.axes for part in draft.axes.parts(a)}
    split = [(value, into) for value, into in draft.splits if value.name in stored]
    split += [(one, into) for one, other, into in draft.split_reads if {one.name, other.name} <= live]
    for value, into in split:
        for axis, finer in into.items():
            whole = draft.axes.whole(finer, axis.extent)
            known = draft.axis(axis) in map(draft.axis, value.axes)
            if known and scanned.isdisjoint(draft.axes.parts(axis)) and not draft.axes.clash(axis, whole):
                draft.axes.join(axis, whole)


def _inputs(read: Sequence[TensorInput], new: _Canonical) -> tuple[TensorInput, ...]:
    """What is read, each argument once for the same loops: an argument that has been read along others may
    in the end be read along the same."""
    inputs: dict[TensorInput, TensorInput] = {}
    for i in read:
        made = replace(
            i,
            value=new.value(i.value),
            strides=new.strides(i.value, i.strides),
            windows=tuple(map(new.window, i.windows)),
        )
        nameless = replace(made, value=replace(made.value, name=""))
        new.replace(i.value, inputs.setdefault(nameless, made).value)
    return tuple(inputs.values())


def _ops(ops: Sequence[Op], stored: set[str], new: _Canonical) -> tuple[Op, ...]:
    """The ops, each once: two that were made over other loops may in the end compute the same. What is
    `stored` keeps its name."""
    made: dict[tuple, Op] = {}
    kept = []
    for old in ops:
        op = new.op(old)
        if isinstance(op, (Pointwise, *PLACES)):
            how = tuple((vars(op) | {"output": None}).values())
            first = made.setdefault((type(op), op.output.dtype, op.output.dims, how), op)
            if first is not op and old.output.name not in stored:
                new.replace(old.output, first.output)
                continue
        kept.append(op)
    return tuple(kept)


def _read_results(draft: Draft, ops: tuple[Op, ...], outputs: Sequence[Output]) -> tuple[Op, ...]:
    """The ops, where what is stored to be read along other axes, and is a result that lies in memory in the
    same order, is read where the result is. Ops that nobody needs any more are left out."""
    makers = {op.output.name: op for op in ops}
    results = {o.value.name: o for o in outputs if o.room is None}
    changed = [
        replace(op, operands=(_result(draft, op, makers, results),)) if isinstance(op, Reshape) else op
        for op in ops
    ]
    if changed == list(ops):
        return ops
    needed = {o.value.name for o in outputs} | {v.name for u in draft.updates for v in (u.value, *u.at)}
    for op in reversed(changed):
        if op.output.name in needed:
            needed.update(v.name for v in op.operands)
    return tuple(op for op in changed if op.output.name in needed)


def _result(draft: Draft, op: Reshape, makers: dict[str, Op], results: dict[str, Output]) -> Value:
    """The result of the group that has the elements of the operand of `op` in the same order; the operand
    where there is none."""
    (stored,) = op.operands
    value, dtype = stored, stored.dtype
    copies = ("copy", f"{ROUNDING}{dtype}")  # memory rounds, too
    while value.name not in results:
        made = makers.get(value.name)
        if (
            not isinstance(made, Pointwise)
            or made.symbol not in copies
            or made.operands[0].dtype is not dtype
        ):
            return stored
        (value,) = made.operands
    own = dict(zip(stored.dims or (), contiguous(draft.sizes(stored)).strides))
    there = zip(value.dims or (), results[value.name].steps)
    same = set(value.axes) == set(stored.axes) and all(
        a is None or draft.call.decide(sz.eq(stride, own[a])) for a, stride in there
    )
    return value if same else stored


def _check_updates(fusion: Fusion) -> None:
    """Refuses readers of an updated tensor other than the op that computes its new value: they might read
    before or after. So might readers of the new value, in loops that compute it once more. Where all that
    can read it is elementwise, in one loop nest, each reads before it stores."""
    stored = [v.name for v in _stored(fusion)]
    for update in fusion.updates:
        if stored.count(update.value.name) > 1:
            raise Refusal("a tensor that is changed in place gets what goes elsewhere as well")
        read = [i for i in fusion.inputs if i.index == update.index]
        elsewhere = {i.value.name for i in read if not _is_where(i, update)}
        if any(not elsewhere.isdisjoint(v.name for v in op.operands) for op in fusion.ops):
            raise Refusal("a tensor that is changed in place is read elsewhere than where it is stored")
        names = {i.value.name for i in read} | ({update.value.name} if read else set())
        others = [op for op in fusion.ops if op.output.name != update.value.name]
        if any(not names.isdisjoint(v.name for v in op.operands) for op in others):
            if not _is_elementwise(fusion, update):
                raise Refusal("a tensor that is changed in place has other readers in its group")


def _stored(fusion: Fusion) -> list[Value]:
    return [*(o.value for o in fusion.outputs), *(u.value for u in fusion.updates)]


def _is_where(read: TensorInput, update: Update) -> bool:
    """Whether each element is read where, in the same iteration, it is stored."""
    here = (read.value.dims, read.strides) == (update.value.dims, update.strides)
    return here and read.offset == sz.const(0) and not read.windows


def _is_elementwise(fusion: Fusion, update: Update) -> bool:
    """Whether one element of each result is computed from one element of each operand, and the new value has
    all axes: so have the results that read it then, or the old one, and are made in the same pass."""
    return set(update.value.axes) == set(fusion.axes) and all(
        isinstance(op, (Pointwise, Random)) for op in fusion.ops
    )


def _check_lookups(draft: Draft, fusion: Fusion) -> None:
    """Refuses lookups whose indices might not all be looked at, or that might not be the first to fail: eager
    has to say which index is out of range."""
    if not fusion.lookups:
        return
    if any(not update.at for update in draft.updates):
        raise Refusal("an index out of range would be found after a tensor was changed in place")
    empty = {a for a in fusion.axes if not draft.call.decide(sz.lt(0, a.extent))}
    if empty and any(empty.isdisjoint(index.axes) for op in fusion.lookups for index in op.operands):
        raise Refusal("there are indices, but no elements are computed with them")


class _Canonical:
    """What stands in the Fusion for axes, values and ops of a draft; axes are named in the order in which
    they are asked for."""

    def __init__(self, axes: Axes, seeds: dict[str, int]):
        """`seeds`: the number of a seed by the name of the random numbers that it gives."""
        self._axes = axes
        self._seeds = seeds
        self._loops: dict[Axis, Axis] = {}
        self._dims: dict[tuple[Axis | None, ...], tuple[Axis | None, ...]] = {}  # dims -> the loops over them
        self._values: dict[str, Value] = {}
        self._streams = itertools.count()

    def loops(self, axis: Axis | None) -> tuple[Axis | None, ...]:
        """The loops over a dim, outermost first."""
        if axis is None:
            return (None,)
        parts = self._axes.parts(axis)
        for p in parts:
            if p not in self._loops:
                self._loops[p] = Axis(f"a{len(self._loops)}", p.extent)
        return tuple([self._loops[p] for p in parts])

    def strides(self, value: Value, strides: Sequence[sz.Size]) -> tuple[sz.Size, ...]:
        """The strides of the loops over the dims of `value`, whose strides are given."""
        return loop_strides([self.loops(a) for a in value.dims], strides)

    def replace(self, value: Value, other: Value) -> None:
        """Has `other`, of the Fusion, stand for `value`."""
        self._values[value.name] = other

    def value(self, value: Value) -> Value:
        if value.is_number:
            return value
        if value.name not in self._values:
            new = Value(value.name, value.dtype, self.dims(value.dims), value.literal, value.size)
            self._values[value.name] = new
        return self._values[value.name]

    def dims(self, dims: tuple[Axis | None, ...]) -> tuple[Axis | None, ...]:
        """The loops over a value's dims, outermost first."""
        known = self._dims.get(dims)
        if known is None:
            loops = tuple([loop for a in dims for loop in self.loops(a)])
            walked = [loop for loop in loops if loop is not None]
            if len(set(walked)) < len(walked):
                raise Refusal("one loop would walk two dims of a value")
            known = self._dims[dims] = loops
        return known

    def window(self, window: Window) -> Window:
        """The same places, along loops."""
        return replace(window, axes=tuple(loop for a in window.axes for loop in self.loops(a)))

    def op(self, old: Op) -> Op:
        operands, output = tuple(map(self.value, old.operands)), self.value(old.output)
        if isinstance(old, Pointwise):
            return Pointwise(old.name, old.symbol, operands, old.compute, output)
        op = replace(old, operands=operands, output=output)
        if isinstance(op, (Reduce, Scan)):
            return replace(op, axes=tuple(loop for a in op.axes for loop in self.loops(a)))
        if isinstance(op, Random):
            stream = next(self._streams) if op.seed is None else op.stream
            steps, saved = self.strides(old.output, op.linear_strides), self._seeds.get(old.output.name)
            return replace(op, stream=stream, linear_strides=steps, saved=saved)
        if isinstance(op, Lookup):
            return replace(op, strides=self.strides(old.output, op.strides))
        if isinstance(op, PLACES):
            return replace(op, window=self.window(op.window))
        if isinstance(op, Reshape) and op.strides is not None:
            strides, windows = self.strides(old.output, op.strides), tuple(map(self.window, op.windows))
            return replace(op, strides=strides, windows=windows)
        return op
