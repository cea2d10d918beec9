"""Cuts a Fusion into segments, each of which becomes one kernel.

In: a Fusion. Out: ordered `Segment`s with what each reads from and writes to memory. A pointwise segment
computes everything between memory and its outputs. Outputs over a subset of its axes are stored by the same
segment. Example: `y = x + b; z = b * 2` over axes (r, c) and (c) is one segment; only its first row stores
`z`. The operand of a reshape is stored by a segment of one level, and read along other axes by the next
level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..ir import size as sz
from ..ir.call import Call
from ..ir.fusion import Axis, Fusion, Op, Reduce, Reshape, Scan, TensorInput, Value
from . import tables
from .records import Allocations, Buffer, BufferKind, Segment, row_major, sizes_of

WORTH_A_LAUNCH = 1 << 18  # elements: to store as many costs more than to launch another kernel


def segments(
    call: Call, fusion: Fusion, allocations: Allocations, is_one_pass: Callable[[Segment], bool]
) -> tuple[Segment, ...]:
    """The segments of `fusion` in an order that respects their dependences. Temporaries between them are
    added to `allocations`. `is_one_pass` says whether one pass over memory can do a segment in which results
    depend on reductions."""
    cut = _Cut(_Dependences.of(fusion), allocations, {i.value.name: _input_buffer(i) for i in fusion.inputs})
    levels = _levels(fusion)
    for k, level in enumerate(levels):
        later = [value for other in levels[k + 1 :] for value in other.outputs]
        _add_tables(call, cut, level)
        for op in level.ready:  # passes with results first: such a pass may include earlier reductions
            _add_pass_with_results(cut, level, later, op, is_one_pass)
        for op in level.ready:
            _add_pass_with_results(cut, level, later, op, is_one_pass)
            if isinstance(op, Reduce) and _is_awaited(cut, level, op):
                cut.add(_plain_pass(cut, level, op))
        unstored = [
            v
            for v in dict.fromkeys(level.outputs)
            if cut.is_pending(v) or cut.memory[v.name].kind is BufferKind.INPUT
        ]
        for values in _by_space(call, cut, unstored):
            cut.add(values)
        for op in level.reshapes:
            cut.memory[op.output.name] = _reshaped(cut.memory[op.operands[0].name], op)
    # last: where a kernel before it fails, nothing has been added, and the group's ops may run instead
    for value in (value for level in levels for value in level.added):
        cut.add([value])
    return tuple(cut.segments)


@dataclass(frozen=True)
class _Dependences:
    """For each value of a Fusion, by name: the op that computes it (`producer`) and its place in the order
    of ops (`position`). For each result of the group: the buffer to which it is stored (`stored`)."""

    producer: dict[str, Op]
    position: dict[str, int]
    stored: dict[str, Buffer]

    @staticmethod
    def of(fusion: Fusion) -> _Dependences:
        stored = {
            o.value.name: Buffer(o.value, BufferKind.ALLOCATION, k, o.steps, sz.const(256), room=o.room)
            for k, o in enumerate(fusion.outputs)
        }
        stored |= {
            u.value.name: Buffer(u.value, BufferKind.UPDATE, u.index, u.strides, u.alignment, at=u.at)
            for u in fusion.updates
        }
        return _Dependences(
            {op.output.name: op for op in fusion.ops},
            {op.output.name: i for i, op in enumerate(fusion.ops)},
            stored,
        )

    def between(self, memory: dict[str, Buffer], roots: list[Value]) -> tuple[list[Op], list[Buffer]]:
        """The ops between memory and `roots`, in order, and the buffers that they read."""
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
            op = self.producer[value.name]
            ops.append(op)
            stack.extend(op.operands)
            if value.name in self.stored:
                stack.extend(self.stored[value.name].at)
        ops.sort(key=lambda op: self.position[op.output.name])
        return ops, list(loads.values())


@dataclass
class _Cut:
    """A Fusion while it is cut: the values that are in memory already, by name, and the segments so far."""

    dependences: _Dependences
    allocations: Allocations
    memory: dict[str, Buffer]
    segments: list[Segment] = field(default_factory=list)

    def is_pending(self, value: Value) -> bool:
        """Whether `value` is not in memory yet."""
        return value.name not in self.memory

    def pending(self, values: list[Value]) -> list[Value]:
        """Those that are not in memory yet, each once."""
        return [v for v in dict.fromkeys(values) if self.is_pending(v)]

    def reductions(self, values: list[Value], stored: Sequence[Value] = ()) -> set[str]:
        """Names of the reductions between memory and `values`; if one of `values` is the result of a
        reduction, that one is included. `stored` will be in memory, too."""
        memory = {**self.memory, **{v.name: _unnumbered(v) for v in stored}}
        return {
            op.output.name for op in self.dependences.between(memory, values)[0] if isinstance(op, Reduce)
        }

    def reads(self, values: list[Value]) -> set[str]:
        """Names of the tensors in memory that are read to compute `values`."""
        return {b.value.name for b in self.dependences.between(self.memory, values)[1]}

    def scans(self, value: Value) -> set[tuple[tuple[Axis, ...], bool]]:
        """Along which axes, and in which direction, the scans between memory and `value` go."""
        ops, _ = self.dependences.between(self.memory, [value])
        return {(op.axes, op.backwards) for op in ops if isinstance(op, Scan)}

    def segment(self, values: list[Value]) -> Segment:
        """A segment that stores `values`. The buffers of temporaries have no number yet."""
        ops, loads = self.dependences.between(self.memory, values)
        stored = self.dependences.stored
        stores = tuple(stored[v.name] if v.name in stored else _unnumbered(v) for v in values)
        return Segment(tuple(ops), _ordered(loads), stores, _axes(ops, loads))

    def innermost(self, value: Value) -> Axis | None:
        """The axis that has stride 1 where `value` will be stored; None if no axis has."""
        buffer = self.dependences.stored.get(value.name) or _unnumbered(value)
        units = [a for a, s in zip(value.dims, buffer.strides) if a is not None and s is sz.const(1)]
        return units[-1] if units else None

    def add(self, values: list[Value]) -> None:
        """Adds the segment that stores `values`. From now on they are in memory."""
        made = self.segment(values)
        stores = tuple(b if b.index >= 0 else self.allocations.new(b.value) for b in made.stores)
        self.segments.append(replace(made, stores=stores))
        self.memory.update((b.value.name, b) for b in stores)


def _unnumbered(value: Value) -> Buffer:
    """A temporary that may never be allocated."""
    return Buffer(value, BufferKind.ALLOCATION, -1, row_major(sizes_of(value)), sz.const(256))


def _add_tables(call: Call, cut: _Cut, level: _Level) -> None:
    """Adds segments that store tables, and the outputs over the same axes."""

    def between(value: Value) -> tuple[list[Op], list[Buffer]]:
        stored = cut.dependences.stored.get(value.name)
        # the new value of an argument is not read back
        if stored is not None and stored.kind is BufferKind.UPDATE:
            return [], []
        return cut.dependences.between(cut.memory, [value])

    room = tables.MOST_TABLES
    while room and (values := tables.next_tables(call, level.ready, lambda v: between(v)[0])[:room]):
        room -= len(values)
        axes, windows = set(values[0].axes), [tables.windows(*between(v)) for v in values]
        others = [v for v in cut.pending(level.outputs) if set(v.axes) == axes and v not in values]
        cut.add(values + [v for v in others if tables.is_plain(between(v)[0])])
        for value, own in zip(values, windows):
            cut.memory[value.name] = replace(cut.memory[value.name], windows=own)


def _is_awaited(cut: _Cut, level: _Level, op: Reduce) -> bool:
    """Whether the result of reduction `op` is not in memory and is needed by an output."""
    return cut.is_pending(op.output) and op.output.name in cut.reductions(cut.pending(level.outputs))


def _add_pass_with_results(
    cut: _Cut, level: _Level, later: list[Value], op: Op, is_one_pass: Callable[[Segment], bool]
) -> None:
    """Adds the segment that computes reduction `op` and values that depend on it in one pass, if there is
    one. It stores everything that such a pass could store, or as much of it as `is_one_pass` accepts."""
    if not isinstance(op, Reduce) or not _is_awaited(cut, level, op):
        return
    values = _pass_with_results(cut, level, later, op)
    if values and not is_one_pass(cut.segment(values)):
        without = {v.name for v in values}
        for name in sorted(without, key=cut.dependences.position.get):
            values = _pass_with_results(cut, level, later, op, without - {name})
            if values and is_one_pass(cut.segment(values)):
                without.discard(name)
        values = _pass_with_results(cut, level, later, op, without)
        if values and not is_one_pass(cut.segment(values)):
            return
    if values:
        cut.add(values)


def _pass_with_results(
    cut: _Cut, level: _Level, later: list[Value], op: Reduce, without: set[str] | frozenset[str] = frozenset()
) -> list[Value]:
    """The values that one pass over the data of `op` could store, except those in `without`: reductions over
    the same axes, also of one another's results; the values that depend on them; and reductions of those
    values over the other axes, or else over some of them. Empty if nothing depends on a reduction."""
    members = _members(cut, level, op)
    if op.output.name not in members:
        return []
    full, kept = set(op.operands[0].axes), set(op.operands[0].axes) - set(op.axes)
    dependents = [v for v in cut.pending(level.outputs) if v.name not in without and set(v.axes) <= full]
    dependents = [v for v in dependents if (needed := cut.reductions([v])) and needed <= members]
    values = [v for v in dependents if v.name not in members]
    reductions = [r.output for r in level.ready if r.output.name in members]
    if not values and all(len(cut.reductions([r])) == 1 for r in reductions):
        return []
    columns = _columns(
        [
            r
            for r in level.ready
            if isinstance(r, Reduce)
            and _is_awaited(cut, level, r)
            and r.output.name not in without
            and set(r.operands[0].axes) == full
            and r.axes
            and set(r.axes) <= kept
            and cut.reductions([r.operands[0]]) <= members
        ],
        kept,
    )
    needed_later = cut.reductions(
        [v for v in cut.pending(level.outputs + later) if v not in dependents + columns], values + columns
    )
    values += _with_common_reads(cut, level, values + reductions, (full, kept), without)
    stored = cut.dependences.stored
    return values + columns + [r for r in reductions if r.name in stored or r.name in needed_later]


def _columns(found: list[Reduce], kept: set[Axis]) -> list[Value]:
    """The results of those that one pass over rows can add up: of those over all axes `kept` of the rows, or
    where there are none, of those over the same axes as the first one."""
    chosen = [r for r in found if set(r.axes) == kept] or found
    return [r.output for r in chosen if set(r.axes) == set(chosen[0].axes)]


def _members(cut: _Cut, level: _Level, op: Reduce) -> set[str]:
    """Names of the reductions over the axes of `op` that depend on no other reductions than one another."""
    members: set[str] = set()
    for r in level.ready:
        if isinstance(r, Reduce) and cut.is_pending(r.output) and _reduces_same_axes(r, op):
            if cut.reductions([r.output]) <= members | {r.output.name}:
                members.add(r.output.name)
    return members


def _with_common_reads(
    cut: _Cut,
    level: _Level,
    values: list[Value],
    axes: tuple[set[Axis], ...],
    without: set[str] | frozenset[str] = frozenset(),
) -> list[Value]:
    """The outputs over one of the sets `axes` that need no reduction and read a tensor that `values` read,
    too: the same pass computes them without reading more."""
    read = cut.reads(values)
    return [
        v
        for v in cut.pending(level.outputs)
        if v.name not in without and set(v.axes) in axes and not cut.reductions([v]) and read & cut.reads([v])
    ]


def _plain_pass(cut: _Cut, level: _Level, op: Reduce) -> list[Value]:
    """Reductions over the same axes as `op` that depend on no other reduction, and outputs that read the same
    data."""
    same = [
        r.output
        for r in level.ready
        if isinstance(r, Reduce) and cut.is_pending(r.output) and _reduces_same_axes(r, op)
    ]
    values = [v for v in same if len(cut.reductions([v])) == 1]
    ops, loads = cut.dependences.between(cut.memory, values)
    others = _with_common_reads(cut, level, values, (set(_axes(ops, loads)),))
    return values + [v for v in others if not cut.scans(v)]


class _Level(NamedTuple):
    """The ops `ready` compute the `outputs`, which are to be stored. The operands of `reshapes` are among
    them. Each of `added` goes to places that indices name, in a kernel of its own."""

    ready: Sequence[Op]
    outputs: list[Value]
    reshapes: list[Reshape]
    added: list[Value]


def _levels(fusion: Fusion) -> list[_Level]:
    """Level 0 is computed from the inputs. Each further level reads what the level before has stored for a
    reshape."""
    level: dict[str, int] = {}
    for op in fusion.ops:
        level[op.output.name] = max([level.get(v.name, 0) for v in op.operands], default=0) + isinstance(
            op, Reshape
        )
    stored = [o.value for o in fusion.outputs] + [u.value for u in fusion.updates if not u.at]
    added = [u.value for u in fusion.updates if u.at]
    result = []
    for k in range(max(level.values(), default=0) + 1):
        reshapes = [op for op in fusion.ops if isinstance(op, Reshape) and level[op.output.name] == k + 1]
        ready = [op for op in fusion.ops if level[op.output.name] <= k and not isinstance(op, Reshape)]
        outputs = [v for v in stored if level.get(v.name, 0) == k] + [op.operands[0] for op in reshapes]
        result.append(_Level(ready, outputs, reshapes, [v for v in added if level.get(v.name, 0) == k]))
    return result


def _reduces_same_axes(a: Reduce, b: Reduce) -> bool:
    """Whether both reduce the same axes of the same space, so that one pass can do both."""
    return set(a.axes) == set(b.axes) and set(a.operands[0].axes) == set(b.operands[0].axes)


def _input_buffer(i: TensorInput) -> Buffer:
    alignment = _alignment_at(i.offset, i.alignment, i.value)
    return Buffer(i.value, BufferKind.INPUT, i.index, i.strides, alignment, i.by_value, i.offset, i.windows)


def _reshaped(source: Buffer, op: Reshape) -> Buffer:
    """The buffer of `source`, which is row-major, with the dims of the result of `op`."""
    strides = row_major(sizes_of(op.output)) if op.strides is None else op.strides
    alignment = _alignment_at(op.offset, source.alignment, op.output)
    return replace(
        source, value=op.output, strides=strides, alignment=alignment, offset=op.offset, windows=op.windows
    )


def _alignment_at(offset: sz.Size, alignment: sz.Size, value: Value) -> sz.Size:
    """Bytes that divide the address of the element at `offset`, if `alignment` divides that of the buffer."""
    if offset is sz.const(0):
        return alignment
    return sz.minimum(alignment, sz.pow2(offset * value.dtype.itemsize))


def _ordered(buffers: list[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted(buffers, key=lambda b: (b.kind is not BufferKind.INPUT, b.index)))


def _axes(ops: list[Op], loads: list[Buffer]) -> tuple[Axis, ...]:
    values = [b.value for b in loads] + [op.output for op in ops]
    return tuple(dict.fromkeys(axis for v in values for axis in v.axes))


def _by_space(call: Call, cut: _Cut, values: list[Value]) -> list[list[Value]]:
    """Groups values that one pointwise kernel can store: those whose axes are a subset of the largest one's.
    No axis that a value lacks may have size 0: the kernel would run no iteration, and not store the value."""
    groups: list[list[Value]] = []
    for value in sorted(values, key=lambda v: -len(v.axes)):
        for group in groups:
            host = set(group[0].axes)
            if (
                host >= set(value.axes)
                and all(call.decide(sz.lt(0, a.extent)) for a in host - set(value.axes))
                and not _goes_alone(call, cut, group[0], value)
                and _scans_as(cut, group, value)
            ):
                group.append(value)
                break
        else:
            groups.append([value])
    return groups


def _scans_as(cut: _Cut, group: list[Value], value: Value) -> bool:
    """Whether one kernel can do the scans of `value` with those of `group`: they go along the same dim, or
    only one of the two has scans, and both read a common tensor."""
    own, others = cut.scans(value), set().union(*map(cut.scans, group))
    return own == others or (not (own and others) and not cut.reads(group).isdisjoint(cut.reads([value])))


def _goes_alone(call: Call, cut: _Cut, host: Value, value: Value) -> bool:
    """Whether a large `value` gets a kernel of its own, which can store it in wide accesses: its innermost
    axis in memory is another one than that of `host`, and the two read no common tensor of two or more dims.
    """
    if len(value.axes) < len(host.axes) or cut.innermost(value) == cut.innermost(host):
        return False
    read = [
        {b.value.name for b in cut.dependences.between(cut.memory, [v])[1] if len(b.value.axes) > 1}
        for v in (host, value)
    ]
    return read[0].isdisjoint(read[1]) and bool(
        call.decide(sz.le(WORTH_A_LAUNCH, sz.product([a.extent for a in value.axes])))
    )
