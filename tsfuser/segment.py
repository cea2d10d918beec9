"""Cuts a Fusion into segments, each of which becomes one kernel.

In: a Fusion. Out: ordered `Segment`s with what each reads from and writes to memory. A pointwise segment computes everything between memory
and its outputs; outputs of a subset of its axes ride along. Example: `y = x + b; z = b * 2` over axes (r, c) and (c): one segment,
`z` stored by the first row only. What is reshaped is stored by the segments of one stage, and read along other axes in the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, NamedTuple

from .ir import size as sz
from .ir.call import Call
from .ir.fusion import Axis, Fusion, Lookup, Op, Random, Reduce, Reshape, TensorInput, Value, statement
from .ir.size import Size


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: `kind` is `input` (group argument `index`), `allocation` (number `index` of the plan), `update` (the memory of group argument `index`, stored to), `lookup` (the same as `input`, read at places that `value`'s
    operand names) or `random` (no memory at all: the linear index of stream `index`), with one stride (elements) a dim of
    `value`. `alignment` is in bytes."""

    value: Value
    kind: str
    index: int
    strides: tuple[Size, ...]
    alignment: Size
    by_value: bool = False

    def stride(self, axis: Axis) -> Size:
        """Elements between neighbours along `axis`, 0 where the tensor lacks it."""
        for own, stride in zip(self.value.dims, self.strides):
            if own is not None and own == axis:
                return stride
        return sz.const(0)


@dataclass(frozen=True)
class Segment:
    """`ops` in order, `loads` and `stores`, over `axes` (its iteration space). Its Reduce ops run all over the same axes, or, in a pass over rows, some over
    all the others."""

    ops: tuple[Op, ...]
    loads: tuple[Buffer, ...]
    stores: tuple[Buffer, ...]
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        """What it reads, does and writes, and over which axes; an op is written as in a Fusion."""
        over = ", ".join(f"{axis.name} of {axis.extent.text()}" for axis in self.axes)
        lines = [f"over {over}" if over else "of one element"]
        lines += [f"  load  {buffer.value.name}" for buffer in self.loads]
        lines += [f"  {statement(op)}" for op in self.ops]
        lines += [f"  store {buffer.value.name}" for buffer in self.stores]
        return "\n".join(lines)

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        """Its reductions."""
        return tuple(op for op in self.ops if isinstance(op, Reduce))

    @property
    def uses_reductions(self) -> bool:
        """Whether something in it depends on one of its reductions, so that data may be needed twice."""
        reduced = {op.output.name for op in self.reductions}
        return any(v.name in reduced for op in self.ops for v in op.operands)

    @property
    def randoms(self) -> tuple[Random, ...]:
        """Its random ops; another segment may compute the same ones again."""
        return tuple(op for op in self.ops if isinstance(op, Random))

    @property
    def lookups(self) -> tuple[Lookup, ...]:
        """Its lookups; another segment may do the same ones again."""
        return tuple(op for op in self.ops if isinstance(op, Lookup))

    @property
    def name(self) -> str:
        """Kernel name: after the distinct ops, in order."""
        words = list(dict.fromkeys(op.name for op in self.ops)) or ["copy"]
        tail = [f"and_{len(words) - 5}_more"] if len(words) > 6 else words[5:]
        return "_".join(["fused", *words[:5], *tail])


@dataclass(frozen=True)
class Temporary:
    """A tensor between segments: `value`, row-major, as plan allocation `index`."""

    value: Value
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    index: int


class Allocations:
    """The tensors that a plan allocates: the group's outputs first, then temporaries as segments and schedules ask for them."""

    def __init__(self, outputs: int):
        self.outputs = outputs
        self.temporaries: list[Temporary] = []

    def new(self, value: Value, multiple: int = 1) -> Buffer:
        """A row-major temporary that holds `value`, dense but for its first dim, whose stride is rounded up to a `multiple` of elements."""
        sizes = _sizes(value)
        strides = _row_major(sizes)
        if multiple > 1:
            strides = (sz.ceildiv(strides[0], multiple) * multiple, *strides[1:])
        temporary = Temporary(value, sizes, strides, self.outputs + len(self.temporaries))
        self.temporaries.append(temporary)
        return Buffer(value, "allocation", temporary.index, temporary.strides, sz.const(256))


def _sizes(value: Value) -> tuple[Size, ...]:
    return tuple(sz.const(1) if a is None else a.extent for a in value.dims)


