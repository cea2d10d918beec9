"""Elements of a tensor at places that indices name: read where they are in memory, or computed there.

In: a value of a Draft, and indices of some of its dims. Out: a value over the axes of the indices, and of the
dims that have none. Example, y = log_softmax(x) is `sub(x, offset)`, x and y over (a, b), `offset` over a;
and i, over a, says which b:

    looked_up(draft, "gather", y, ..., {1: i}) = sub(lookup(x, i), offset)

Nothing else of y is computed for it: what does not vary along b is there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import Refusal
from . import size as sz
from .draft import Draft
from .fusion import Axis, Lookup, Pointwise, TensorInput, Value
from .layout import Layout
from .rematerialize import MAX_REPEATED


def looked_up(
    draft: Draft,
    name: str,
    table: Value,
    dims: Sequence[Axis | None],
    walked: Sequence[int | None],
    indices: Mapping[int, Value],
    layout: Layout | None = None,
) -> Value:
    """The elements of `table` at the places that `indices` name in some of its dims: one for each place in
    the result's `dims`. `walked`: for each of these the dim of the table along which it goes, which is as
    large or larger, or None. The result is row-major if no `layout` is given. Raises Refusal."""
    for index in indices.values():
        where = draft.input_of(index)
        if where is not None and where.by_value:
            raise Refusal("an index on another device than the tensor is left to torch")
    source = draft.input_of(table)
    if source is None:
        return _computed(draft, name, table, dims, walked, indices, layout)
    output = draft.new(name, table.dtype, dims, layout)
    strides = tuple(sz.const(0) if d is None else source.strides[d] for d in walked)
    draft.ops.append(_lookup(draft, source, indices, output, strides))
    return output


def checked(draft: Draft, name: str, index: Value, extent: sz.Size) -> Value:
    """The elements of `index`, an argument. Each is at least 0 and less than `extent`, or the call is an
    error. Raises Refusal."""
    source = draft.input_of(index)
    if source is None or source.by_value:
        raise Refusal("indices that are computed in their group are only checked where they are used")
    output = draft.new(name, index.dtype, index.dims)
    steps, extents = (sz.const(0),), (extent,)
    draft.ops.append(
        Lookup(
            name,
            source.index,
            (index,),
            output,
            source.strides,
            steps,
            extents,
            source.alignment,
            has_elements=True,
        )
    )
    return output


def _lookup(
    draft: Draft, read: TensorInput, indices: Mapping[int, Value], output: Value, strides: tuple[sz.Size, ...]
) -> Lookup:
    sizes, operands = draft.sizes(read.value), tuple(indices.values())
    steps, extents = tuple(read.strides[d] for d in indices), tuple(sizes[d] for d in indices)
    name, alignment = output.name.rpartition("_")[0], read.alignment
    if read.offset is not sz.const(0):
        alignment = sz.minimum(alignment, sz.pow2(read.offset * output.dtype.itemsize))
    has_elements = all(draft.call.decide(sz.lt(0, size)) for size in sizes)
    return Lookup(
        name, read.index, operands, output, strides, steps, extents, alignment, read.offset, has_elements
    )


def _computed(
    draft: Draft,
    name: str,
    table: Value,
    dims: Sequence[Axis | None],
    walked: Sequence[int | None],
    indices: Mapping[int, Value],
    layout: Layout | None,
) -> Value:
    """`looked_up` of a `table` that is computed elementwise, and of values that do not vary along the dims of
    the indices."""
    for axis, own in zip(dims, (None if d is None else table.dims[d] for d in walked)):
        if own is not None:
            if axis is None or draft.axes.clash(own, axis):
                raise Refusal("what is looked up in is computed in its group, along other axes")
            draft.axes.join(own, axis)
    if any(table.dims[d] is None for d in indices):
        raise Refusal("what is looked up in is computed in its group, and of size 1")
    there = _There(draft, name, {draft.axis(table.dims[d]): index for d, index in indices.items()})
    value, output = there.value(table), draft.new(name, table.dtype, dims, layout)
    draft.ops.append(Pointwise(name, "copy", (value,), None, output))
    return output


class _There:
    """What stands for values at the places that `indices` name along some axes."""

    def __init__(self, draft: Draft, name: str, indices: Mapping[Axis, Value]):
        self.draft, self.name, self.indices = draft, name, indices
        self._values: dict[str, Value] = {}
        self._loops = {loop for axis in indices for loop in draft.axes.parts(axis)}
        self._inputs = {i.value.name: i for i in draft.reads}
        self._makers = {op.output.name: op for op in draft.ops}

    def value(self, value: Value) -> Value:
        """What stands for `value`."""
        if value.is_number or self._loops.isdisjoint(self._loops_of(value)):
            return value
        if value.name not in self._values:
            found = self._read(value) if value.name in self._inputs else self._made(value)
            self._values[value.name] = found
        return self._values[value.name]

    def _loops_of(self, value: Value) -> list[Axis]:
        return [loop for axis in value.axes for loop in self.draft.axes.parts(axis)]

    def _walk(self, value: Value) -> tuple[list[int], dict[int, Value], list[Axis | None]]:
        """The dims of `value` that stay, the indices of the others, and the dims of its replacement: those
        that stay, and then those of the indices that are not among them."""
        stay, indices = [], {}
        for d, axis in enumerate(value.dims):
            root = None if axis is None else self.draft.axis(axis)
            if root in self.indices:
                indices[d] = self.indices[root]
            elif root is not None and not self._loops.isdisjoint(self.draft.axes.parts(root)):
                raise Refusal("what is looked up in is computed of parts of the dim that the indices count")
            else:
                stay.append(d)
        dims = [value.dims[d] for d in stay]
        known = {loop for axis in dims if axis is not None for loop in self.draft.axes.parts(axis)}
        for index in indices.values():
            dims += [loop for loop in self._loops_of(index) if loop not in known]
            known.update(self._loops_of(index))
        return stay, indices, dims

    def _read(self, value: Value) -> Value:
        """The elements of an input there."""
        read, (stay, indices, dims) = self._inputs[value.name], self._walk(value)
        if read.windows or read.by_value:
            raise Refusal("what is looked up in is computed of a part of a tensor")
        output = self.draft.new(self.name, value.dtype, dims)
        strides = (*(read.strides[d] for d in stay), *[sz.const(0)] * (len(dims) - len(stay)))
        self.draft.ops.append(_lookup(self.draft, read, indices, output, strides))
        return output

    def _made(self, value: Value) -> Value:
        """The result of an elementwise op there."""
        op = self._makers[value.name]
        varying = {loop for v in op.operands if not v.is_number for loop in self._loops_of(v)}
        if not isinstance(op, Pointwise) or not self._loops <= varying:
            raise Refusal(
                "what is looked up in is computed in its group, and not of elements at the same places"
            )
        if len(self._values) > MAX_REPEATED:
            raise Refusal("what is looked up in takes many ops to compute")
        operands = tuple(map(self.value, op.operands))
        output = self.draft.new(op.name, value.dtype, self._walk(value)[2])
        self.draft.ops.append(Pointwise(op.name, op.symbol, operands, op.compute, output))
        return output
