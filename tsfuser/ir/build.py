"""Builds a Fusion for one class of calls: inputs, operations, outputs.

In: a `Call`; the op table then calls `pointwise`, `cast`, `reduce`. Out: `finish()` gives the Fusion. Axes
are joined as operands meet (`axes`): sizes that broadcast against each other become one axis, and the
equality is a decision of the call. Example:

    b = Builder(call, "cpu")
    x, y = b.tensor(0), b.tensor(1)
    b.output(b.pointwise("add", (x, y), b.promote(x, y)))
    fusion = b.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..errors import Refusal
from . import layout as lay
from . import size as sz
from .call import Call, ScalarArg, TensorArg
from .dtypes import BOOL, COMPLEX128, DOUBLE, FLOAT, INT64, DType
from .finish import finish
from .fusion import (
    Axis,
    Empty,
    Fusion,
    Located,
    NumberInput,
    Output,
    Pointwise,
    Random,
    Reduce,
    Scan,
    Seed,
    TensorInput,
    Update,
    Value,
)
from .limits import Limit
from .lookups import looked_up
from .only_terms import only_term
from .promotion import result_type
from .rematerialize import rematerialized
from .result_layouts import ResultLayouts
from .seed_lengths import length_of
from .values import extent
from .views import through_memory

_NUMBER_DTYPE = {"bool": BOOL, "int": INT64, "float": DOUBLE, "complex": COMPLEX128}


class Builder(ResultLayouts):
    """A Draft as the op table fills it. `default_dtype` is torch's default floating dtype; `device` is where
    the group runs (`cpu`, `cuda:0`); `eager`, given where random numbers are to be eager's, gives the
    `eager_random.Grid` of its kernels on a device, or raises Refusal. `computes_fast`: whether it is
    better to draw random numbers again than to read a mask, or to compute a little again than to store it."""

    def __init__(
        self,
        call: Call,
        device: str,
        default_dtype: DType = FLOAT,
        eager: Callable | None = None,
        computes_fast: bool = True,
    ):
        super().__init__(call, device)
        self.eager = eager
        self.computes_fast = computes_fast
        self.default_dtype = default_dtype

    # ---- inputs

    def tensor(self, index: int) -> Value:
        """Tensor argument `index`; the same value each time it is asked for."""
        if index in self.inputs:
            return self.inputs[index].value
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
        self.inputs[index] = TensorInput(value, index, strides, self.call.alignment(index), by_value)
        self.axes.hold(value)
        self.sources[value.name] = self.inputs[index]
        self.layouts[value.name] = lay.Layout(self.sizes(value), strides)
        return value

    def number(self, index: int) -> Value:
        """Number argument `index`, read by the kernel at each call."""
        if index not in self.numbers:
            arg = self.call.args[index]
            assert isinstance(arg, ScalarArg)
            self.numbers[index] = NumberInput(Value(f"n{index}", _NUMBER_DTYPE[arg.kind], None), index)
        return self.numbers[index].value

    def literal(self, value: bool | int | float | complex) -> Value:
        """A number that is part of the code."""
        return Value(repr(value), _NUMBER_DTYPE[type(value).__name__], None, value)

    def extent(self, size: sz.Size | int) -> Value:
        """A size of the call, or one computed from sizes, as an integer number for arithmetic: `x /
        b.extent(n)`."""
        return extent(size)

    def count(self, value: Value, dims: Sequence[int]) -> Value:
        """The number of elements of `value` along `dims`, as a number."""
        return extent(sz.product([self.sizes(value)[d] for d in dims]))

    def limit(self, value: Value | None, limit: Limit | None, what: str) -> None:
        """Sends calls in which the number `value` is beyond `limit` to the ops themselves, which raise
        eager's error. A number of the graph is checked now: raises Refusal. `what` names it. Tensors have no
        limit."""
        if value is None or limit is None or not value.is_number:
            return
        if value.literal is not None:
            if not limit.admits(value.literal):
                raise Refusal(f"{what}, {value.literal}, is out of range: an error in eager")
        elif value.size is not None:
            size, decide = value.size, self.call.decide
            if not (decide(sz.le(limit.low, size)) and decide(sz.le(size, limit.high))):
                raise Refusal(f"{what}, a size of the call, is out of range: an error in eager")
        else:
            index = next(n.index for n in self.numbers.values() if n.value is value)
            self.call.limits[index, limit] = None

    def limit_element(self, value: Value, limit: Limit | None, what: str) -> None:
        """The same for the element of the 0-dim tensor `value`, which eager takes as a number. C++ looks at
        it on the CPU only: raises Refusal elsewhere, if an element of its dtype may be beyond the limit."""
        found = self.input_of(value)
        if limit is None or limit.admits_all(value.dtype):
            return
        tensor = None if found is None else self.call.args[found.index]
        if not isinstance(tensor, TensorArg) or tensor.device != "cpu":
            raise Refusal(f"{what}, a {value.dtype} tensor, may be out of range: an error in eager")
        self.call.limits[found.index, limit] = None

    # ---- types

    def promote(self, *values: Value) -> DType:
        """The common dtype of operands (torch's result_type)."""
        return result_type(values, self.default_dtype)

    def floating(self, dtype: DType) -> DType:
        """`dtype`, or the default dtype where it is bool or integer."""
        return dtype if dtype.is_floating or dtype.is_complex else self.default_dtype

    # ---- operations

    def pointwise(
        self,
        symbol: str,
        operands: Sequence[Value],
        dtype: DType,
        compute: DType | None = None,
        own_types: bool = False,
        layouts: Sequence[lay.Layout] | None = None,
        name: str = "",
    ) -> Value:
        """An elementwise op: operands broadcast, are converted to `compute` (default: `dtype.register`; not
        at all if `own_types`) and `symbol` (ir.symbols) gives the result in `dtype.register`. `layouts`, if
        given, are those from which the result's follows, not those of the tensors among the operands. `name`
        is that of the result, else the symbol's."""
        dims, operands = self.broadcast(operands)
        output = self.new(
            name or symbol,
            dtype,
            dims,
            self.pointwise_layout(dims, self.layouts_of(operands) if layouts is None else layouts),
        )
        compute = None if own_types else (compute or dtype).register
        self.ops.append(Pointwise(name or symbol, symbol, tuple(operands), compute, output))
        return output

    def cast(self, value: Value, dtype: DType) -> Value:
        """`value` as `dtype`, rounded to it; `value` itself if it has that dtype."""
        if value.dtype is dtype:
            return value
        if not (value.dtype.converts and dtype.converts):
            raise Refusal(f"a cast from {value.dtype} to {dtype} is an error in eager")
        symbol = "convert" if dtype.register is dtype else f"round_to_{dtype}"
        return self.copied(self.pointwise(symbol, (value,), dtype, value.dtype, layouts=(), name="to"), value)

    def reduce(
        self,
        name: str,
        combine: str,
        operand: Value,
        dims: Sequence[int],
        keepdim: bool | Sequence[int],
        dtype: DType,
    ) -> Value:
        """Reduction of `operand` over `dims` (non-negative), accumulated in `dtype.register`; the result is
        dense and row-major. `keepdim` says whether reduced dims stay as size 1, or which of them do. Without
        an axis to reduce it is a copy; a distance from the mean is then 0, or NaN, and a sum, which begins at
        0, is never -0."""
        axes = tuple(self.axis(operand.dims[d]) for d in dims if operand.dims[d] is not None)
        kept = []
        for d, axis in enumerate(operand.dims):
            if d not in dims:
                kept.append(axis)
            elif keepdim if isinstance(keepdim, int) else d in keepdim:
                kept.append(None)
        if combine == "sum" and len(axes) == 1 and dtype.is_floating:
            if (term := only_term(self, operand, axes[0])) is not None:
                return self._sum_of(name, *term, axes[0], dtype, kept)
        output = self.new(name, dtype, kept)
        symbol = "zero_or_nan" if combine == "squares" else "copy"
        if combine == "sum" and dtype.is_floating:
            symbol = "without_minus_zero"
        copy = Pointwise(name, symbol, (operand,), dtype.register, output)
        self.ops.append(Reduce(name, combine, (operand,), axes, output) if axes else copy)
        return output

    def _sum_of(
        self, name: str, index: Value, element: Value, axis: Axis, dtype: DType, dims: Sequence[Axis | None]
    ) -> Value:
        """The sum over `axis` of a value that is `element` at one index of it, and 0 at all others."""
        here = self.pointwise("is_index", (index, self.extent(axis.extent)), BOOL, own_types=True)
        output = self.new(name, dtype, dims)
        operands = (here, self.cast(element, dtype), self.literal(0.0))
        self.ops.append(Pointwise(name, "where", operands, None, output))
        return output

    def scan(self, name: str, combine: str, operand: Value, dim: int, dtype: DType) -> Value:
        """`operand` up to each place along `dim` (non-negative) combined, accumulated in
        `dtype.register`; the result is dense and row-major. Along a dim of size 1 it is a copy."""
        axis = operand.dims[dim]
        output = self.new(name, dtype, operand.dims)
        if axis is None:
            self.ops.append(Pointwise(name, "copy", (operand,), dtype.register, output))
        else:
            self.ops.append(Scan(name, combine, (operand,), (self.axis(axis),), output))
        return output

    def uniform(self, like: Value, dtype: DType = FLOAT) -> Value:
        """Random numbers in [0, 1), one for each element of `like`: 24 random bits each in float32, 53 in
        float64, the only dtypes. They are counted in the order of memory, so that neighbours there, which a
        thread holds, share a Philox block whatever the layout."""
        assert dtype in (FLOAT, DOUBLE), dtype
        output = self.copied(self.new("uniform", dtype, like.dims), like)
        self.ops.append(Random("uniform", 0, (like,), output, self.layout(output).strides))
        return output

    def seeded_uniform(self, like: Value, seed: Value, stream: int, order: Sequence[int]) -> Value:
        """Random numbers in [0, 1) of 24 bits each, one for each element of `like`, counted in the order of
        a dense tensor whose dims are `order` from the outermost in memory to the innermost: whoever has the
        same `seed`, an argument that begins with two int64, and the same `stream` has the same numbers."""
        source = self.input_of(seed)
        if source is None:
            raise Refusal("a seed that is computed in its group is not in memory")
        if seed.dtype is not INT64 or len(seed.dims) != 1 or source.by_value:
            raise Refusal("a seed is a tensor of two int64")
        if sorted(order) != list(range(len(like.dims))):
            raise Refusal("the order of dims in memory does not fit the tensor")
        size, step = self.call.size(source.index, 0), source.strides[0]
        if not self.call.decide(sz.le(2, size)) or not self.call.decide(sz.eq(step, 1)):
            raise Refusal("a seed is a tensor of two int64")
        in_order = lay.laid_out(self.sizes(like), order).strides
        output = self.copied(self.new("uniform", FLOAT, like.dims), like)
        self.ops.append(Random("uniform", stream, (like,), output, in_order, seed=source.index))
        return output

    def seed_of(self, mask: Value) -> Seed | None:
        """The seed by which `mask`, made by a comparison of new random numbers with a literal, can be drawn
        again. Its length says in which order the numbers are counted (ir/seed_lengths.py). None for other
        masks, where no length says the order, and where reading a mask is better."""
        made = next((op for op in self.ops if op.output is mask), None) if self.computes_fast else None
        if not isinstance(made, Pointwise) or made.symbol != "lt" or made.operands[1].literal is None:
            return None
        uniform = next((op for op in self.ops if op.output is made.operands[0]), None)
        if not isinstance(uniform, Random) or uniform.walk or uniform.seed is not None:
            return None
        order = lay.order_of(self.call, self.layout(uniform.output))
        length = None if order is None else length_of(order)
        return None if length is None else Seed(uniform.output, length)

    def lookup(
        self,
        name: str,
        table: Value,
        dims: Sequence[Axis | None],
        walked: Sequence[int | None],
        indices: Mapping[int, Value],
        layout: lay.Layout | None = None,
    ) -> Value:
        """The elements of `table` at the places that `indices` name in some of its dims; see `looked_up`."""
        return looked_up(self, name, table, dims, walked, indices, layout)

    def broadcast(self, operands: Sequence[Value]) -> tuple[tuple[Axis | None, ...], tuple[Value, ...]]:
        """The dims of the broadcast of `operands`, and these, or what stands for those that could not be
        aligned."""
        dims: list[Axis | None] = [None] * max((len(v.dims) for v in operands if not v.is_number), default=0)
        met = []
        for v in operands:
            met.append(v if v.is_number or self.axes.align(dims, v) else self._aligned(dims, v))
        return tuple(dims), tuple(met)

    def _aligned(self, dims: list[Axis | None], value: Value) -> Value:
        """What stands for `value`, which could not be aligned with `dims`, and can."""
        copy = rematerialized(self, value)
        if copy is not None and self.axes.align(dims, copy):
            return copy
        copy = through_memory(self, value, self.layout(value))
        if not self.axes.align(dims, copy):
            raise Refusal("values meet along dims that no loops are those of")
        return copy

    # ---- outputs

    def update(self, target: Value, value: Value, counted: bool) -> None:
        """Stores `value`, made by the caller from `target` and other operands, into the memory of `target`;
        see `Update`. What else in the group reads `target` has to do so where `value` is stored, element by
        element."""
        found = self.input_of(target)
        if found is None or found.by_value:
            raise Refusal("a tensor that is changed in place is not an argument of the group")
        if any(u.index == found.index for u in self.updates):
            raise Refusal("a tensor is changed in place twice in one group")
        if value.dtype is not target.dtype or len(value.dims) != len(target.dims):
            raise Refusal("a tensor that is changed in place gets another dtype or rank")
        if all(op.output is not value for op in self.ops):
            raise Refusal("a tensor that is changed in place gets what its group has not computed")
        dims = list(target.dims)
        if not self.axes.align(dims, value) or any(
            (a is None) != (d is None) for a, d in zip(value.dims, target.dims)
        ):
            raise Refusal("a tensor that is changed in place gets other sizes")
        for axis, stride in zip(target.dims, found.strides):
            if axis is not None and self.call.decide(sz.eq(stride, 0)):
                raise Refusal("a tensor that is changed in place overlaps itself")
        self.updates.append(Update(value, found.index, found.strides, found.alignment, counted))

    def add_at(self, target: Value, value: Value, dim: int, index: Value) -> None:
        """Adds `value` to the memory of `target`: along `dim` at the places that `index` holds, which has
        that dim alone. The caller has made `value`; nothing else in the group reads it, or `target`."""
        found, where = self.input_of(target), self.input_of(index)
        if found is None or found.by_value or (where is not None and where.by_value):
            raise Refusal(
                "what is added to is not an argument of the group, or the index is on another device"
            )
        if any(u.at for u in self.updates):
            raise Refusal(
                "a group adds twice: if the second kernel failed, its ops would add what is added again"
            )
        if any(u.index == found.index for u in self.updates):
            raise Refusal("a tensor is changed in place twice in one group")
        if value.dtype is not target.dtype or len(value.dims) != len(target.dims):
            raise Refusal("a tensor gets what has another dtype or rank")
        own = self.sizes(target)
        for d, size in enumerate(self.sizes(value)):
            if d != dim and not self.call.decide(sz.eq(size, own[d])):
                raise Refusal("a tensor gets what has other sizes")
            if not self.call.decide(sz.lt(0, own[d])):
                raise Refusal("a tensor without elements gets nothing")
        dims: list[Axis | None] = [None] * len(value.dims)
        if not self.call.decide(sz.eq(self.sizes(value)[dim], self.sizes(index)[dim])):
            raise Refusal("an index and its values differ in size")
        if value.dims[dim] is None and index.dims[dim] is not None:
            raise Refusal("one value goes to several places")
        if not (self.axes.align(dims, value) and self.axes.align(dims, index)):
            raise Refusal("an index and what is added lie along other loops")
        at = self.new("at", INT64, index.dims)
        self.ops.append(Located("at", (index,), at, found.strides[dim], own[dim]))
        strides = tuple(sz.const(0) if d == dim else step for d, step in enumerate(found.strides))
        self.updates.append(Update(value, found.index, strides, found.alignment, False, (at,)))

    def output(self, value: Value | Empty | Seed | int | None) -> None:
        """The next result of the group. A value that was returned before is returned as the same tensor, as
        eager does for a cast to the dtype that a tensor has. None is an undefined tensor."""
        if isinstance(value, Seed):
            self.results.append(("seed", len(self.seeds)))
            self.seeds.append(value)
            return
        if not isinstance(value, Value):
            self.results.append(
                ("undefined", 0)
                if value is None
                else ("integer", value)
                if isinstance(value, int)
                else ("empty", value.dtype.name)
            )
            return
        argument = self.input_of(value)
        if argument is not None:
            self.results.append(("input", argument.index))
            return
        for k, earlier in enumerate(self.outputs):
            if earlier.value is value:
                self.results.append(("output", k))
                return
        if value.is_number:
            raise Refusal("a Python number cannot leave a group")
        if value.name in self.views:
            raise Refusal("a view leaves the group, which would return a copy")
        if not value.dims and self.device != "cpu" and self.is_on_cpu(value):
            raise Refusal(
                "a result of 0-dim CPU tensors alone is on the CPU, and leaves a group on another device"
            )
        self.results.append(("output", len(self.outputs)))
        where = self.layout(value)
        self.outputs.append(Output(value, where.sizes, where.strides, where.strides, where.room))

    def is_on_cpu(self, value: Value) -> bool:
        """Whether eager computes `value` on the CPU, beside tensors of a group on another device."""
        read = {value.name}.union(v.name for op in self.needed([value]) for v in op.operands)
        if read & self.moved:
            return False
        sources = [i.by_value for i in self.inputs.values() if i.value.name in read]
        return bool(sources) and all(sources)

    def finish(self) -> Fusion:
        """The Fusion of all that was built; raises Refusal where no kernel could do the same as eager."""
        return finish(self)