def _row_major(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    strides, step = [], sz.const(1)
    for size in reversed(sizes):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def segments(call: Call, fusion: Fusion, allocations: Allocations, is_one_pass: Callable[[Segment], bool]) -> tuple[Segment, ...]:
    """The segments of `fusion` in an order that respects their dependences; temporaries between them are added to `allocations`. `is_one_pass` says
    whether a segment in which results depend on reductions can be one pass over memory."""
    producer = {op.output.name: op for op in fusion.ops}
    position = {op.output.name: i for i, op in enumerate(fusion.ops)}
    stored = {o.value.name: Buffer(o.value, "allocation", k, o.steps, sz.const(256)) for k, o in enumerate(fusion.outputs)}
    stored |= {u.value.name: Buffer(u.value, "update", u.index, u.strides, u.alignment) for u in fusion.updates}
    memory = {i.value.name: _input_buffer(i) for i in fusion.inputs}
    result: list[Segment] = []
    stages = _stages(fusion)

    def buffer(value: Value) -> Buffer:
        """Where `value` goes: a group output if it is one, else a temporary."""
        return stored[value.name] if value.name in stored else allocations.new(value)

    def slice_of(roots: list[Value]) -> tuple[list[Op], list[Buffer]]:
        """The ops between memory and `roots`, and the buffers they read."""
        seen: set[str] = set()
        ops: list[Op] = []
        loads: dict[str, Buffer] = {}
        stack = list(roots)
        while stack:
            value = stack.pop()
            if value.is_number or value.name in seen:
                continue
            seen.add(value.name)
            if value.name in memory:
                loads[value.name] = memory[value.name]
                continue
            op = producer[value.name]
            ops.append(op)
            stack.extend(op.operands)
        ops.sort(key=lambda op: position[op.output.name])
        return ops, list(loads.values())

    def segment(values: list[Value]) -> Segment:
        """A segment that stores `values`."""
        ops, loads = slice_of(values)
        stores = tuple(Buffer(v, "allocation", -1, _row_major(_sizes(v)), sz.const(256)) if v.name not in stored else buffer(v) for v in values)
        return Segment(tuple(ops), _ordered(loads), stores, _axes(ops, loads))

    def add(values: list[Value]) -> None:
        made = segment(values)
        stores = tuple(b if b.index >= 0 else allocations.new(b.value) for b in made.stores)
        result.append(replace(made, stores=stores))
        memory.update((b.value.name, b) for b in stores)

    def pending(values: list[Value]) -> list[Value]:
        return [v for v in dict.fromkeys(values) if v.name not in memory]

    def reductions_of(values: list[Value]) -> set[str]:
        """Names of the reductions between memory and `values`, those that give them included."""
        return {op.output.name for op in slice_of(values)[0] if isinstance(op, Reduce)}

    def rows(op: Reduce, without: "set[str]" = frozenset()) -> "list[Value] | None":
        """What one pass over the rows of `op` could store: reductions over the same axes, also of one another's results, all that follows
        from them, and reductions of that over the other axes, but for the results `without`; None where nothing follows."""
        members: set[str] = set()
        for r in ready:
            if isinstance(r, Reduce) and r.output.name not in memory and _like(r, op) and reductions_of([r.output]) <= members | {r.output.name}:
                members.add(r.output.name)
        if op.output.name not in members:
            return None
        full, across = set(op.operands[0].axes), set(op.operands[0].axes) - set(op.axes)
        followers = [v for v in pending(outputs) if reductions_of([v]) and reductions_of([v]) <= members and set(v.axes) <= full]
        followers = [v for v in followers if v.name not in without]
        values = [v for v in followers if v.name not in members]
        columns = [r.output for r in ready if awaited(r) and r.output.name not in without and set(r.operands[0].axes) == full and set(r.axes) == across
                   and across and reductions_of([r.operands[0]]) <= members]
        nested = any(len(reductions_of([r.output])) > 1 for r in ready if r.output.name in members)
        if not values and not nested:
            return None
        later = reductions_of([v for v in pending(outputs + rest) if v not in followers + columns])
        read = {b.value.name for b in slice_of(values + [r.output for r in ready if r.output.name in members])[1]}
        for value in pending(outputs):  # what reads the same data, all or one number a row, is stored on the way
            alone = not reductions_of([value]) and value.name not in without
            if alone and set(value.axes) in (full, across) and read & {b.value.name for b in slice_of([value])[1]}:
                values.append(value)
        return values + columns + [r.output for r in ready if r.output.name in members and (r.output.name in stored or r.output.name in later)]

    def fitting(op: Reduce) -> "list[Value] | None":
        """What one pass over the rows of `op` stores: all that it could, or as much of it as is accepted; None for nothing."""
        values = rows(op)
        if not values or is_one_pass(segment(values)):
            return values
        without = {v.name for v in values}
        for name in sorted(without, key=position.get):
            values = rows(op, without - {name})
            if values and is_one_pass(segment(values)):
                without.discard(name)
        values = rows(op, without)
        return values if values and is_one_pass(segment(values)) else None

    def plain(op: Reduce) -> list[Value]:
        """Reductions over the same axes that need no other, and what reads the same data, stored on the way."""
        same = [r for r in ready if isinstance(r, Reduce) and r.output.name not in memory and _like(r, op) and len(reductions_of([r.output])) == 1]
        values = [r.output for r in same]
        ops, loads = slice_of(values)
        axes, read = set(_axes(ops, loads)), {b.value.name for b in loads}
        for value in pending(outputs):
            if set(value.axes) == axes and not reductions_of([value]) and read & {b.value.name for b in slice_of([value])[1]}:
                values.append(value)
        return values

    def awaited(op: Op) -> bool:
        return isinstance(op, Reduce) and op.output.name not in memory and op.output.name in reductions_of(pending(outputs))

    for k, (ready, outputs, reshapes) in enumerate(stages):
        rest = [v for stage in stages[k + 1 :] for v in stage.outputs]
        for op in ready:  # rows first: their pass may take along reductions that stand earlier
            if awaited(op):
                values = fitting(op)
                if values:
                    add(values)
        for op in ready:
            if awaited(op):
                values = fitting(op)
                if values:
                    add(values)
                if awaited(op):
                    add(plain(op))
        for group in _by_space(call, [v for v in dict.fromkeys(outputs) if v.name not in memory or memory[v.name].kind == "input"]):
            add(group)
        for op in reshapes:
            memory[op.output.name] = replace(memory[op.operands[0].name], value=op.output, strides=_row_major(_sizes(op.output)))
    return tuple(result)


class _Stage(NamedTuple):
    """`outputs` are to be stored, by the ops that are `ready`; the operands of `reshapes` are among them."""

    ready: "list[Op]"
    outputs: "list[Value]"
    reshapes: "list[Reshape]"


def _stages(fusion: Fusion) -> "list[_Stage]":
    """The ops that can be computed before anything that is stored is read back, those that wait for it once, and so on."""
    stage: dict[str, int] = {}
    for op in fusion.ops:
        stage[op.output.name] = max([stage.get(v.name, 0) for v in op.operands], default=0) + isinstance(op, Reshape)
    stored = [o.value for o in fusion.outputs] + [u.value for u in fusion.updates]
    result = []
    for k in range(max(stage.values(), default=0) + 1):
        reshapes = [op for op in fusion.ops if isinstance(op, Reshape) and stage[op.output.name] == k + 1]
        ready = [op for op in fusion.ops if stage[op.output.name] <= k and not isinstance(op, Reshape)]
        outputs = [v for v in stored if stage.get(v.name, 0) == k] + [op.operands[0] for op in reshapes]
        result.append(_Stage(ready, outputs, reshapes))
    return result


def _like(a: Reduce, b: Reduce) -> bool:
    """Whether one pass over the same axes can do both."""
    return set(a.axes) == set(b.axes) and set(a.operands[0].axes) == set(b.operands[0].axes)


def _input_buffer(i: TensorInput) -> Buffer:
    return Buffer(i.value, "input", i.index, i.strides, i.alignment, i.by_value)


def _ordered(buffers: list[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted(buffers, key=lambda b: (b.kind != "input", b.index)))


def _axes(ops: list[Op], loads: list[Buffer]) -> tuple[Axis, ...]:
    values = [b.value for b in loads] + [op.output for op in ops]
    return tuple(dict.fromkeys(axis for v in values for axis in v.axes))


def _by_space(call: Call, values: list[Value]) -> list[list[Value]]:
    """Groups values that one pointwise kernel can store: those whose axes are a subset of the largest one's. A subset rides along
    only if no axis it lacks has size 0, since then nothing would run."""
    groups: list[list[Value]] = []
    for value in sorted(values, key=lambda v: -len(v.axes)):
        for group in groups:
            host = set(group[0].axes)
            if host >= set(value.axes) and all(call.decide(sz.lt(0, a.extent)) for a in host - set(value.axes)):
                group.append(value)
                break
        else:
            groups.append([value])
    return groups
