"""Builds a Fusion for one class of calls.

In: a `Call`; the op table then calls `pointwise`, `cast`, `reduce`. Out: `finish()` gives the Fusion. The builder joins axes as operands meet
(`axes`): sizes that broadcast against each other become one axis, and the equality is a decision of the call. Example:

    b = Builder(call)
    x, y = b.tensor(0), b.tensor(1)
    b.output(b.pointwise("add", "({0} + {1})", (x, y), b.promote(x, y)))
    fusion = b.finish()
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Sequence

from . import layout as lay
from . import size as sz
from .axes import Axes
from .call import Call, ScalarArg, TensorArg
from .dtypes import BOOL, COMPLEX128, DOUBLE, FLOAT, INT64, DType
from .fusion import Axis, Empty, Fusion, Lookup, NumberInput, Op, Output, Pointwise, Random, Reduce, Reshape, TensorInput, Update, Value, extent
from .promotion import result_type
from ..errors import Refusal

_NUMBER_DTYPE = {"bool": BOOL, "int": INT64, "float": DOUBLE, "complex": COMPLEX128}
MAX_REPEATED = 64  # ops that are computed twice because a value meets itself along another dim


class Builder:
    """State of one build. `default_dtype` is torch's default floating dtype; `device` is where the group runs (`cpu`, `cuda:0`)."""

    def __init__(self, call: Call, device: str, default_dtype: DType = FLOAT):
        self.call = call
        self.device = device
        self.default_dtype = default_dtype
        self._inputs: dict[int, TensorInput] = {}
        self._numbers: dict[int, NumberInput] = {}
        self._ops: list[Op] = []
        self._outputs: list[Output] = []
        self._results: "list[tuple[str, int | str]]" = []
        self._updates: list[tuple[TensorInput, Value, bool]] = []
        self._layouts: dict[str, lay.Layout] = {}  # value name -> layout that eager would give it
        self._layout_memo: dict[tuple, lay.Layout] = {}
        self._axes = Axes(call, self.fresh_axis)
        self._behind: dict[str, TensorInput] = {}  # input, or view of one -> that input
        self._repeats: list[TensorInput] = []  # arguments that are read once more, over other axes
        self._views: set[str] = set()
        self._count = 0

    # ---- inputs

    def tensor(self, index: int) -> Value:
        """Tensor argument `index`; the same value each time it is asked for."""
        if index in self._inputs:
            return self._inputs[index].value
        arg = self.call.args[index]
        assert isinstance(arg, TensorArg)
        by_value = arg.rank == 0 and arg.device == "cpu" and self.device != "cpu"
        if arg.device != self.device and not by_value:
            raise Refusal(f"argument {index} is on {arg.device}, the group on {self.device}")
        dims = []
        for d in range(arg.rank):
            size = self.call.size(index, d)
            dims.append(None if self.call.decide(sz.eq(size, 1)) else Axis(f"a{index}_{d}", size))
        value = Value(f"x{index}", arg.element, tuple(dims))
        strides = tuple(self.call.stride(index, d) for d in range(arg.rank))
        self._inputs[index] = TensorInput(value, index, strides, self.call.alignment(index), by_value)
        self._axes.hold(value)
        self._behind[value.name] = self._inputs[index]
        self._layouts[value.name] = lay.Layout(self.sizes(value), strides)
        return value

    def number(self, index: int) -> Value:
        """Number argument `index`, read by the kernel at each call."""
        if index not in self._numbers:
            arg = self.call.args[index]
            assert isinstance(arg, ScalarArg)
            self._numbers[index] = NumberInput(Value(f"n{index}", _NUMBER_DTYPE[arg.kind], None), index)
        return self._numbers[index].value

    def literal(self, value: "bool | int | float | complex") -> Value:
        """A number that is part of the code."""
        return Value(repr(value), _NUMBER_DTYPE[type(value).__name__], None, value)

    def extent(self, size: "sz.Size | int") -> Value:
        """A size of the call, or one computed from sizes, as an integer number for arithmetic: `x / b.extent(n)`."""
        return extent(size)

    def count(self, value: Value, dims: Sequence[int]) -> Value:
        """The number of elements of `value` along `dims`, as a number."""
        return extent(sz.product([self.sizes(value)[d] for d in dims]))

    # ---- types

    def sizes(self, value: Value) -> tuple[sz.Size, ...]:
        """The sizes of a tensor value's dims."""
        return tuple(sz.const(1) if a is None else self.axis(a).extent for a in value.dims)

    def layout(self, value: Value) -> lay.Layout:
        """Sizes and strides that eager would give `value`."""
        return self._layouts[value.name]

    def promote(self, *values: Value) -> DType:
        """The common dtype of operands (torch's result_type)."""
        return result_type(values, self.default_dtype)

    def floating(self, dtype: DType) -> DType:
        """`dtype`, or the default dtype where it is bool or integer."""
        return dtype if dtype.is_floating or dtype.is_complex else self.default_dtype

    # ---- operations

    def pointwise(self, name: str, template: str, operands: Sequence[Value], dtype: DType, compute: DType | None = None,
                  own_types: bool = False) -> Value:  # fmt: skip
        """An elementwise op: operands broadcast, are converted to `compute` (default: `dtype.register`; not at all if `own_types`) and
        `template` gives the result in `dtype.register`."""
        dims, operands = self._meet(operands)
        output = self._new(name, dtype, dims)
        self._layouts[output.name] = self._pointwise_layout(output, operands)
        compute = None if own_types else (compute or dtype).register
        self._ops.append(Pointwise(name, template, tuple(operands), compute, output))
        return output

    def cast(self, value: Value, dtype: DType) -> Value:
        """`value` as `dtype`, rounded to it; `value` itself if it has that dtype."""
        if value.dtype is dtype:
            return value
        template = f"convert<{dtype.register.ctype}>({{0}})"
        if dtype.register is not dtype:
            template = f"convert<float>(convert<{dtype.ctype}>({{0}}))"
        result = self.pointwise("to", template, (value,), dtype, value.dtype)
        return result

    def reduce(self, name: str, combine: str, operand: Value, dims: Sequence[int], keepdim: "bool | Sequence[int]", dtype: DType) -> Value:
        """Reduction of `operand` over `dims` (non-negative), accumulated in `dtype.register`; the result is dense and row-major. `keepdim` says
        whether reduced dims stay as size 1, or which of them do. Without an axis to reduce it is a copy; a distance from the mean is then 0, or NaN, and a sum, which begins at 0,
        is never -0."""
        axes = tuple(self.axis(operand.dims[d]) for d in dims if operand.dims[d] is not None)
        kept = []
        for d, axis in enumerate(operand.dims):
            if d not in dims:
                kept.append(axis)
            elif keepdim if isinstance(keepdim, int) else d in keepdim:
                kept.append(None)
        output = self._new(name, dtype, tuple(kept))
        self._layouts[output.name] = lay.contiguous(self.sizes(output))
        template = "({0} - {0})" if combine == "squares" else "({0} + 0)" if combine == "sum" and dtype.is_floating else "{0}"
        copy = Pointwise(name, template, (operand,), dtype.register, output)
        self._ops.append(Reduce(name, combine, (operand,), axes, output) if axes else copy)
        return output

    def uniform(self, like: Value, dtype: DType = FLOAT) -> Value:
        """Random numbers in [0, 1), one for each element of `like`: 24 random bits each in float32, 53 in float64, the only dtypes. They are counted in
        the order of memory, so that neighbours there, which a thread holds, share a Philox block whatever the layout."""
        assert dtype in (FLOAT, DOUBLE), dtype
        output = self._new("uniform", dtype, like.dims)
        self._layouts[output.name] = self._pointwise_layout(output, (like,))
        self._ops.append(Random("uniform", 0, (like,), output, self.layout(output).strides))
        return output

    def lookup(self, name: str, table: Value, dim: int, index: Value, dims: "Sequence[Axis | None]") -> Value:
        """The elements of `table`, an argument, of which `index` names the place in dim `dim`: one for each place of the other dims in the result's `dims`, none
        of which may be larger than the table's. The result is row-major."""
        source = next((i for i in self._inputs.values() if i.value is table), None)
        if source is None:
            raise Refusal("what is looked up in is computed in its group, and not in memory")
        if any(i.value is index and i.by_value for i in self._inputs.values()):
            raise Refusal("an index on another device is an error in eager")
        strides = tuple(sz.const(0) if d == dim else stride for d, stride in enumerate(source.strides))
        output = self._new(name, table.dtype, tuple(dims))
        self._layouts[output.name] = lay.contiguous(self.sizes(output))
        extent = self.call.size(source.index, dim)
        self._ops.append(Lookup(name, source.index, (index,), output, strides, source.strides[dim], extent, source.alignment))
        return output

    def contiguous(self, value: Value) -> Value:
        """`value`, which an op of the caller has just made, row-major in memory, as eager's normalisations and softmax leave it."""
        self._layouts[value.name] = lay.contiguous(self.sizes(value))
        return value

    def like(self, value: Value, other: Value) -> Value:
        """`value`, which an op of the caller has just made, in the layout of an elementwise result of `other`."""
        self._layouts[value.name] = self._pointwise_layout(value, (other,))
        return value

    def in_format_of(self, value: Value, other: Value) -> Value:
        """`value`, which an op of the caller has just made, channels-last in memory where `other` would be, else row-major."""
        make = lay.channels_last if lay.is_channels_last(self.call, self._layouts[other.name]) else lay.contiguous
        self._layouts[value.name] = make(self.sizes(value))
        return value

    def in_packed_format_of(self, value: Value, other: Value) -> Value:
        """The same where strides of dims of size 1 do not count: channels-last also where `other` fills memory in that order, and not row-major."""
        layout = self._layouts[other.name]
        if lay.is_contiguous(self.call, layout) or not lay.is_packed_channels_last(self.call, layout):
            return self.in_format_of(value, other)
        self._layouts[value.name] = lay.channels_last(self.sizes(value))
        return value

    def has_format(self, value: Value) -> bool:
        """Whether `value` lies row-major or channels-last in memory."""
        layout = self._layouts[value.name]
        return lay.is_contiguous(self.call, layout) or lay.is_channels_last(self.call, layout)

    def placed(self, value: Value, at: int, rank: int) -> Value:
        """`value`, of one dim, as a tensor of `rank` dims of which it is dim `at`: what a channel's number becomes beside [N, C, H, W]."""
        dims = tuple(value.dims[0] if d == at else None for d in range(rank))
        return self._relabeled(value, dims)

    def update(self, target: "Value", value: Value, counted: bool) -> None:
        """Stores `value`, made by the caller from `target` and other operands, into the memory of `target`; see `Update`. Nothing else in the group may
        read `target`."""
        found = next((i for i in self._inputs.values() if i.value is target), None)
        if found is None or found.by_value:
            raise Refusal("a tensor that is changed in place is not an argument of the group")
        if any(i is found for i, _, _ in self._updates):
            raise Refusal("a tensor is changed in place twice in one group")
        if value.dtype is not target.dtype or len(value.dims) != len(target.dims):
            raise Refusal("a tensor that is changed in place gets another dtype or rank")
        for axis, stride in zip(target.dims, found.strides):
            if axis is not None and self.call.decide(sz.eq(stride, 0)):
                raise Refusal("a tensor that is changed in place overlaps itself")
        self._updates.append((found, value, counted))

    def fresh_axis(self, extent: sz.Size) -> Axis:
        """A new axis, for a dim that a tensor is expanded to."""
        self._count += 1
        return Axis(f"e{self._count - 1}", extent)

    def view(self, name: str, value: Value, dims: "Sequence[Axis | None]", strides: Sequence[sz.Size], copies: bool = False) -> Value:
        """`value` with its axes as the dims `dims` and further axes along which it does not change: a relabeling, nothing in memory. `strides` are
        those of eager's view, or of the copy that eager makes where it `copies`."""
        output = self._new(name, value.dtype, tuple(dims))
        self._layouts[output.name] = lay.Layout(self.sizes(output), tuple(strides))
        self._ops.append(Pointwise(name, "{0}", (value,), None, output))
        self._views.add(output.name)
        if self.is_read(value) and not copies:
            self._behind[output.name] = self._behind[value.name]
        return output

    def is_read(self, value: Value) -> bool:
        """Whether `value` is an input, or a view of one: its layout says where memory holds it."""
        return value.name in self._behind

    def read_as(self, name: str, value: Value, dims: "Sequence[Axis | None]", strides: Sequence[sz.Size]) -> Value:
        """A view of what `is_read`, over other axes, by which the input is read once more."""
        source, output = self._behind[value.name], self._new(name, value.dtype, tuple(dims))
        self._layouts[output.name] = lay.Layout(self.sizes(output), tuple(strides))
        self._repeats.append(replace(source, value=output, strides=tuple(strides)))
        self._behind[output.name] = source
        self._views.add(output.name)
        return output

    def regrouped(self, value: Value, dims: Sequence[int], sizes: Sequence[sz.Size]) -> "list[Axis] | None":
        """The axes of dims of `sizes`, not 1, that have the elements of the dims `dims` of `value` in order: of the same loops, which are cut in the
        whole group; None where no loops are those of both."""
        shares = self._axes.shared_out([value.dims[d] for d in dims], sizes)
        return None if shares is None else list(map(self._axes.whole, shares, sizes))

    def split(self, value: Value, dim: int, count: int) -> Value:
        """`value` with dim `dim` as two, the first of size `count`; the axis is split in the whole group."""
        axis, size = value.dims[dim], self.sizes(value)[dim]
        if count < 1 or self.call.decide(size % count):
            raise Refusal("a dimension that cannot be split evenly is an error in eager")
        if count == 1 or axis is None:
            pair = (None, axis)
        elif self.call.decide(sz.eq(size, count)):
            pair = (axis, None)
        else:
            pair = self.regrouped(value, [dim], [sz.const(count), sz.divided(size, count)])
            if pair is None:  # it is of loops that do not fit
                return self.split(self.through_memory(value, self.layout(value)), dim, count)
        return self._relabeled(value, (*value.dims[:dim], *pair, *value.dims[dim + 1 :]))

    def merged(self, value: Value, dim: int, axis: "Axis | None") -> Value:
        """`value` with dims `dim` and `dim + 1`, the halves of one like `axis`, as one again."""
        loops = [part for a in value.dims[dim : dim + 2] if a is not None for part in self._axes.parts(a)]
        if loops and loops != self._axes.parts(axis):
            axis = self._axes.whole(loops, axis.extent)
        return self._relabeled(value, (*value.dims[:dim], axis, *value.dims[dim + 2 :]))

    def _relabeled(self, value: Value, dims: "tuple[Axis | None, ...]") -> Value:
        output = self._new("view", value.dtype, dims)
        self._layouts[output.name] = lay.contiguous(self.sizes(output))
        self._ops.append(Pointwise("view", "{0}", (value,), None, output))
        return output

    def refuse(self, reason: str):
        """Gives up on this group for this class of calls."""
        raise Refusal(reason)

    # ---- outputs

    def output(self, value: "Value | Empty | int | None") -> None:
        """The next result of the group. A value that was returned before is returned as the same tensor, as eager does for a cast
        to the dtype that a tensor has. None is an undefined tensor."""
        if not isinstance(value, Value):
            self._results.append(("undefined", 0) if value is None else ("integer", value) if isinstance(value, int) else ("empty", value.dtype.name))
            return
        for i in self._inputs.values():
            if i.value is value:
                self._results.append(("input", i.index))
                return
        for k, earlier in enumerate(self._outputs):
            if earlier.value is value:
                self._results.append(("output", k))
                return
        if value.is_number:
            raise Refusal("a Python number cannot leave a group")
        if value.name in self._views:
            raise Refusal("a view leaves the group, which would return a copy")
        if not value.dims and self.device != "cpu" and self._is_on_cpu(value):
            raise Refusal("a result of 0-dim CPU tensors alone is on the CPU, and leaves a group on another device")
        self._results.append(("output", len(self._outputs)))
        where = self.layout(value)
        self._outputs.append(Output(value, where.sizes, where.strides, where.strides))

    def _is_on_cpu(self, value: Value) -> bool:
        """Whether eager computes `value` on the CPU, beside tensors of a group on another device."""
        needed = {value.name}
        for op in reversed(self._ops):
            if op.output.name in needed:
                needed.update(v.name for v in op.operands)
        sources = [i.by_value for i in self._inputs.values() if i.value.name in needed]
        return bool(sources) and all(sources)

    def finish(self) -> Fusion:
        """The Fusion, with every axis replaced by the one it was unified with, and dead ops dropped."""
        live = {v.name for v in [o.value for o in self._outputs] + [new for _, new, _ in self._updates]}
        ops = []
        for op in reversed(self._ops):
            if op.output.name in live:
                ops.append(op)
                live.update(v.name for v in op.operands)
        for target, new, _ in self._updates:
            read = {target.value.name, *(r.value.name for r in self._repeats if r.index == target.index)}
            if any(op.output is not new and not read.isdisjoint(v.name for v in op.operands) for op in ops):
                raise Refusal("a tensor that is changed in place has other readers in its group")
        axes: dict[Axis, Axis] = {}
        values: dict[str, Value] = {}

        def canonical(axis: "Axis | None") -> "tuple[Axis | None, ...]":
            """The loops over a dim."""
            parts = [None] if axis is None else self._axes.parts(axis)
            return tuple(p and axes.setdefault(p, Axis(f"a{len(axes)}", p.extent)) for p in parts)

        def steps(v: Value, strides: Sequence[sz.Size]) -> tuple[sz.Size, ...]:
            """The strides of the loops over the dims of `v`."""
            found = []
            for axis, stride in zip(v.dims, strides):
                loops = canonical(axis)
                found += [stride * sz.product([a.extent for a in loops[k + 1 :]]) for k in range(len(loops))]
            return tuple(found)

        def value(v: Value) -> Value:
            if v.is_number:
                return v
            if v.name not in values:
                values[v.name] = replace(v, dims=tuple(part for a in v.dims for part in canonical(a)))
                if len(set(values[v.name].axes)) < len(values[v.name].axes):
                    raise Refusal("one loop would walk two dims of a value")
            return values[v.name]

        read = (*self._inputs.values(), *self._repeats)
        inputs = tuple(replace(i, value=value(i.value), strides=steps(i.value, i.strides)) for i in read if i.value.name in live)
        numbers = tuple(n for n in self._numbers.values() if n.value.name in live)
        done, streams = [], itertools.count()
        for old in reversed(ops):
            op = replace(old, operands=tuple(value(v) for v in old.operands), output=value(old.output))
            if isinstance(op, Reduce):
                op = replace(op, axes=tuple(part for a in op.axes for part in canonical(a)))
            elif isinstance(op, Random):
                op = replace(op, stream=next(streams), linear_strides=steps(old.output, op.linear_strides))
            elif isinstance(op, Lookup):
                op = replace(op, strides=steps(old.output, op.strides))
            done.append(op)
        outputs = tuple(Output(value(o.value), o.sizes, o.strides, steps(o.value, o.strides)) for o in self._outputs)
        updates = tuple(Update(value(new), i.index, steps(new, i.strides), i.alignment, counted) for i, new, counted in self._updates)
        fusion = Fusion(inputs, numbers, tuple(done), outputs, tuple(self._results), updates)
        self._check_lookups(fusion)
        return fusion

    def _check_lookups(self, fusion: Fusion) -> None:
        """Refuses lookups whose indices might not all be looked at, or that might not be the first to fail: eager has to say which index is out of range."""
        if not fusion.lookups:
            return
        if self._updates:
            raise Refusal("an index out of range would be found after a tensor was changed in place")
        empty = {a for a in fusion.axes if not self.call.decide(sz.lt(0, a.extent))}
        if empty and any(empty.isdisjoint(op.operands[0].axes) for op in fusion.lookups):
            raise Refusal("there are indices, but no elements to compute from what they name")

    # ---- axes

    def axis(self, axis: Axis) -> Axis:
        """The axis that stands for `axis` now."""
        return self._axes.root(axis)

    def _meet(self, operands: Sequence[Value]) -> "tuple[tuple[Axis | None, ...], tuple[Value, ...]]":
        """The dims of the broadcast of `operands`, and these, or what stands for those that could not be aligned."""
        dims: list[Axis | None] = [None] * max((len(v.dims) for v in operands if not v.is_number), default=0)
        met = []
        for v in operands:
            met.append(v if v.is_number or self._axes.align(dims, v) else self._aligned(dims, v))
        return tuple(dims), tuple(met)

    def _aligned(self, dims: "list[Axis | None]", value: Value) -> Value:
        """What stands for `value`, which could not be aligned with `dims`, and can."""
        again = self.again(value)
        if again is not None and self._axes.align(dims, again):
            return again
        again = self.through_memory(value, self.layout(value))
        if not self._axes.align(dims, again):
            raise Refusal("values meet along dims that no loops are those of")
        return again

    def again(self, value: Value, into: "dict[Axis, tuple[Axis, ...]] | None" = None) -> "Value | None":
        """`value` computed a second time, from inputs that are read a second time: over axes of its own, or, where `into` is given, over the
        same axes but for those that it splits into several, outermost first. None where that cannot be done, or costs too much."""
        axes = dict(into or {})

        def split(old: Axis) -> tuple[Axis, ...]:
            root = self.axis(old)
            if root not in axes and self._axes.is_split(root) and not into:
                axes[root] = (self._axes.whole([split(part)[0] for part in self._axes.parts(root)], root.extent),)
            elif root not in axes:
                axes[root] = (root,) if into else (self.fresh_axis(root.extent),)
            return axes[root]

        def stays(v: Value) -> bool:
            return v.is_number or not v.axes or (into is not None and all(split(a) == (self.axis(a),) for a in v.axes))

        needed, cone = {value.name}, []
        for op in reversed(self._ops):
            if op.output.name in needed and not stays(op.output):
                cone.append(op)
                needed.update(v.name for v in op.operands if not isinstance(op, Reshape))
        if into and any(self._axes.is_split(a) for v in (value, *(v for op in cone for v in op.operands)) for a in v.axes):
            return None
        if len(cone) > MAX_REPEATED or any(isinstance(op, Random) for op in cone):
            return None
        values: dict[str, Value] = {}
        sources = {i.value.name: i for i in (*self._inputs.values(), *self._repeats)}

        def walked(v: Value, along: Sequence[sz.Size]) -> "tuple[list[Axis | None], list[sz.Size]]":
            """The dims of the copy of `v`, and its strides where those of `v` are `along`."""
            dims, strides = [], []
            for old, stride in zip(v.dims, along):
                parts = (None,) if old is None else split(old)
                dims += parts
                strides += [stride * sz.product([p.extent for p in parts[k + 1 :]]) for k in range(len(parts))]
            return dims, strides

        def copy(v: Value) -> Value:
            if stays(v):
                return v
            if v.name not in values:
                layout = self._layouts[v.name]
                dims, strides = walked(v, layout.strides)
                values[v.name] = new = self._new(v.name, v.dtype, tuple(dims))
                self._layouts[new.name] = lay.Layout(self.sizes(new), tuple(strides), layout.dense)
                if v.name in sources:
                    self._repeats.append(replace(sources[v.name], value=new, strides=tuple(strides)))
            return values[v.name]

        for op in reversed(cone):
            if isinstance(op, Lookup):
                op = replace(op, strides=tuple(walked(op.output, op.strides)[1]))
            operands = op.operands if isinstance(op, Reshape) else tuple(map(copy, op.operands))
            op = replace(op, operands=operands, output=copy(op.output))
            if isinstance(op, Reduce):
                op = replace(op, axes=tuple(part for a in op.axes for part in split(a)))
            self._ops.append(op)
        return copy(value)

    def through_memory(self, value: Value, layout: lay.Layout) -> Value:
        """`value` stored, and read with dims of the sizes of `layout`, which is eager's, over axes of their own."""
        stored = self._relabeled(value, value.dims)
        output = self._new("reshape", value.dtype, tuple(None if self.call.decide(sz.eq(size, 1)) else self.fresh_axis(size) for size in layout.sizes))
        self._layouts[output.name] = layout
        self._ops.append(Reshape("reshape", (stored,), output))
        self._views.add(output.name)
        return output

    def _pointwise_layout(self, output: Value, operands: Sequence[Value]) -> lay.Layout:
        layouts = tuple(dict.fromkeys(self._layouts[v.name] for v in operands if not v.is_number and v.dims))
        if not layouts:
            return lay.contiguous(self.sizes(output))
        sizes = self.sizes(output)
        key = (sizes, tuple(id(x) for x in layouts))
        if key not in self._layout_memo:
            self._layout_memo[key] = lay.pointwise(self.call, sizes, layouts)
        return self._layout_memo[key]

    def _new(self, name: str, dtype: DType, dims: "tuple[Axis | None, ...]") -> Value:
        """A value with a name of its own."""
        self._count += 1
        return self._axes.hold(Value(f"{name}_{self._count - 1}", dtype, dims))
