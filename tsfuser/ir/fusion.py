"""The Fusion: what a group computes, as operations on values over symbolic axes, with no word about how.

In: built by `build.Builder`. Out: an immutable record that schedulers read. Example, `relu(x + 1)` over two
axes:

    Fusion(axes=(a0, a1), inputs=(TensorInput(x0, 0, ...),),
           ops=(Pointwise("add", ...), Pointwise("relu", ...)), outputs=(Output(relu_1, ...),))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from .dtypes import DType
from .layout import Room
from .size import Size, const
from .values import Axis, Value, Window


@dataclass(frozen=True)
class TensorInput:
    """Group argument `index`, read at `offset + sum(i_d * strides[d])`, only where all `windows` are; its
    elements elsewhere are not defined, and no op whose result is used depends on them. `by_value`: a 0-dim
    CPU tensor beside CUDA tensors, whose element travels as a kernel argument."""

    value: Value
    index: int
    strides: tuple[Size, ...]
    alignment: Size
    by_value: bool = False
    offset: Size = const(0)
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True)
class NumberInput:
    """Group argument `index`, a Python number passed to the kernel by value."""

    value: Value
    index: int


@dataclass(frozen=True)
class Pointwise:
    """`output[i] = symbol(operands[i])` (ir.symbols), of the operands converted to `compute` (to their own
    register type where None); the result is of `output.dtype.register`'s type. `name` is what the kernel
    calls it: `pow` where the symbol is `square`."""

    name: str
    symbol: str
    operands: tuple[Value, ...]
    compute: DType | None
    output: Value

    def __hash__(self):
        return hash(self.output)


@dataclass(frozen=True)
class Reduce:
    """`output = reduction of operand over axes`, by `combine` (`sum`), accumulated in
    `output.dtype.register`. A reduced dim is None in the output, or missing. `mean` and `squares` (the sum of
    squared distances from the mean) of one operand are found in one pass; of the four operands that are the
    `PARTIAL_MOMENTS` of parts of the data, they are those of all of it."""

    name: str
    combine: str
    operands: tuple[Value, ...]
    axes: tuple[Axis, ...]
    output: Value


#: Elements of a lone row that one block of a GPU scans: of longer ones torch's blocks, together, are faster.
LONGEST_LONE_SCAN = 1 << 17


@dataclass(frozen=True)
class Scan:
    """`output[i]` = the elements of the operand up to and with `i`, combined by `combine` along `axes`,
    the loops of one dim, outermost first; if it goes `backwards`, those from `i` on. Accumulated as a
    `Reduce`."""

    name: str
    combine: str
    operands: tuple[Value, ...]
    axes: tuple[Axis, ...]
    output: Value
    backwards: bool = False


@dataclass(frozen=True)
class Walk:
    """Which of eager's random numbers an element gets (ir/eager_random.py): the Philox blocks before it in
    the group's part of the generator's sequence, the threads of eager's kernel, and how many neighbours a
    thread takes at once."""

    counter: Size
    threads: Size
    width: Size


@dataclass(frozen=True)
class Random:
    """`output[i]` = a uniform random number in [0, 1), one for each element of the operand, whose values do
    not matter. It depends on the seed and offset of the call, on `stream` (the ops of a Fusion have streams
    0, 1, ...), and on the element's place in a dense tensor of the operand's layout (`linear_strides`, one
    step a dim of the output): so it is the same in every kernel that computes it. With a `walk` it is eager's
    number, in (0, 1], or a normal one where `name` says `normal`, and the stream does not matter. With a
    `seed`, the elements of that tensor argument are seed and offset, and `stream` is any number: then other
    groups with the same tensor have the same numbers. `saved`: the number of the `Fusion.seeds` that gets
    seed and offset of its own numbers, None for none."""

    name: str
    stream: int
    operands: tuple[Value, ...]
    output: Value
    linear_strides: tuple[Size, ...]
    walk: Walk | None = None
    seed: int | None = None
    saved: int | None = None


@dataclass(frozen=True)
class Reshape:
    """`output` = the elements of the operand, in row-major order, along dims of its own: what is stored in
    the one shape and read in the other, where no loops are those of both. With `strides` it is read as a
    `TensorInput` is."""

    name: str
    operands: tuple[Value, ...]
    output: Value
    strides: tuple[Size, ...] | None = None
    offset: Size = const(0)
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """`output[i]` = the element of tensor argument `table` at `offset + sum(i_d * strides[d]) +
    sum(operands[k][i] * steps[k])`. Each operand is an index. It says how far to go along a dim of the table
    that no loop walks: at least 0 and less than `extents[k]`, or the call is an error. `alignment` is that of
    the element at `offset`. `has_elements`: the table has some, so that one can be read where an index is out
    of range."""

    name: str
    table: int
    operands: tuple[Value, ...]
    output: Value
    strides: tuple[Size, ...]
    steps: tuple[Size, ...]
    extents: tuple[Size, ...]
    alignment: Size
    offset: Size = const(0)
    has_elements: bool = False


@dataclass(frozen=True)
class Located:
    """`output[i] = operand[i] * step`, in int64: how many elements of memory an index is away, where an
    `Update` adds. The operand is at least 0 and less than `extent`, or the call is an error, and the output
    less than 0."""

    name: str
    operands: tuple[Value, ...]
    output: Value
    step: Size
    extent: Size


@dataclass(frozen=True)
class Within:
    """`output[i]` = whether `i` is in the `window`."""

    name: str
    window: Window
    output: Value
    operands: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Position:
    """`output[i]` = the number of `i` along the dim of the `window`, which is all of that dim, in int64."""

    name: str
    window: Window
    output: Value
    operands: tuple[Value, ...] = ()


Op = Union[Pointwise, Reduce, Scan, Random, Reshape, Lookup, Located, Within, Position]
PLACES = (Within, Position)  #: ops that look at nothing but where an element is
MOMENTS = ("mean", "squares")  #: reductions that share an accumulator
PARTIAL_MOMENTS = (
    "count",
    "origin",
    "rest",
    "squares",
)  #: what is left of a part of the data, whose mean is `origin + rest`


@dataclass(frozen=True)
class Output:
    """A tensor that the group returns: `value` stored with `sizes` and `strides` (elements). `steps` are the
    strides of the value's own dims; these are more than the tensor's where one of its dims is two axes.
    `room`: its memory has gaps, which hold zeros."""

    value: Value
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    steps: tuple[Size, ...]
    room: Room | None = None


@dataclass(frozen=True)
class Update:
    """`value` stored into the memory of tensor argument `index`, as running statistics are. `counted`: the
    argument's version goes up by one, as an in-place op of autograd's makes it. With `at`, the results of
    `Located` ops, the value is added at these offsets (elements) from where the strides lead, in any order
    and at any place more than once."""

    value: Value
    index: int
    strides: tuple[Size, ...]
    alignment: Size
    counted: bool
    at: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Empty:
    """A tensor of sizes (0,), which some ops return in place of a result that they have not computed."""

    dtype: DType


@dataclass(frozen=True)
class Seed:
    """A tensor of `length` int64 that begins with seed and offset of the random numbers `uniform`: as
    `Random.seed` it gives the same numbers."""

    uniform: Value
    length: int


@dataclass(frozen=True)
class Fusion:
    """`results` gives the group's outputs in order: `("output", k)` for `outputs[k]`, `("input", i)` for
    argument `i` itself, `("integer", n)` for a plain number, `("empty", dtype name)` for a tensor of sizes
    (0,), `("undefined", 0)` for a gradient that was not asked for, `("seed", k)` for a tensor of `seeds[k]`
    int64, which a random op fills (`Random.saved`). `drawn`: the Philox blocks by which eager's generator
    advances, where random numbers are eager's."""

    inputs: tuple[TensorInput, ...]
    numbers: tuple[NumberInput, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    results: tuple[tuple[str, int | str], ...]
    updates: tuple[Update, ...] = ()
    drawn: Size | None = None
    seeds: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Code that builds the Fusion, one statement an op; `ir.text.read` runs it."""
        return _code(self)

    def __hash__(self) -> int:
        return hash(self.outputs)  # tells most apart; the ops, which take long, may be 1,000

    @property
    def randoms(self) -> tuple[Random, ...]:
        """Its random ops."""
        return tuple(op for op in self.ops if isinstance(op, Random))

    @property
    def drawing(self) -> tuple[Random, ...]:
        """Its random ops whose numbers are new in each call."""
        return tuple(op for op in self.randoms if op.seed is None)

    @property
    def lookups(self) -> tuple[Lookup, ...]:
        """Its lookups."""
        return tuple(op for op in self.ops if isinstance(op, Lookup))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, in the order of first appearance."""
        seen: dict[Axis, None] = {}
        for value in [i.value for i in self.inputs] + [op.output for op in self.ops]:
            for axis in value.axes:
                seen.setdefault(axis)
        return tuple(seen)


def _code(fusion: Fusion) -> str:
    lines = [f"{leaf.b} = leaf({leaf.a}, {leaf.b!r})" for leaf in leaves(fusion)]
    lines += [f"{axis.name} = axis({axis.name!r}, {axis.extent.text()})" for axis in fusion.axes]
    for i in fusion.inputs:
        lines.append(f"{i.value.name} = {_tensor(i.value)}")
    for n in fusion.numbers:
        lines.append(f"{n.value.name} = number({n.value.name!r}, {n.value.dtype})")
    for op in fusion.ops:
        lines.append(f"{op.output.name} = {_tensor(op.output)}")
    inputs = "".join(
        f"    input({i.value.name}, {i.index}, {_sizes(i.strides)}, {i.alignment.text()}, {i.by_value}"
        f"{_windows(i.offset, i.windows)}),\n"
        for i in fusion.inputs
    )
    numbers = "".join(f"    number_input({n.value.name}, {n.index}),\n" for n in fusion.numbers)
    ops = "".join(f"    {statement(op)},\n" for op in fusion.ops)
    outputs = "".join(
        f"    output({o.value.name}, {_sizes(o.sizes)}, {_sizes(o.strides)}, {_sizes(o.steps)}"
        f"{_room(o.room)}),\n"
        for o in fusion.outputs
    )
    updates = "".join(
        f"    update({u.value.name}, {u.index}, {_sizes(u.strides)}, {u.alignment.text()}, {u.counted}"
        f"{_at(u)}),\n"
        for u in fusion.updates
    )
    parts = [
        ("inputs", inputs),
        ("numbers", numbers),
        ("ops", ops),
        ("outputs", outputs),
        ("updates", updates),
    ]
    lines += [f"{name} = (\n{text})" if text else f"{name} = ()" for name, text in parts]
    drawn = "" if fusion.drawn is None else f", {_size(fusion.drawn)}"
    seeds = f", seeds={fusion.seeds!r}" if fusion.seeds else ""
    return "\n".join(
        lines + [f"fusion = Fusion(inputs, numbers, ops, outputs, {fusion.results!r}, updates{drawn}{seeds})"]
    )


def leaves(fusion: Fusion) -> list[Size]:
    """The leaves of all its sizes."""
    sizes = [a.extent for a in fusion.axes]
    sizes += [v.size for op in fusion.ops for v in op.operands if v.size is not None]
    sizes += [step for op in fusion.randoms for step in op.linear_strides]
    sizes += [
        size for op in fusion.randoms if op.walk for size in (op.walk.counter, op.walk.threads, op.walk.width)
    ]
    sizes += [] if fusion.drawn is None else [fusion.drawn]
    sizes += [
        size
        for op in fusion.lookups
        for size in (*op.strides, *op.steps, *op.extents, op.alignment, op.offset)
    ]
    sizes += [size for op in fusion.ops if isinstance(op, Located) for size in (op.step, op.extent)]
    for i in fusion.inputs:
        sizes += [*i.strides, i.alignment, i.offset, *_bounds(i.windows)]
    for op in fusion.ops:
        if isinstance(op, PLACES):
            sizes += _bounds((op.window,))
        elif isinstance(op, Reshape):
            sizes += [*(op.strides or ()), op.offset, *_bounds(op.windows)]
    for o in fusion.outputs:
        sizes += [*o.sizes, *o.strides, *o.steps, *_parts(o.room)]
    for u in fusion.updates:
        sizes += [*u.strides, u.alignment]
    found: dict[Size, None] = {}
    while sizes:
        size = sizes.pop()
        if size.op == "leaf":
            found[size] = None
        elif not size.is_const:
            sizes += [size.a, size.b]
    return sorted(found, key=lambda leaf: leaf.a)


def _at(update: Update) -> str:
    return f", {tuple_text([value.name for value in update.at])}" if update.at else ""


def _bounds(windows: tuple[Window, ...]) -> list[Size]:
    return [size for window in windows for size in window.ends]


def _parts(room: Room | None) -> list[Size]:
    return [] if room is None else [room.parts, room.length, room.pitch, room.behind]


def _room(room: Room | None) -> str:
    return "" if room is None else f", room({', '.join(map(_size, _parts(room)))}, {room.dim})"


def tuple_text(items: list[str]) -> str:
    """A tuple of these expressions, as Python writes it."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _size(size: Size) -> str:
    return f"const({size.a})" if size.is_const else size.text()


def _sizes(sizes) -> str:
    return tuple_text(list(map(_size, sizes)))


def _tensor(value: Value) -> str:
    return (
        f"tensor({value.name!r}, {value.dtype}, "
        f"{tuple_text(['None' if a is None else a.name for a in value.dims])})"
    )


def _operand(value: Value) -> str:
    if value.size is not None:
        return f"extent({value.size.text()})"
    return value.name if value.literal is None else f"literal({value.literal!r}, {value.dtype})"


def _walk(op: Random) -> str:
    walk = op.walk
    if op.seed is not None:
        return f", seed={op.seed}"
    if op.saved is not None:
        return f", saved={op.saved}"
    return f", walk({', '.join(map(_size, (walk.counter, walk.threads, walk.width)))})" if walk else ""


def _window(window: Window) -> str:
    axes = tuple_text([axis.name for axis in window.axes])
    stop = None if window.stop is None else _size(window.stop)
    return f"window({axes}, {_size(window.start)}, {stop})"


def _windows(offset: Size, windows: tuple[Window, ...]) -> str:
    """The last arguments of an input that is read in windows; nothing where all is read."""
    if offset is const(0) and not windows:
        return ""
    return f", {_size(offset)}, {tuple_text(list(map(_window, windows)))}"


def statement(op: Op) -> str:
    """The op as `ir.text.read` takes it: `pointwise('relu', 'relu', (add_0,), float32, relu_1)`."""
    operands = tuple_text([_operand(v) for v in op.operands])
    if isinstance(op, Reduce):
        return (
            f"reduce({op.name!r}, {op.combine!r}, {operands}, {tuple_text([a.name for a in op.axes])}, "
            f"{op.output.name})"
        )
    if isinstance(op, Scan):
        return (
            f"scan({op.name!r}, {op.combine!r}, {operands}, {tuple_text([a.name for a in op.axes])}, "
            f"{op.output.name}, {op.backwards})"
        )
    if isinstance(op, Random):
        return (
            f"random({op.name!r}, {op.stream}, {operands}, {op.output.name}, "
            f"{_sizes(op.linear_strides)}{_walk(op)})"
        )
    if isinstance(op, Reshape):
        read = f", {_sizes(op.strides)}{_windows(op.offset, op.windows)}" if op.strides is not None else ""
        return f"reshape({op.name!r}, {operands}, {op.output.name}{read})"
    if isinstance(op, PLACES):
        return f"{type(op).__name__.lower()}({op.name!r}, {_window(op.window)}, {op.output.name})"
    if isinstance(op, Located):
        where = f"{op.output.name}, {_size(op.step)}, {_size(op.extent)}"
        return f"located({op.name!r}, {operands}, {where})"
    if isinstance(op, Lookup):
        steps = f"{_sizes(op.strides)}, {_sizes(op.steps)}, {_sizes(op.extents)}"
        where = f"{op.alignment.text()}, {_size(op.offset)}, {op.has_elements}"
        return f"lookup({op.name!r}, {op.table}, {operands}, {op.output.name}, {steps}, {where})"
    return f"pointwise({op.name!r}, {op.symbol!r}, {operands}, {op.compute}, {op.output.name})"
