"""Strides of results, by the rule of torch's TensorIterator.

In: sizes and strides of the operands of an elementwise op. Out: sizes and strides of the tensor that eager
would allocate. The rule (ATen/TensorIterator.cpp, `compute_fast_setup_type` and `reorder_dimensions`): equal
shapes that are all contiguous, all channels-last, or all dense with equal strides, keep their strides; else
dimensions are sorted by stride, the first operand that tells two dimensions apart deciding. Example:
channels-last plus a bias of one axis stays channels-last. On the CPU it does not see an operand of another
dtype than the common one, but the copy that it makes of it in that dtype (`compute_types`): `copied`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import size as sz
from .call import Call
from .size import Size

WHOLE_ACCESS = 8  # elements of 16 bits that products of matrices read at a time
LEAST_BEFORE_ZERO = 4  # elements for each zero that is stored behind them


@dataclass(frozen=True)
class Room:
    """Zeros behind parts of a tensor: memory holds `parts` of them, of `length` elements, which begin `pitch`
    elements apart, and `behind` zeros more behind all. With the zeros dim `dim`, -1 or -2, is a multiple of
    WHOLE_ACCESS; of a matrix both dims are."""

    parts: Size
    length: Size
    pitch: Size
    behind: Size
    dim: int

    @property
    def elements(self) -> Size:
        """Elements of the memory of such a tensor."""
        return self.parts * self.pitch + self.behind


@dataclass(frozen=True, eq=False)
class Layout:
    """Sizes and strides (elements) of a tensor. `dense` says that the strides are known to be a permutation
    without gaps, because we made them. `room`: there are gaps, which hold zeros."""

    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    dense: bool = False
    room: Room | None = None


def contiguous(sizes: Sequence[Size]) -> Layout:
    return _allocate(tuple(sizes), tuple(reversed(range(len(sizes)))))


def _allocate(sizes: tuple[Size, ...], inner_to_outer: Sequence[int]) -> Layout:
    strides: list[Size] = [sz.const(1)] * len(sizes)
    step = sz.const(1)
    for d in inner_to_outer:
        strides[d] = step
        step = step * sizes[d]
    return Layout(sizes, tuple(strides), dense=True)


def is_contiguous(call: Call, layout: Layout) -> bool:
    """Whether the strides are those of a row-major tensor; strides of size-1 dims do not matter."""
    return _is_packed(call, layout, reversed(range(len(layout.sizes))))


def _is_packed(call: Call, layout: Layout, inner_to_outer: Iterable[int]) -> bool:
    """Whether memory holds the dims in that order, without gaps."""
    step = sz.const(1)
    for d in inner_to_outer:
        if call.decide(sz.eq(layout.sizes[d], 1)):
            continue
        if not call.decide(sz.eq(layout.strides[d], step)):
            return False
        step = step * layout.sizes[d]
    return True


def packed(call: Call, layout: Layout) -> Layout:
    """Row-major, or with the last two dims exchanged where the strides of `layout` are."""
    rank = len(layout.sizes)
    if rank < 2 or not call.decide(sz.lt(layout.strides[-2], layout.strides[-1])):
        return contiguous(layout.sizes)
    return _allocate(layout.sizes, (rank - 2, rank - 1, *reversed(range(rank - 2))))


def with_room(call: Call, layout: Layout, dim: int) -> Layout:
    """`layout`, which `packed` has made, with room for whole accesses behind dim `dim`, one of the last two,
    unless that would be many zeros. If that dim is the outer one of the two in memory, the zeros lie behind
    each matrix, else behind each row. A single matrix has room behind both dims."""
    rank, size = len(layout.sizes), layout.sizes[dim]
    if rank == 2:
        return _matrix_with_room(call, layout)
    dim %= rank
    wide = sz.ceildiv(size, WHOLE_ACCESS) * WHOLE_ACCESS
    if call.decide(sz.eq(size % WHOLE_ACCESS, 0)) or call.decide(
        sz.lt(size, LEAST_BEFORE_ZERO * (wide - size))
    ):
        return layout
    inner = next(d for d in (rank - 1, rank - 2) if layout.strides[d] is sz.const(1))
    below = layout.sizes[inner] if dim != inner else sz.const(1)
    others = [s for d, s in enumerate(layout.sizes) if d != dim and (dim == inner or d < rank - 2)]
    room = Room(sz.product(others), size * below, wide * below, sz.const(0), dim - rank)
    widened = tuple(wide if d == dim else s for d, s in enumerate(layout.sizes))
    outer = 2 * rank - 3 - inner
    strides = _allocate(widened, (inner, outer, *reversed(range(rank - 2)))).strides
    return Layout(layout.sizes, strides, room=room)


def _matrix_with_room(call: Call, layout: Layout) -> Layout:
    inner = 1 if layout.strides[1] is sz.const(1) else 0
    columns, rows = layout.sizes[inner], layout.sizes[1 - inner]
    wide, deep = (sz.ceildiv(size, WHOLE_ACCESS) * WHOLE_ACCESS for size in (columns, rows))
    if call.decide(sz.eq(columns % WHOLE_ACCESS, 0)):
        if call.decide(sz.eq(rows % WHOLE_ACCESS, 0)):
            return layout
        wide = columns
    elif call.decide(sz.lt(columns, LEAST_BEFORE_ZERO * (wide - columns))):
        return layout
    room = Room(rows, columns, wide, (deep - rows) * wide, inner - 2)
    return Layout(layout.sizes, _allocate((rows, wide), (1, 0)).strides[:: 2 * inner - 1], room=room)


def laid_out(sizes: Sequence[Size], order: Sequence[int]) -> Layout:
    """Without gaps, with the dims in that `order`, outermost first."""
    return _allocate(tuple(sizes), tuple(reversed(order)))


def channels_last(sizes: Sequence[Size]) -> Layout:
    """Dim 1 innermost, the others in their order, of 4 or 5 dims."""
    return _allocate(tuple(sizes), (1, *reversed(range(2, len(sizes))), 0))


def is_channels_last(call: Call, layout: Layout) -> bool:
    """Whether torch takes the strides for channels-last (c10/core/MemoryFormat.h,
    `is_channels_last_strides_2d`): each dim, from the channels on, walks at least as far as the one before
    reaches. What may as well be row-major is."""
    rank, strides = len(layout.sizes), layout.strides
    if rank not in (4, 5) or call.decide(sz.eq(strides[1], 0)):
        return False
    least = sz.const(0)
    for d in (1, *reversed(range(2, rank)), 0):
        if call.decide(sz.eq(layout.sizes[d], 0)) or call.decide(sz.lt(strides[d], least)):
            return False
        if d == 0 and call.decide(sz.eq(least, strides[1])):
            return False
        least = strides[d] * layout.sizes[d]
    return True


def is_packed_channels_last(call: Call, layout: Layout) -> bool:
    """Whether memory holds nothing but the elements, channels-last."""
    rank = len(layout.sizes)
    return rank in (4, 5) and _is_packed(call, layout, (1, *reversed(range(2, rank)), 0))


def is_dense(call: Call, layout: Layout) -> bool:
    """Whether the elements fill a block of memory without gap or overlap, in any order of dims."""
    if layout.dense:
        return True
    dims = [d for d in range(len(layout.sizes)) if not call.decide(sz.eq(layout.sizes[d], 1))]
    dims.sort(key=lambda d: (call.value(layout.strides[d]), call.value(layout.sizes[d])))
    step = sz.const(1)
    for d in dims:
        if not call.decide(sz.eq(layout.strides[d], step)):
            return False
        step = step * layout.sizes[d]
    return True


def order_of(call: Call, layout: Layout) -> tuple[int, ...] | None:
    """The dims in memory, outermost first, of a tensor without gaps; None for others. Those of size 1 may be
    anywhere. Row-major is tried first."""
    dims = range(len(layout.sizes))
    if is_contiguous(call, layout):
        return tuple(dims)
    order = sorted(dims, key=lambda d: (-call.value(layout.strides[d]), -call.value(layout.sizes[d]), d))
    return tuple(order) if _is_packed(call, layout, reversed(order)) else None


def pointwise(call: Call, sizes: tuple[Size, ...], operands: Sequence[Layout]) -> Layout:
    """The layout of an elementwise result of shape `sizes` (the operands' broadcast shape). Beside an operand
    without dims, a number say, shapes are not equal, and dims are sorted: unless there are some of size 1,
    that says nothing new."""
    if not sizes:
        return contiguous(sizes)
    given, operands = operands, [o for o in operands if o.sizes]
    first, ones = operands[0], any(call.decide(sz.eq(size, 1)) for size in sizes)
    if not ones and all(o is first for o in operands) and first.dense and first.sizes == sizes:
        return first
    if ones and len(operands) < len(given):
        if all(
            _same(call, o.sizes, sizes) and _same(call, o.strides, contiguous(sizes).strides)
            for o in operands
        ):
            return contiguous(sizes)
    elif all(_same(call, o.sizes, sizes) for o in operands):
        if all(is_contiguous(call, o) for o in operands):
            return contiguous(sizes)
        if len(sizes) == 4 and ones:  # without a dim of size 1 the strides are these anyway
            if all(_is_packed(call, o, (1, 3, 2, 0)) for o in operands):
                return channels_last(sizes)
        if all(_same(call, o.strides, first.strides) for o in operands) and is_dense(call, first):
            return Layout(sizes, first.strides, dense=True)
    return _allocate(sizes, _sorted_dims(call, sizes, operands))


def copied(call: Call, layout: Layout) -> Layout:
    """The layout of a copy or cast of a tensor (ATen/TensorConversions.cpp, `_to_copy`): what is dense keeps
    its strides, also those of dims of size 1; of all else the dims are sorted (ATen/ExpandUtils.cpp,
    `infer_dense_strides`), and what was expanded is no longer."""
    if is_dense(call, layout):
        return layout
    return _allocate(layout.sizes, _sorted_dims(call, layout.sizes, [layout]))


def _same(call: Call, a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(x is y or call.decide(sz.eq(x, y)) for x, y in zip(a, b))


def _sorted_dims(call: Call, sizes: tuple[Size, ...], operands: Sequence[Layout]) -> list[int]:
    """Dims from inner to outer: torch's insertion sort, whose comparison may be undecided."""
    rank = len(sizes)
    rows = [_broadcast_strides(call, sizes, o) for o in operands]
    perm = list(reversed(range(rank)))
    for i in range(1, rank):
        moving = i
        for other in reversed(range(i)):
            order = _compare(call, sizes, rows, perm[other], perm[moving])
            if order > 0:
                perm[other], perm[moving] = perm[moving], perm[other]
                moving = other
            elif order < 0:
                break
    return perm


def _broadcast_strides(call: Call, sizes: tuple[Size, ...], operand: Layout) -> list[Size]:
    """Strides aligned to `sizes`, 0 where the operand is broadcast."""
    missing = len(sizes) - len(operand.sizes)
    row: list[Size] = [sz.const(0)] * missing
    for size, stride, full in zip(operand.sizes, operand.strides, sizes[missing:]):
        broadcast = size is not full and call.decide(sz.eq(size, 1)) and not call.decide(sz.eq(full, 1))
        row.append(sz.const(0) if broadcast else stride)
    return row


def _compare(call: Call, sizes: Sequence[Size], rows: Sequence[Sequence[Size]], a: int, b: int) -> int:
    """-1 if dim `a` is inner to dim `b`, 1 if outer, 0 if no operand tells."""
    for row in rows:
        if call.decide(sz.eq(row[a], 0)) or call.decide(sz.eq(row[b], 0)):
            continue
        if call.decide(sz.lt(row[a], row[b])):
            return -1
        if call.decide(sz.lt(row[b], row[a])):
            return 1
        if call.decide(sz.lt(sizes[b], sizes[a])):
            return 1
    return 0
