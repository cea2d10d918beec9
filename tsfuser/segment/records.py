"""What a segment is: the ops of one kernel, and the tensors in memory around them.

In: made by `cut.segments`. Out: frozen records that schedulers read. `str(segment)` is code that `read` runs:
`read(str(s)) == s`. Example of a segment that adds one:

    Segment((pointwise('add', 'add', (x0, literal(1.0, float64)), float32, add_0),),
            (Buffer(x0, BufferKind.INPUT, 0, (const(1),), align0),),
            (Buffer(add_0, BufferKind.ALLOCATION, 0, ...),), (a0,))
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from ..ir import size as sz
from ..ir.code import code
from ..ir.code import read as read_record
from ..ir.fusion import PLACES, Axis, Located, Lookup, Op, Random, Reduce, Scan, Value
from ..ir.layout import Room
from ..ir.size import Size
from ..ir.values import Window


class BufferKind(enum.Enum):
    """What a Buffer is, and what its `index` counts."""

    INPUT = "input"  # a group argument that the kernel reads
    UPDATE = "update"  # a group argument to which the kernel stores
    ALLOCATION = "allocation"  # a tensor that the plan allocates
    LOOKUP = "lookup"  # a group argument that is read at the indices that an operand of the op holds
    RANDOM = "random"  # no memory: a random stream, read at the linear index of an element

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory. `strides` (in elements) has one entry per dim of `value`; `alignment` is in bytes;
    `offset` and `windows` are those of `fusion.TensorInput`, `room` is that of `fusion.Output`, `at` that of
    `fusion.Update`. Example: the argument 2 of the group is a Buffer of the kind INPUT with the index 2."""

    value: Value
    kind: BufferKind
    index: int
    strides: tuple[Size, ...]
    alignment: Size
    by_value: bool = False
    offset: Size = sz.const(0)
    windows: tuple[Window, ...] = ()
    room: Room | None = None
    at: tuple[Value, ...] = ()

    def stride(self, axis: Axis) -> Size:
        """Elements between neighbours along `axis`; 0 if the tensor lacks it."""
        for own, stride in zip(self.value.dims, self.strides):
            if own is not None and own == axis:
                return stride
        return sz.const(0)


@dataclass(frozen=True)
class Segment:
    """The `ops` of one kernel, in order, with its `loads` and `stores`. `axes` are its iteration space. All
    its Reduce ops run over the same axes, except that in a pass over rows some may run over all other axes,
    or over the same ones of them.
    """

    ops: tuple[Op, ...]
    loads: tuple[Buffer, ...]
    stores: tuple[Buffer, ...]
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        """Code that builds the segment; `read` runs it."""
        return code(self)

    def __hash__(self) -> int:
        return hash(self.stores)  # as of a Fusion

    @cached_property
    def reductions(self) -> tuple[Reduce, ...]:
        """Its reductions."""
        return tuple(op for op in self.ops if isinstance(op, Reduce))

    @property
    def uses_reductions(self) -> bool:
        """Whether an op depends on one of the reductions, so that the kernel may need its data twice."""
        reduced = {op.output.name for op in self.reductions}
        return any(v.name in reduced for op in self.ops for v in op.operands)

    @cached_property
    def scans(self) -> tuple[Scan, ...]:
        """Its scans."""
        return tuple(op for op in self.ops if isinstance(op, Scan))

    @cached_property
    def randoms(self) -> tuple[Random, ...]:
        """Its random ops. Other segments may compute the same ones again."""
        return tuple(op for op in self.ops if isinstance(op, Random))

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """Its lookups. Other segments may do the same ones again."""
        return tuple(op for op in self.ops if isinstance(op, Lookup))

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows in which it reads an input, or that an op asks about."""
        read = [window for buffer in self.loads for window in buffer.windows]
        return tuple(dict.fromkeys([*read, *(op.window for op in self.ops if isinstance(op, PLACES))]))

    @property
    def name(self) -> str:
        """The name of the kernel, made of the distinct ops in order."""
        named = [op.name for op in self.ops if not isinstance(op, (*PLACES, Located))]
        words = list(dict.fromkeys(named)) or ["copy"]
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
    """The tensors that a plan allocates: first the group's outputs, then the temporaries for which segments
    and schedules ask."""

    def __init__(self, outputs: int):
        self.outputs = outputs
        self.temporaries: list[Temporary] = []

    def new(self, value: Value, multiple: int = 1) -> Buffer:
        """A row-major temporary that holds `value`. It is dense, except that the stride of its first dim is
        rounded up to a `multiple` of elements."""
        sizes = sizes_of(value)
        strides = row_major(sizes)
        if multiple > 1:
            strides = (sz.ceildiv(strides[0], multiple) * multiple, *strides[1:])
        temporary = Temporary(value, sizes, strides, self.outputs + len(self.temporaries))
        self.temporaries.append(temporary)
        return Buffer(value, BufferKind.ALLOCATION, temporary.index, temporary.strides, sz.const(256))


def sizes_of(value: Value) -> tuple[Size, ...]:
    """The sizes of a tensor that holds `value`."""
    return tuple(sz.const(1) if a is None else a.extent for a in value.dims)


def row_major(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The strides of a dense tensor of `sizes`."""
    strides, step = [], sz.const(1)
    for size in reversed(sizes):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def read(text: str) -> Segment:
    """The Segment that `str` has printed."""
    return read_record(text, Segment, Buffer, BufferKind, Room)
