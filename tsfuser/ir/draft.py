"""A Fusion while it is built: its parts so far, over axes that are still being joined and cut.

In: the `Call` it is built for. Out: new axes and values, and the lists that `build`, `views` and
`rematerialize` add to; `finish` makes the Fusion of them. Example, `relu` of argument 0:

    x = draft.inputs[0].value
    y = draft.new("relu", x.dtype, x.dims, draft.layout(x))     # relu_0
    draft.ops.append(Pointwise("relu", "relu", (x,), FLOAT, y))
"""

from __future__ import annotations

from collections.abc import Sequence

from . import layout as lay
from . import size as sz
from .axes import Axes
from .call import Call
from .dtypes import DType
from .fusion import Axis, NumberInput, Op, Output, Seed, TensorInput, Update, Value


class Draft:
    """What there is of one Fusion. A value keeps the dims that it was made with: `axis` says what stands for
    an axis by now. Strides are those of the dims, not yet of the loops that a dim may be."""

    def __init__(self, call: Call):
        self.call = call
        self.axes = Axes(call, self.fresh_axis)
        self.inputs: dict[int, TensorInput] = {}  # by number of the argument
        self.rereads: list[TensorInput] = []  # arguments that are read once more, over other axes
        self.numbers: dict[int, NumberInput] = {}  # by number of the argument
        self.ops: list[Op] = []
        self.outputs: list[Output] = []
        self.results: list[tuple[str, int | str]] = []
        self.seeds: list[Seed] = []  # that are returned
        self.updates: list[Update] = []
        self.layouts: dict[str, lay.Layout] = {}  # value name -> layout that eager would give it
        self.sources: dict[str, TensorInput] = {}  # name of an input, or of a view of one -> that input
        # values that were computed a second time, and the finer axes that the copies have for some of theirs
        self.splits: list[tuple[Value, dict[Axis, tuple[Axis, ...]]]] = []
        # what an input is read as, once and once more, and the finer axes of the latter
        self.split_reads: list[tuple[Value, Value, dict[Axis, tuple[Axis, ...]]]] = []
        # names of values that must not leave the group: eager's may be views of others
        self.views: set[str] = set()
        # names of values of 0-dim CPU tensors that eager has copied to the group's device
        self.moved: set[str] = set()
        self.drawn: sz.Size | None = None  # Philox blocks that eager's random ops have taken so far
        self._count = 0

    def axis(self, axis: Axis) -> Axis:
        """The axis that stands for `axis` now."""
        return self.axes.root(axis)

    def fresh_axis(self, extent: sz.Size) -> Axis:
        """A new axis."""
        self._count += 1
        return Axis(f"e{self._count - 1}", extent)

    def new(
        self, name: str, dtype: DType, dims: Sequence[Axis | None], layout: lay.Layout | None = None
    ) -> Value:
        """A value with a name of its own, row-major if no `layout` is given."""
        self._count += 1
        value = self.axes.hold(Value(f"{name}_{self._count - 1}", dtype, tuple(dims)))
        self.layouts[value.name] = lay.contiguous(self.sizes(value)) if layout is None else layout
        return value

    def extents(self, dims: Sequence[Axis | None]) -> tuple[sz.Size, ...]:
        """The sizes of dims."""
        return tuple(sz.const(1) if a is None else self.axis(a).extent for a in dims)

    def sizes(self, value: Value) -> tuple[sz.Size, ...]:
        """The sizes of a tensor value's dims."""
        return self.extents(value.dims)

    def layout(self, value: Value) -> lay.Layout:
        """Sizes and strides that eager would give `value`."""
        return self.layouts[value.name]

    @property
    def reads(self) -> tuple[TensorInput, ...]:
        """All that is read of arguments."""
        return (*self.inputs.values(), *self.rereads)

    def is_read(self, value: Value) -> bool:
        """Whether `value` is an input, or a view of one: its layout says where memory holds it."""
        return value.name in self.sources

    def needed(self, values: Sequence[Value]) -> list[Op]:
        """The ops that `values` depend on, in order."""
        names, ops = {v.name for v in values}, []
        for op in reversed(self.ops):
            if op.output.name in names:
                ops.append(op)
                names.update(v.name for v in op.operands)
        return ops[::-1]

    def input_of(self, value: Value) -> TensorInput | None:
        """The input that `value` is, None for a computed one."""
        return next((i for i in self.inputs.values() if i.value is value), None)
